"""The formula: synchronized batch norm as operations that autograd knows. For every device.

Problem: the shards depend on each other through mean and variance of the batch, so gradients and
their derivatives are easily wrong when they are written by hand.

Idea: batch norm in evaluation mode is an affine map of each channel, one kernel on every device,
with derivatives of any order by its input, its weight W and its bias B. With m, the mean rounded
to the dtype of x,

    y = (x - m) * W + B,    W = weight / sqrt(denominator),    B = bias - (mean - m) * W

W and B, vectors of length C in float64, carry all derivatives by mean and variance, and the
rounding error of m. Mean and variance are merged, by ordinary operations, from the moments of the
shards. Only these have a gradient of our own: it is the same affine map again,

    dx = (x - mean) * 2 dvar / n + dmean / n

so it also has derivatives. Saved for backward are x and vectors of length C, each in the thread of
its replica, where hooks on saved tensors (such as activation checkpoints) see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched
from replication.groups.replicas import hidden_from_hooks
from syncbn.channels import (
    accumulation_dtype,
    constant_tensor,
    in_float64,
    memory_format,
    per_channel,
    values_per_channel,
    with_usual_strides,
)
from syncbn.moments import is_large, moments
from syncbn.processes import Ranks
from syncbn.recomputation import Record
from syncbn.statistics import CountBatch, LayerCall, Moments, all_match, is_single, merge


class Reply(NamedTuple):
    """The moments of the batch, and the affine map of each channel."""

    batch: Moments
    scale: Tensor
    shift: Tensor


class Formula:
    """A shard, ready to be normalized: in the accumulation dtype, with its moments."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.records_graph = call, torch.is_grad_enabled()
        x = call.x.to(accumulation_dtype(call.x.dtype))
        with torch.no_grad():
            mean, var = moments(x)
        #: What is subtracted from x, ``(C,)`` in float64.
        self.center: Tensor | float = 0.0
        if x.is_cpu and is_large(mean, var):
            center = mean.to(x.dtype).nan_to_num_(0.0, 0.0, 0.0)
            x, self.center = x - per_channel(center, x), center.double()
        #: Rounded to half precision at the end only.
        self.x = x
        #: Its moments, to which `connect` gives derivatives.
        self.moments = self.own = Moments(values_per_channel(x), mean, var)

    def measured(self) -> Moments:
        return self.own

    def connect(self) -> None:
        """Connects the moments with x, which is saved for that."""
        n, mean, var = self.own
        if torch.is_grad_enabled() and self.x.requires_grad:
            args = self.x, mean - self.center, var
            mean, var = _Measured.apply(*args)  # type: ignore[no-untyped-call]
            self.moments = Moments(n, mean + self.center, var)

    @staticmethod
    def merge(shards: Sequence[Formula], count_batch: CountBatch) -> list[Reply]:
        counts: list[Any] = [shard.own.n for shard in shards]
        home, n = shards[0].own.mean.device, sum(counts)
        shares = tuple([own / max(n, 1) for own in counts])
        means = torch.stack([shard.moments.mean.to(home) for shard in shards])
        variances = torch.stack([shard.moments.var.to(home) for shard in shards])
        batch = Moments(n, *merge(constant_tensor(shares, home, torch.float64), means, variances))
        if not is_single(n):
            count_batch().update(batch)
        # The gradients of copies of one parameter are added before they are rounded.
        if all_match([shard.call for shard in shards]):
            return [shards[0].reply(batch)] * len(shards)
        return [shard.reply(batch) for shard in shards]

    def merge_ranks(self, ranks: Ranks, count_batch: CountBatch) -> Reply:
        self.connect()
        n, counts, *rows = ranks.gathered(*self.own)
        total = counts.sum()
        batch = Moments(n if isinstance(n, int) else total, *merge(counts / total, *rows))
        if not is_single(batch.n):
            count_batch().update(batch)
        return self.reply(with_derivatives(batch, [self.moments], ranks.with_summed_gradient))

    def reply(self, batch: Moments) -> Reply:
        return Reply(batch, *affine_map(self.call, batch))

    def output(self, reply: Reply) -> Tensor:
        vectors = reply.batch.mean, reply.scale, reply.shift
        mean, scale, shift = (vector.to(self.own.mean.device) for vector in vectors)
        return affine(self.x, mean - self.center, scale, shift).to(self.call.x.dtype)

    def record(self, reply: Reply) -> Record:
        batch = reply.batch
        return Record(self.own, batch.detach(), self.records_graph, batch.mean.requires_grad)

    def recomputed(self, record: Record) -> Reply:
        with hidden_from_hooks():
            batch = with_derivatives(record.batch, [self.moments])
            if record.requires_grad and not batch.mean.requires_grad:
                # Perhaps only the inputs of other replicas did.
                batch.mean.requires_grad_(), batch.var.requires_grad_()
            return self.reply(batch)


