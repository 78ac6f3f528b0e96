"""The five kernels of a synchronized layer, and the devices that have them.

`torch.nn.SyncBatchNorm` is made of five kernels, which do all passes over a shard and the merge.
torch has them for accelerators only. On the CPU, the functions of this module stand for them, with
the same names and arguments, each composed of a few operations that torch has there:

=====================================  =========================================================
`batch_norm_stats`                     mean and ``1 / sqrt(var + eps)`` of a shard
`batch_norm_gather_stats_with_counts`  the same of the batch, and the update of its buffers
`batch_norm_elemt`                     the output of a shard
`batch_norm_backward_reduce`           the two sums of backward: of dy, and of dy * (x - mean)
`batch_norm_backward_elemt`            the gradient of a shard
=====================================  =========================================================

The output and the gradient of a shard are affine maps of each channel of x. So is batch norm in
evaluation mode (`native_batch_norm` with given moments), in one pass. On the CPU it computes
x * scale + (shift - mean * scale), which loses digits if a mean is large compared with the
standard deviation. Such means stay in float64, so that their merge loses nothing, and the kernels
that get one subtract it from x first. Otherwise vectors of length C are in the accumulation dtype.

The methods of `Kernels` call them with what they take: kernels of accelerators refuse an empty
shard, and some buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replication._torch import has_kernels
from syncbn.channels import (
    HALF,
    accumulation_dtype,
    constant_tensor,
    in_dtype,
    in_format_of,
    memory_format,
    per_channel,
    values_per_channel,
)
from syncbn.statistics import CountBatch, KernelMoments, RunningStatistics, is_large, moments


class Kernels(NamedTuple):
    """The five kernels of a type of device."""

    stats: Callable[..., Any]
    gather_stats: Callable[..., Any]
    elemt: Callable[..., Any]
    backward_reduce: Callable[..., Any]
    backward_elemt: Callable[..., Any]

    @property
    def are_on_host(self) -> bool:
        """Whether they compute in the thread that calls them."""
        return self is ON_CPU

    def measure(self, x: Tensor, eps: float) -> KernelMoments:
        """Returns the moments of a shard."""
        n = values_per_channel(x)
        if n or self.are_on_host:
            mean, inverse = self.stats(x, eps)
        else:
            mean = x.new_zeros(x.size(1), dtype=accumulation_dtype(x.dtype))
            inverse = torch.full_like(mean, eps**-0.5)
        return KernelMoments(n, mean, inverse, eps)

    def merge_moments(
        self,
        x: Tensor,
        own: KernelMoments,
        n: int | Tensor,
        counts: Tensor,
        means: Tensor,
        inverses: Tensor,
        count_batch: CountBatch,
    ) -> KernelMoments:
        """Merges the moments of k shards, ``(k, C)`` each, and updates the running statistics.

        One of the shards is x, with its ``own`` moments. The batch has n values per channel.
        """
        running = count_batch()
        # The kernel updates buffers if n is above 1, and torch's only buffers of its dtype, by a
        # momentum that is a number. An n that the host does not know is above 1 if the shard has
        # several values. Only the dtype of its first argument matters.
        updates = (n if isinstance(n, int) else own.n) > 1
        if self is not ON_CPU:
            fits = running.mean is None or running.mean.dtype == means.dtype
            updates = updates and fits and type(running.momentum) is float
        running_mean, running_var, momentum = running if updates else RunningStatistics()
        args: Any = means, inverses, running_mean, running_var, float(momentum), own.eps, counts
        mean, inverse = self.gather_stats(x if self is ON_CPU else means, *args)
        batch = KernelMoments(n, mean, inverse, own.eps)
        if not updates:
            running.update(batch.mean_and_variance())
        return batch

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: KernelMoments
    ) -> Tensor:
        """Returns the output of a shard."""
        if not x.numel():
            return torch.empty_like(x, memory_format=memory_format(x))
        return self.elemt(x, weight, bias, *batch[1:])  # type: ignore[no-any-return]

    def reduce_gradient(
        self, dy: Tensor, x: Tensor, batch: KernelMoments, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns the two sums of a shard, and the gradients of weight, if any, and bias."""
        if not x.numel():
            zeros = batch.mean.new_zeros(x.size(1), dtype=accumulation_dtype(x.dtype))
            return zeros, zeros, weight if weight is None else zeros, zeros
        args = dy, x, batch.mean, batch.inverse, weight, True, True, True
        sum_dy, sum_dy_xmu, dweight, dbias = self.backward_reduce(*args)
        # Only beside a weight does the kernel compute the gradient of a bias.
        return sum_dy, sum_dy_xmu, dweight, sum_dy if dbias is None else dbias

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
        n, (sum_dy, sum_dy_xmu) = batch.n, sums
        if isinstance(n, int):
            if n >= 2**31:  # the kernel divides by an int32
                sum_dy, sum_dy_xmu, n = sum_dy / n, sum_dy_xmu / n, 1
            n = constant_tensor((n,), x.device, torch.int32)
        args = dy, x, batch.mean, batch.inverse, weight, sum_dy, sum_dy_xmu, n
        return self.backward_elemt(*args)  # type: ignore[no-any-return]


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes mean and ``1 / sqrt(var + eps)`` of each channel, ``(C,)`` in float64."""
    mean, var = moments(input)
    return mean, (var + eps).rsqrt_()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merges the moments of k shards, ``(k, C)`` each, and updates the buffers.

    ``counts``, ``(k,)``, are positive. Only the dtype of ``input`` matters.
    """
    # Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    # Variances", 1979.
    n = sum(counts.tolist())
    share = counts / n
    if input.dtype == torch.float64:
        # About one of the means, so that equal means give the same mean, to the last digit. Inputs
        # of other dtypes have fewer digits than the means.
        pivot = mean[0].nan_to_num(0.0, 0.0, 0.0)
        merged = torch.addmv(pivot, (mean - pivot).T, share)
    else:
        merged = share @ mean
    centered = mean - merged
    var_plus_eps = share @ invstd.pow(-2).addcmul_(centered, centered)
    inverse = var_plus_eps.rsqrt()
    if input.dtype != torch.float64 and not is_large(merged, var_plus_eps):
        merged, inverse = merged.float(), inverse.float()
    # Hidden from autograd, as torch's kernels do it: the graph of a forward on one device may have
    # saved a buffer without needing its value.
    if running_mean is not None:
        _average(running_mean.data, merged, momentum)
    if running_var is not None:
        unbiased = var_plus_eps.sub_(eps).relu_().mul_(n / (n - 1))
        _average(running_var.data, unbiased, momentum)
    return merged, inverse


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``(input - mean) * invstd * weight + bias``. ``eps`` is not used."""
    scale = invstd if weight is None else invstd * weight
    return _affine(input, mean, scale, bias, out)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """Sums ``grad_out`` and ``grad_out * (input - mean)``.

    Then come the gradients of weight and bias, None without a weight. The last three arguments,
    what to compute, are always true here.
    """
    center = in_dtype(mean, accumulation_dtype(input.dtype))
    one, mask = torch.ones_like(center), [False, True, True]
    if input.dtype in HALF:  # with other strides torch would round each product
        input = in_format_of(input, input)
    args: Any = grad_out, input, one, center, one, None, None, False, 0.0, mask
    _, sum_dy_xmu, sum_dy = torch.ops.aten.native_batch_norm_backward(*args)
    if mean.dtype == torch.float64:
        sum_dy_xmu = sum_dy_xmu - (mean - center) * sum_dy
    if weight is None:
        return sum_dy, sum_dy_xmu, None, None
    dweight, dbias = in_dtype(sum_dy_xmu * invstd, weight.dtype), in_dtype(sum_dy, weight.dtype)
    return sum_dy, sum_dy_xmu, dweight, dbias


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Computes the gradient of a shard, given the sums and the counts of all shards."""
    dtype = accumulation_dtype(input.dtype)
    scale = invstd if weight is None else invstd * weight
    n = -(count.item() if count.numel() == 1 else count.sum().item())
    # In this order, so that a channel without variance does not leave the range of float32.
    slope, shift = sum_dy_xmu / n * invstd * invstd * scale, sum_dy / n * scale
    # Half precision is rounded once, at the end.
    dx = _affine(in_dtype(input, dtype), mean, slope, shift)
    dx.addcmul_(in_dtype(grad_out, dtype), per_channel(scale, dx))
    return in_dtype(dx, input.dtype)


