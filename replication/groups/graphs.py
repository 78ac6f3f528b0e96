"""Collectives between processes as `torch.compile` sees them.

A call into `torch.distributed` would break the graph. But torch has operators for collectives that
stay in it. These are the collectives of `replication.groups.processes` that are built of them,
with the same derivatives, which consist of such operators as well. (Derivatives of derivatives are
none, because compiled code has none.)

Problem: the compiler makes one collective of two whose arguments are the same expression, and so
perhaps on one rank only: where two sizes are equal, say. The other rank would wait for ever.

Idea: each collective sends one value more, a number that no other collective of the graph sends.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from replication._torch import COMPILES_COLLECTIVES, constant_in_graphs
from replication.groups.base import Tensors, WithDerivative, may_overflow, reduce_tensors

#: What backends and operators share. Others break the graph.
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int32, torch.int64),
)

_tags = count()


@constant_in_graphs
def _next_tag() -> int:
    # float16 holds up to 2048. What follows the value is ignored.
    return next(_tags) % 2048


def stays_in_graph(name: str, tensors: Tensors, same_shape: bool = False, **_: Any) -> bool:
    """Whether `run_in_graph` has a collective, given its arguments."""
    # Without same_shape the lengths travel first, and the host waits for them.
    has_operators = name in ("all_reduce", "broadcast") or (name == "all_gather" and same_shape)
    return COMPILES_COLLECTIVES and has_operators and tensors[0].dtype in _DTYPES


def run_in_graph(
    name: str, tensor: Tensor, members: tuple[str, int, int], op: str = "", src: int = 0, **_: Any
) -> Tensors:
    """Runs a collective for which `stays_in_graph` is true.

    Args:
        name: The name of the method of `Group`.
        tensor: Its tensor.
        members: The name of the group in operators, the rank and the size.
        op: Of ``all_reduce``.
        src: Of ``broadcast``.
    """
    group, rank, size = members
    if name == "broadcast":
        return (_broadcast(group, src, rank, tensor),)
    if name == "all_gather":
        return tuple(row.clone() for row in _stack(group, size, tensor).unbind())
    if op in ("sum", "mean"):
        if op == "mean" and may_overflow(tensor):
            return (_sum(group, tensor / size),)
        total = _sum(group, tensor)
        return (total / size if op == "mean" else total,)
    return (reduce_tensors(_stack(group, size, tensor).unbind(), op),)  # type: ignore[arg-type]


def _sum(group: str, tensor: Tensor) -> Tensor:
    added = partial(_added, group, _next_tag())
    return _differentiable(added, added, tensor)


def _stack(group: str, size: int, tensor: Tensor) -> Tensor:
    tag = _next_tag()
    stacked, back = partial(_stacked, group, size, tag), partial(_sent_back, group, size, tag)
    return _differentiable(stacked, back, tensor)


def _broadcast(group: str, src: int, rank: int, tensor: Tensor) -> Tensor:
    tag = _next_tag()
    received, back = (
        partial(_received, group, src, tag),
        partial(_to_source, group, src, rank, tag),
    )
    return _differentiable(received, back, tensor)


def _differentiable(collective: Any, derivative: Any, tensor: Tensor) -> Tensor:
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return collective(tensor)  # type: ignore[no-any-return]
    return WithDerivative.apply(collective, derivative, tensor)  # type: ignore[no-any-return, no-untyped-call]


# -- operators -----------------------------------------------------------------------------------


def _tagged(tensor: Tensor, tag: int) -> Tensor:
    return torch.cat((tensor.reshape(-1), tensor.new_full((1,), tag)))


def _added(group: str, tag: int, tensor: Tensor) -> Tensor:
    c10d = torch.ops._c10d_functional
    total = c10d.wait_tensor(c10d.all_reduce(_tagged(tensor, tag), "sum", group))
    return total[:-1].view(tensor.shape)  # type: ignore[no-any-return]


def _received(group: str, src: int, tag: int, tensor: Tensor) -> Tensor:
    c10d = torch.ops._c10d_functional
    received = c10d.wait_tensor(c10d.broadcast(_tagged(tensor, tag), src, group))
    return received[:-1].view(tensor.shape)  # type: ignore[no-any-return]


def _to_source(group: str, src: int, rank: int, tag: int, grad: Tensor) -> Tensor:
    total = _added(group, tag, grad)
    # By a mask, because the compiler would leave out a sum on which nothing depends.
    return total.masked_fill(total.new_full((), rank != src, dtype=torch.bool), 0)


def _stacked(group: str, size: int, tag: int, tensor: Tensor) -> Tensor:
    c10d = torch.ops._c10d_functional
    gathered = c10d.all_gather_into_tensor(_tagged(tensor, tag), size, group)
    rows = c10d.wait_tensor(gathered).view(size, -1)
    return rows[:, :-1].reshape(size, *tensor.shape)  # type: ignore[no-any-return]


def _sent_back(group: str, size: int, tag: int, grads: Tensor) -> Tensor:
    c10d, rows = torch.ops._c10d_functional, grads.reshape(size, -1)
    tagged = torch.cat((rows, rows.new_full((size, 1), tag)), 1)
    lengths = [tagged.size(1)] * size
    parts = c10d.all_to_all_single(tagged.reshape(-1), lengths, lengths, group)
    received = c10d.wait_tensor(parts).view(size, -1)[:, :-1]
    return received.sum(0, dtype=grads.dtype).view(grads.shape[1:])  # type: ignore[no-any-return]