def with_derivatives(
    batch: Moments, own: Sequence[Moments], of_ranks: Callable[[Tensor], Tensor] | None = None
) -> Moments:
    """Gives the moments of a batch derivatives by the moments of some of its parts."""
    # The rest of the batch is constant, or on other ranks: see `Ranks.with_summed_gradient`. Sums
    # about the mean of the batch, a constant here, make the derivatives of the parts independent
    # of each other. Only zeros, which carry these derivatives, are added to `batch`.
    sums = torch.zeros_like(batch.mean)
    for n, mean, var in own:
        apart = mean.to(sums.device) - batch.mean
        sums = sums + n * torch.stack((apart, var.to(sums.device) + apart.square()))
    zeros = (sums - sums.detach()) / (batch.n + (batch.n == 0))
    if of_ranks is not None and zeros.requires_grad:
        zeros = of_ranks(zeros)
    drift, squares = zeros.unbind()
    return Moments(batch.n, batch.mean + drift, batch.var + squares - drift.square())


def affine_map(call: LayerCall, batch: Moments) -> tuple[Tensor, Tensor]:
    """Returns the scale of each channel and the output at its mean, ``(C,)`` in float64."""
    _, weight, bias, denominator = call
    scale = denominator.of(batch.var).rsqrt()
    if weight is not None:
        scale = scale * in_float64(weight).to(scale.device)
    return scale, torch.zeros_like(scale) if bias is None else in_float64(bias).to(scale.device)


def affine(
    x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, *, one_pass: bool = True
) -> Tensor:
    """Computes ``(x - mean) * scale + shift`` for each channel, given vectors in float64.

    In one pass, no mean may be large on the CPU (see `syncbn.moments.is_large`).
    """
    rounded = mean.detach().to(x.dtype)
    shift = shift - (mean - rounded) * scale
    if not one_pass or not x.numel():  # by which the second derivative of one pass divides
        return (x - per_channel(rounded, x)) * per_channel(scale, x) + per_channel(shift, x)
    weight, bias, center = (v.to(x.dtype).to(x.device) for v in (scale, shift, rounded))
    one = torch.ones_like(center)
    y = torch.native_batch_norm(x, weight, bias, center, one, False, 0.0, 0.0)[0]
    if 1 in x.shape and y.requires_grad:
        y.register_hook(partial(_in_format, memory_format(x)))
    return y


def _in_format(layout: torch.memory_format, dy: Tensor | None) -> Tensor | None:
    """Returns a gradient in the format of its input, as `with_usual_strides` explains."""
    if dy is None or is_batched(dy):
        return dy
    return with_usual_strides(dy.contiguous(memory_format=layout))


class _Measured(Function):
    """Gives the moments of a shard, which are known already, their derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        mean = mean.view_as(mean)  # as an output, it is saved with its derivative
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        x, mean = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None  # called by the engine without any gradient
        n = max(1, values_per_channel(x))
        dmean, dvar = (torch.zeros_like(mean) if grad is None else grad / n for grad in grads)
        return affine(x, mean, 2 * dvar, dmean), None, None
