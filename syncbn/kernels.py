"""The five kernels of a synchronized layer, and the devices that have them.

`torch.nn.SyncBatchNorm` is made of five kernels, which do all passes over a shard and the merge.
torch has them for accelerators only. On the CPU, the functions of `syncbn.cpu_kernels` stand for
them, with the same names and arguments.

=====================================  =========================================================
`batch_norm_stats`                     mean and ``1 / sqrt(var + eps)`` of a shard
`batch_norm_gather_stats_with_counts`  the same of the batch, and the update of its buffers
`batch_norm_elemt`                     the output of a shard
`batch_norm_backward_reduce`           the two sums of backward: of dy, and of dy * (x - mean)
`batch_norm_backward_elemt`            the gradient of a shard
=====================================  =========================================================

The methods of `Kernels` call them with what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from replication.extending import has_kernels
from syncbn import cpu_kernels
from syncbn.channels import (
    HALF,
    accumulation_dtype,
    constant_tensor,
    in_dtype,
    memory_format,
    values_per_channel,
)
from syncbn.statistics import KernelMoments, RunningStatistics

#: The names of the kernels, in torch and in `syncbn.cpu_kernels`.
NAMES = (
    "batch_norm_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)


@dataclass(frozen=True)
class Kernels:
    """The five kernels of a type of device."""

    stats: Callable[..., Any]
    gather_stats: Callable[..., Any]
    elemt: Callable[..., Any]
    backward_reduce: Callable[..., Any]
    backward_elemt: Callable[..., Any]
    #: Whether they compute in the thread that calls them.
    are_on_host: bool = False

    def measure(self, x: Tensor, eps: float) -> KernelMoments:
        """Returns the moments of a shard."""
        n = values_per_channel(x)
        if n:
            mean, inverse = self.stats(x, eps)
        else:
            dtype = torch.float64 if self.are_on_host else accumulation_dtype(x.dtype)
            mean = x.new_zeros(x.size(1), dtype=dtype)
            inverse = torch.full_like(mean, eps**-0.5)
        return KernelMoments(n, mean, inverse, eps)

    def merge_moments(
        self,
        x: Tensor,
        own: KernelMoments,
        n: int | None,
        counts: Tensor,
        means: Tensor,
        inverses: Tensor,
        running: RunningStatistics,
    ) -> tuple[Tensor, Tensor]:
        """Merges the moments of k shards, ``(k, C)`` each, and updates the running statistics.

        Returns the mean and the inverse of the batch. One of the shards is x, with its ``own``
        moments. The batch has n values per channel, or an unknown number.
        """
        if (running.mean is None and running.var is None) or (n is not None and n < 2):
            running = RunningStatistics()  # as torch does, which has no unbiased variance then
        mean, var, momentum = running
        if self.are_on_host:  # where the kernel takes buffers of any dtype
            args = x, means, inverses, mean, var, float(momentum), own.eps, counts
            return self.gather_stats(*args)  # type: ignore[no-any-return]
        # An unknown number is above 1 if this shard alone has several values.
        has_several = n is not None or (own.n or 0) > 1
        fits = {buffer.dtype for buffer in (mean, var) if buffer is not None} <= {means.dtype}
        # Only the dtype of the first argument matters.
        merged: Any = means, means, inverses
        if fits and has_several and isinstance(momentum, float):
            return self.gather_stats(*merged, mean, var, momentum, own.eps, counts)  # type: ignore[no-any-return]
        # Onto zeros the kernel writes the new values, already times a momentum that is a number.
        new = means.new_zeros(2, means.size(1))
        factor = momentum if isinstance(momentum, float) else 1.0
        result = self.gather_stats(*merged, *new.unbind(), factor, own.eps, counts)
        _update(running, new, None if has_several else counts.sum() > 1)
        return result  # type: ignore[no-any-return]

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: KernelMoments
    ) -> Tensor:
        """Returns the output of a shard."""
        if not x.numel():
            return torch.empty_like(x, memory_format=memory_format(x))
        return self.elemt(x, weight, bias, batch.mean, batch.inverse, batch.eps)  # type: ignore[no-any-return]

    def reduce_gradient(
        self, dy: Tensor, x: Tensor, batch: KernelMoments, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns the two sums of a shard, and the gradients of weight, if any, and bias.

        The second sum is in the dtype of the mean, in which both travel between ranks.
        """
        if not x.numel():
            zeros = torch.zeros_like(batch.mean)
            return zeros, zeros, weight if weight is None else zeros, zeros
        args = dy, x, batch.mean, batch.inverse
        if weight is not None:
            return self.backward_reduce(*args, weight, True, True, True)  # type: ignore[no-any-return]
        # Without a weight, kernels refuse to compute the gradients of parameters, or return empty
        # tensors, by the layout of x.
        sum_dy, sum_dy_xmu, *_ = self.backward_reduce(*args, None, True, False, False)
        return sum_dy, sum_dy_xmu, None, sum_dy

    def gradient(
        self,
        dy: Tensor,
        x: Tensor,
        batch: KernelMoments,
        weight: Tensor | None,
        sums: Sequence[Tensor],
    ) -> Tensor:
        """Returns the gradient of a shard, given the two sums of all."""
        if not x.numel():
            return torch.empty_like(x)
        (sum_dy, sum_dy_xmu), n, counts = sums, batch.n, batch.counts
        if n is not None:
            if n >= 2**31:  # the kernel divides by an int32
                sum_dy, sum_dy_xmu, n = sum_dy / n, sum_dy_xmu / n, 1
            counts = constant_tensor((n,), x.device, torch.int32)
        if weight is not None and weight.dtype in HALF:  # which contiguous x does not take
            weight = weight.float()
        args = dy, x, batch.mean, batch.inverse, weight, sum_dy, sum_dy_xmu, counts
        return self.backward_elemt(*args)  # type: ignore[no-any-return]


