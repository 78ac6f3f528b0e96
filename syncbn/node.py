"""The autograd node of the fused way: one for all shards of a process.

    x_0, x_1, .., weight, bias ──▶ Normalize ──▶ y_0, y_1, ..

Backward, the engine calls it once: one reduction per shard, sums added in replica order, and one
pass per shard. No thread waits in it: a queue or a barrier there would deadlock where the engine
runs all nodes on one thread. Between processes it has one shard, and a collective adds the sums of
all ranks. It saves x and vectors of length C, and keeps nothing else, so several backwards of one
graph may run at the same time. Gradients that need derivatives of their own are left to the
formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched
from replication.devices import current_streams, record_stream, use_streams
from syncbn.channels import (
    accumulation_dtype,
    constant_tensor,
    copied,
    in_float64,
    in_format_of,
    memory_format,
)
from syncbn.formula import Formula, with_derivatives
from syncbn.kernels import ON_CPU, Kernels
from syncbn.processes import Ranks
from syncbn.statistics import Denominator, KernelMoments, LayerCall

#: Stands for a weight of 0 where a gradient is divided by it.
_LEAST_WEIGHT = 1e-30


class Shard(Protocol):
    """A shard as the node sees it: `syncbn.fused.Fused`."""

    x: Tensor
    #: In the accumulation dtype.
    weight: Tensor | None
    bias: Tensor | None
    kernels: Kernels
    #: The node that saves x, if that is another one (see `Hold`).
    holder: Any


def normalized(
    shards: Sequence[Shard], batches: Sequence[KernelMoments], ranks: Ranks | None = None
) -> Sequence[Tensor]:
    """Returns the outputs. They depend on all inputs, and on the parameters of the first shard."""
    # All have copies of one parameter, so the first may take the sum of their gradients.
    first, xs = shards[0], [shard.x for shard in shards]
    if torch.is_grad_enabled():
        args = shards, batches, ranks, first.weight, first.bias, *xs
        return _normalize(*args)  # type: ignore[no-any-return]
    return _outputs(shards, batches)


def _outputs(shards: Sequence[Shard], batches: Sequence[KernelMoments]) -> list[Tensor]:
    """Computes the outputs. On the CPU, several replicas compute theirs in `Fused.output`."""
    are_unfilled = len(shards) > 1 and shards[0].kernels is ON_CPU
    return [
        torch.empty_like(shard.x, memory_format=memory_format(shard.x))
        if are_unfilled or not shard.x.numel()
        else shard.kernels.elemt(shard.x, shard.weight, shard.bias, mean, inverse, eps)
        for shard, (_, mean, inverse, eps) in zip(shards, batches, strict=True)
    ]


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
        shards: Sequence[Shard],
        batches: Sequence[KernelMoments],
        ranks: Ranks | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.batches, ctx.ranks = shards[0].kernels, batches, ranks
        ctx.holders = [shard.holder for shard in shards]
        ctx.streams = current_streams([x.device for x in xs])
        saved = [x if h is None else None for x, h in zip(xs, ctx.holders, strict=True)]
        ctx.save_for_backward(*saved, weight, *[shard.weight for shard in shards[1:]])
        return tuple(_outputs(shards, batches))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        k, saved = len(dys), ctx.saved_tensors
        used = [dy for dy in dys if dy is not None]
        if not used and ctx.ranks is None:  # the other ranks would wait for the sums of this one
            return (None,) * (5 + k)  # called by the engine without any gradient
        xs = [
            x if holder is None else holder.saved_tensors[0]
            for x, holder in zip(saved, ctx.holders, strict=False)
        ]
        for dy in used:
            if dy.device in ctx.streams and not is_batched(dy):
                record_stream(dy, ctx.streams[dy.device])  # it may come from another stream
        if torch.is_grad_enabled() or any(map(is_batched, used)):
            compute: Any = _gradients_by_formula
        else:
            compute = _gradients if ctx.ranks is None else _gradients_of_rank
        with use_streams(ctx.streams):
            pairs = zip(dys, xs, strict=True)
            all_dys = [torch.zeros_like(x) if dy is None else dy for dy, x in pairs]
            return None, None, None, *compute(ctx, all_dys, xs, saved[k:])


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Callable[..., Any] = super(Function, Normalize).apply


def _gradients(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and all x, where they are needed."""
    needs_dweight, needs_dbias, *needs = ctx.needs_input_grad[3:]
    n, mean, inverse, _ = ctx.batches[0]
    dys = [in_format_of(dy, x) for dy, x in zip(dys, xs, strict=True)]
    sums = [
        torch.stack(_reduced(ctx.kernels, dy, x, batch, None)[:2]).to(mean.device)
        for dy, x, batch in zip(dys, xs, ctx.batches, strict=True)
    ]
    # Two kernels for any number, where that is less.
    total = torch.stack(sums).sum(0) if len(sums) > 3 else reduce(torch.add, sums)
    dbias, dweight = total[0], total[1] * inverse if needs_dweight else None
    if n >= 2**31:  # the kernel divides by an int32
        total, n = total / n, 1
    dxs: list[Tensor | None] = [None] * len(xs)
    for i, (total_here,) in enumerate(copied([total], [x.device for x in xs])):
        if needs[i]:
            args = dys[i], xs[i], ctx.batches[i], weights[i], total_here, n
            dxs[i] = _gradient(ctx.kernels, *args)
    return [dweight, dbias if needs_dbias else None, *dxs]


