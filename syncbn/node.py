"""The autograd node of the fused way: one for all shards.

    x_0, x_1, .., weight, bias ──▶ Normalize ──▶ y_0, y_1, ..

Backward, the engine calls it once: one reduction per shard, sums added in replica order, and one
pass per shard. No thread waits in it: a queue or a barrier there would deadlock where the engine
runs all nodes on one thread. It saves x and vectors of length C, and keeps nothing else, so
several backwards of one graph may run at the same time. Gradients that need derivatives of their
own are left to the textbook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched
from replication.devices import current_streams, record_stream, use_streams
from syncbn.channels import copied, in_format_of, memory_format
from syncbn.statistics import KernelMoments
from syncbn.textbook import gradients


def normalized(shards: Sequence[Any], batches: Sequence[KernelMoments]) -> Sequence[Tensor]:
    """Returns the outputs. They depend on all inputs, and on the parameters of the first shard.

    Shards are `syncbn.fused.Fused`. Where several are on the CPU, they compute their outputs.
    """
    # All have copies of one parameter, so the first may take the sum of their gradients.
    args = shards, batches, shards[0].weight, shards[0].bias, *[shard.x for shard in shards]
    return _normalize(*args)  # type: ignore[no-any-return]


# Hooks on saved tensors belong to a thread: an activation checkpoint must see what its replica
# saves. The parameters only make the result require gradients.
class Hold(Function):
    """Saves the input of a replica in its own thread, for the joint node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None, None]:
        return dx, None, None


class Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        shards: Sequence[Any],
        batches: Sequence[KernelMoments],
        weight: Tensor | None,
        bias: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.batches = shards[0].kernels, batches
        ctx.holders = [shard.holder for shard in shards]
        ctx.streams = current_streams([x.device for x in xs])
        saved = [x if h is None else None for x, h in zip(xs, ctx.holders, strict=True)]
        ctx.save_for_backward(*saved, weight, *[shard.weight for shard in shards[1:]])
        if len(xs) > 1 and ctx.kernels.are_on_host:
            return tuple([torch.empty_like(x, memory_format=memory_format(x)) for x in xs])
        pairs = zip(shards, batches, strict=True)
        return tuple([s.kernels.normalized(s.x, s.weight, s.bias, batch) for s, batch in pairs])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        k, saved = len(dys), ctx.saved_tensors
        used = [dy for dy in dys if dy is not None]
        if not used:  # called by the engine without any gradient
            return (None,) * (4 + k)
        xs = [
            x if holder is None else holder.saved_tensors[0]
            for x, holder in zip(saved, ctx.holders, strict=False)
        ]
        for dy in used:
            if dy.device in ctx.streams and not is_batched(dy):
                record_stream(dy, ctx.streams[dy.device])  # it may come from another stream
        needs_derivatives = torch.is_grad_enabled() or any(map(is_batched, used))
        with use_streams(ctx.streams):
            pairs = zip(dys, xs, strict=True)
            all_dys = [torch.zeros_like(x) if dy is None else dy for dy, x in pairs]
            if needs_derivatives:
                needs = ctx.needs_input_grad[2:]
                grads = gradients(needs, ctx.batches[0], all_dys, xs, saved[k])
            else:
                grads = _gradients(ctx, all_dys, xs, saved[k:])
            return None, None, *grads


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Callable[..., Any] = super(Function, Normalize).apply


def _gradients(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and all x, where they are needed."""
    needs_dweight, needs_dbias, *needs = ctx.needs_input_grad[2:]
    batches, kernels = ctx.batches, ctx.kernels
    inverse = batches[0].inverse
    dys = [in_format_of(dy, x) for dy, x in zip(dys, xs, strict=True)]
    sums = [
        torch.stack(kernels.reduced(dy, x, batch, None)[:2]).to(inverse.device)
        for dy, x, batch in zip(dys, xs, batches, strict=True)
    ]
    # Two kernels for any number, where that is less.
    total = torch.stack(sums).sum(0) if len(sums) > 3 else reduce(torch.add, sums)
    dbias, dweight = total[0], total[1] * inverse if needs_dweight else None
    totals = copied([total], [x.device for x in xs])
    dxs = [
        kernels.gradient(dy, x, batch, weight, total_here.unbind()) if need else None
        for need, dy, x, batch, weight, (total_here,) in zip(
            needs, dys, xs, batches, weights, totals, strict=True
        )
    ]
    return [dweight, dbias if needs_dbias else None, *dxs]