ON_CPU = Kernels(
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


@lru_cache
def kernels_for(kind: str) -> Kernels | None:
    """The kernels of a type of device, or None if it lacks one of them."""
    if kind == "cpu":
        return ON_CPU
    names = [kernel.__name__ for kernel in ON_CPU]
    return Kernels(*[getattr(torch, n) for n in names]) if has_kernels(kind, *names) else None


def _affine(
    x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Computes ``(x - mean) * scale + shift`` for each channel, in the dtype of x."""
    dtype = accumulation_dtype(x.dtype)
    center, scale = in_dtype(mean, dtype), in_dtype(scale, dtype)
    shift = None if shift is None else in_dtype(shift, dtype)
    if mean.dtype == torch.float64:  # it may be large
        correction = (center - mean) * scale
        shift = correction if shift is None else shift + correction
        y = (x - per_channel(center, x)).mul_(per_channel(scale, x)).add_(per_channel(shift, x))
        return in_dtype(y, x.dtype) if out is None else out.copy_(y)
    args: Any = x, scale, shift, center, torch.ones_like(center), False, 0.0, 0.0
    if out is None:
        return torch.native_batch_norm(*args)[0]
    unused = center.new_empty(0), center.new_empty(0)
    return torch.native_batch_norm(*args, out=(out, *unused))[0]


def _average(running: Tensor, new: Tensor, momentum: float) -> None:
    if running.dtype in HALF:  # in which a new value may be infinite
        running.copy_(running.to(new.dtype).lerp_(new, momentum))
    else:
        running.lerp_(in_dtype(new, running.dtype), momentum)