def _gradients_of_rank(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns what `_gradients` returns, for the only shard of a process."""
    (x,), (dy,), (batch,), (weight,) = xs, dys, ctx.batches, weights
    dy = in_format_of(dy, x)
    # The kernel also computes the gradients of the parameters, if there is a weight.
    sum_dy, sum_dy_xmu, dweight, dbias = _reduced(ctx.kernels, dy, x, batch, weight)
    dx = None
    if ctx.needs_input_grad[-1]:
        sums = ctx.ranks.averaged(sum_dy, sum_dy_xmu)
        dx = _gradient(ctx.kernels, dy, x, batch, weight, sums, 1)
    if not ctx.needs_input_grad[4]:
        dbias = None  # there is no bias
    elif dbias is None:
        dbias = sum_dy  # there is no weight
    return [dweight, dbias, dx]


def _reduced(
    kernels: Kernels, dy: Tensor, x: Tensor, batch: KernelMoments, weight: Tensor | None
) -> Any:
    """Returns the two sums of a shard, and the gradients of weight and bias, if it has any."""
    if x.numel():
        args = dy, x, batch.mean, batch.inverse, weight, True, True, True
        return kernels.backward_reduce(*args)
    zeros = batch.mean.new_zeros(x.size(1), dtype=accumulation_dtype(x.dtype))
    return zeros, zeros, weight if weight is None else zeros, None


def _gradient(
    kernels: Kernels,
    dy: Tensor,
    x: Tensor,
    batch: KernelMoments,
    weight: Tensor | None,
    sums: Tensor,
    n: int,
) -> Tensor:
    """Returns the gradient of a shard, given the two sums of all, ``(2, C)``."""
    if not x.numel():
        return torch.empty_like(x)
    count = constant_tensor((n,), x.device, torch.int32)
    args = dy, x, batch.mean, batch.inverse, weight, *sums.unbind(), count
    return kernels.backward_elemt(*args)  # type: ignore[no-any-return]


def _gradients_by_formula(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns what `_gradients` returns, with derivatives of any order."""
    needs = ctx.needs_input_grad[3:]
    moments = ctx.batches[0].exact()
    with torch.enable_grad():
        # As views, because several replicas may have the same tensor. Gradients do not depend on
        # the bias.
        tensors: list[Any] = [t if t is None else t.view_as(t) for t in (weights[0], *xs)]
        weight, *views = tensors
        for view, need in zip(views, needs[2:], strict=True):
            # A `Hold` saves an input of the network as it is, which needs no gradient. But the
            # input of the node does, if the parameters do.
            view.requires_grad_(need or view.requires_grad)
        bias, of_ranks = torch.zeros_like(ctx.batches[0].mean).requires_grad_(), None
        if ctx.ranks is not None:
            weight = torch.ones_like(bias) if weight is None else weight
            # Not 0: the sums would be lost that the other ranks need. Not by a product, which is 0
            # under a default dtype of float16.
            is_tiny = weight.detach().abs() < _LEAST_WEIGHT
            weight = torch.where(is_tiny, weight + _LEAST_WEIGHT, weight)
            of_ranks = partial(_summed_over, ctx.ranks, moments.var + ctx.batches[0].eps, weight)
        denominator = Denominator(ctx.batches[0].eps)
        shards = [Formula(LayerCall(view, weight, bias, denominator)) for view in views]
        for shard in shards:
            shard.connect()
        batch = with_derivatives(moments, [s.moments for s in shards], of_ranks)
        reply = shards[0].reply(batch)
        ys = [shard.output(reply) for shard in shards]
    inputs = [t for t, need in zip((tensors[0], bias, *views), needs, strict=True) if need]
    options: Any = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
    grads = iter(torch.autograd.grad(ys, inputs, dys, **options))
    return [next(grads) if need else None for need in needs]


def _summed_over(ranks: Ranks, denominator: Tensor, weight: Tensor, tensor: Tensor) -> Tensor:
    """Returns the same tensor, whose gradient is added over the ranks."""
    # The gradient is that of mean and variance of the batch. What ranks add are the two
    # sums of `_gradients`, so that the others need not build a graph of their backward.
    scale = -in_float64(weight.detach()) * denominator.rsqrt()
    return ranks.with_summed_gradient(tensor, torch.stack((scale, scale / denominator / 2)))
