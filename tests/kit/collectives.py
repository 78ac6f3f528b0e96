"""The collectives, each with an oracle that computes all members' results in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replication import Group, SoloGroup, execute_replication_callbacks, parallel_apply, replicate
from tests.kit.devices import several

#: The tensors that one member has, or gets.
Tensors = tuple[Tensor, ...]


class Member(nn.Module):
    """Calls a function with its group."""

    group: Group = SoloGroup()

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.group = ctx.group(copy_id)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.group, *arguments)


def in_replicas(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    devices: Sequence[str] | None = None,
) -> list[Any]:
    """``function(group, *arguments[i])`` in replica i; what each returned."""
    devices = devices or several(len(arguments))
    replicas = replicate(Member(), devices)
    execute_replication_callbacks(replicas)
    inputs = [(function, *own) for own in arguments]
    return parallel_apply(replicas, inputs, devices=devices)


class Case(NamedTuple):
    """A collective."""

    #: Shapes of a member's tensors, by its rank and the number of members.
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    #: What a member calls.
    call: Callable[..., Tensors]
    #: What all members get, of what all of them have.
    oracle: Callable[[list[Tensors]], list[Tensors]]


def reduced(op: str, tensors: list[Tensor]) -> Tensor:
    """``op`` over tensors of one shape."""
    stacked = torch.stack(tensors)
    if op == "product":
        return stacked.prod(0)
    return getattr(stacked, {"max": "amax", "min": "amin"}.get(op, op))(0)


def _all_reduce(op: str) -> Case:
    return Case(
        lambda rank, size: [(2, 3)],
        lambda group, x: (group.all_reduce(x, op),),
        lambda members: [(reduced(op, [x for (x,) in members]),)] * len(members),
    )


def _reduce_scatter(op: str) -> Case:
    return Case(
        lambda rank, size: [(2, to + 1) for to in range(size)],
        lambda group, *xs: (group.reduce_scatter(xs, op),),
        lambda members: [
            (reduced(op, [xs[rank] for xs in members]),) for rank in range(len(members))
        ],
    )


def _broadcast(src: int) -> Case:
    return Case(
        lambda rank, size: [(2, 3)],
        lambda group, x: (group.broadcast(x, src % group.size),),
        lambda members: [members[src % len(members)]] * len(members),
    )


def _all_gather(shape: Callable[[int, int], tuple[int, ...]]) -> Case:
    return Case(
        lambda rank, size: [shape(rank, size)],
        lambda group, x: group.all_gather(x),
        lambda members: [tuple(x for (x,) in members)] * len(members),
    )


#: Each collective, given a tensor and perhaps an op; what a member gets.
EACH: dict[str, Callable[..., Tensors]] = {
    "all_reduce": lambda group, x, op="sum": (group.all_reduce(x, op),),
    "all_gather": lambda group, x, op="sum": group.all_gather(x),
    "reduce_scatter": lambda group, x, op="sum": (group.reduce_scatter([x] * group.size, op),),
    "broadcast": lambda group, x, op="sum": (group.broadcast(x, group.size - 1),),
}


def _parts(members: list[Tensors], size: int) -> list[list[Tensors]]:
    return [members[start : start + size] for start in range(0, len(members), size)]


OPS = ("sum", "mean", "max", "min", "product")

CASES = {
    **{f"all_reduce-{op}": _all_reduce(op) for op in OPS},
    **{f"reduce_scatter-{op}": _reduce_scatter(op) for op in OPS},
    "broadcast-0": _broadcast(0),
    "broadcast-last": _broadcast(-1),
    "all_gather-even": _all_gather(lambda rank, size: (2, 2)),
    "all_gather-uneven": _all_gather(lambda rank, size: (max(3 - rank, 0), 2)),
    "all_gather-one_empty": _all_gather(
        lambda rank, size: (2 * (rank != size - 1) + (size == 1), 2)
    ),
    # torch.cat treats an empty vector in its own way.
    "all_gather-vectors": _all_gather(lambda rank, size: (rank,)),
    "all_gather-scalars": _all_gather(lambda rank, size: ()),
    # Whose result depends on two collectives, one on the other's result.
    "two": Case(
        lambda rank, size: [(rank + 1, 2)],
        lambda group, x: (
            group.all_reduce((x - torch.cat(group.all_gather(x)).mean(0)).square().sum(0)),
        ),
        lambda members: [
            (sum((x - torch.cat([x for (x,) in members]).mean(0)).square().sum(0)
                 for (x,) in members),)
        ]
        * len(members),
    ),
    "split": Case(
        lambda rank, size: [(rank + 1, 2)],
        lambda group, x: group.split(2).all_gather(x),
        lambda members: [
            result
            for part in _parts(members, 2)
            for result in [tuple(x for (x,) in part)] * len(part)
        ],
    ),
}  # fmt: skip


def leaves(case: Case, size: int, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Random tensors for all members, the same in each process."""
    generator = torch.Generator().manual_seed(size)
    return [
        tuple(
            torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
            for shape in case.shapes(rank, size)
        )
        for rank in range(size)
    ]


def upstream(outputs: Sequence[Tensors]) -> list[Tensors]:
    """Random gradients of all members' outputs, the same in each process."""
    generator = torch.Generator().manual_seed(7)
    return [
        tuple(torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in own)
        for own in outputs
    ]


def derivatives(
    outputs: list[Tensors], inputs: list[Tensors]
) -> tuple[list[Tensor], list[Tensor]]:
    """First and second derivatives of a nonlinear function of the outputs, by the inputs."""
    weights = [g for own in upstream(outputs) for g in own]
    ys = [y for own in outputs for y in own]
    xs = [x for own in inputs for x in own]
    loss = sum((g * y.square()).sum() for g, y in zip(weights, ys, strict=True))
    first = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
    penalty = sum(g.square().sum() for g in first)
    second = torch.autograd.grad(penalty, xs, materialize_grads=True)
    return [g.detach() for g in first], list(second)