def in_one_dtype(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns parameters in one dtype, as the kernels take them beside half precision."""
    if weight is None or bias is None or weight.dtype == bias.dtype:
        return weight, bias
    return weight.float(), bias.float()


def _update(running: RunningStatistics, new: Tensor, is_counted: Tensor | None) -> None:
    """Updates buffers with new values, ``(2, C)``, rounded once.

    A momentum that is a number is in the new values already, and one that is a tensor is not.
    ``is_counted`` is a tensor of one bool where only the device knows whether the batch counts.
    """
    for buffer, value in zip((running.mean, running.var), new.unbind(), strict=True):
        if buffer is None:
            continue
        # Hidden from autograd, as torch's kernels do it.
        old, momentum = buffer.data, running.momentum
        into = old if is_counted is None else None
        if isinstance(momentum, float):
            merged = torch.add(value, old, alpha=1 - momentum, out=into)
        elif old.dtype == value.dtype:
            merged = torch.lerp(old, value, in_dtype(momentum, value.dtype), out=into)
        else:
            merged = old.to(value.dtype).lerp_(value, in_dtype(momentum, value.dtype))
        if is_counted is not None:
            merged = torch.where(is_counted, merged, old.to(merged.dtype))
        if merged is not old:
            old.copy_(merged)


ON_CPU = Kernels(
    cpu_kernels.batch_norm_stats,
    cpu_kernels.batch_norm_gather_stats_with_counts,
    cpu_kernels.batch_norm_elemt,
    cpu_kernels.batch_norm_backward_reduce,
    cpu_kernels.batch_norm_backward_elemt,
    are_on_host=True,
)


@lru_cache
def kernels_for(kind: str) -> Kernels | None:
    """The kernels of a type of device, or None if it lacks one of them."""
    if kind == "cpu":
        return ON_CPU
    return Kernels(*[getattr(torch, n) for n in NAMES]) if has_kernels(kind, *NAMES) else None
