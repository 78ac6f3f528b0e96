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

They refuse what CUDA's kernels refuse, and return what those return, so that a call that fails on
a GPU fails on the CPU as well. There are two differences: vectors may be in float64 where CUDA's
are in the accumulation dtype, and an empty shard is refused in every layout.

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
from syncbn.statistics import KernelMoments, RunningStatistics, is_large, moments

#: The names of the kernels, in torch and here.
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
        """Returns the two sums of a shard, and the gradients of weight, if any, and bias."""
        if not x.numel():
            zeros = batch.mean.new_zeros(x.size(1), dtype=accumulation_dtype(x.dtype))
            return zeros, zeros, weight if weight is None else zeros, zeros
        # Without a weight, kernels refuse to compute the gradients of parameters, or return empty
        # tensors, by the layout of x.
        has_weight = weight is not None
        args = dy, x, batch.mean, batch.inverse, weight, True, has_weight, has_weight
        sum_dy, sum_dy_xmu, dweight, dbias = self.backward_reduce(*args)
        return (sum_dy, sum_dy_xmu, *((dweight, dbias) if has_weight else (None, sum_dy)))

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
        if weight is not None:  # of contiguous x in half precision, too, it is in float32
            weight = in_dtype(weight, accumulation_dtype(x.dtype))
        args = dy, x, batch.mean, batch.inverse, weight, sum_dy, sum_dy_xmu, counts
        return self.backward_elemt(*args)  # type: ignore[no-any-return]


def in_one_dtype(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns parameters in one dtype, as the kernels take them beside half precision."""
    if weight is None or bias is None or weight.dtype == bias.dtype:
        return weight, bias
    return weight.float(), bias.float()


def _update(running: RunningStatistics, new: Tensor, is_counted: Tensor | None) -> None:
    """Updates buffers with new values, rounded once, if the tensor is None or true.

    The new values, ``(2, C)``, are multiplied by a momentum that is a number, and not by a tensor.
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


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes mean and ``1 / sqrt(var + eps)`` of each channel, ``(C,)`` in float64."""
    _check_shard("batch_norm_stats", input)
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

    ``counts``, ``(k,)``, are positive, in the dtype of the buffers. Of ``input`` only the dtype
    matters.
    """
    dtype = input.dtype if running_mean is None else running_mean.dtype
    name, acc = "batch_norm_gather_stats_with_counts", accumulation_dtype(dtype)
    _check_vectors(name, mean.shape[-1:], (dtype,), running_mean, running_var)
    _check_vectors(name, (len(counts), mean.size(-1)), (acc, torch.float64), mean, invstd)
    _check_vectors(name, mean.shape[:1], (dtype, torch.float64), counts)
    # Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    # Variances", 1979.
    n = sum(counts.tolist())
    share = in_dtype(counts, mean.dtype) / n
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
    """Computes ``(input - mean) * invstd * weight + bias``. ``eps`` is not used.

    Weight and bias are of one dtype: that of the input, or its accumulation dtype.
    """
    name, acc = "batch_norm_elemt", _check_shard("batch_norm_elemt", input)
    of_weight = (acc, input.dtype) if weight is None else (weight.dtype,)
    _check_vectors(name, input.shape[1:2], (acc, input.dtype), weight)
    _check_vectors(name, input.shape[1:2], of_weight, bias)
    _check_vectors(name, input.shape[1:2], (acc, torch.float64), mean, invstd)
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

    Then come the gradients of weight and bias. What the last three arguments ask for, the two
    sums and these gradients, is returned, and None for the rest. In channels_last, though, CUDA's
    kernel does not look at them: it returns all four, the gradients empty without a weight.
    """
    name, acc = "batch_norm_backward_reduce", _check_shard("batch_norm_backward_reduce", input)
    _check_vectors(name, input.shape, (input.dtype,), grad_out)
    _check_vectors(name, input.shape[1:2], (acc, torch.float64), mean, invstd)
    _check_vectors(name, input.shape[1:2], (acc, input.dtype), weight)
    if _is_channels_last(grad_out) and _is_channels_last(input):
        input_g = weight_g = bias_g = True
    elif weight is None and (weight_g or bias_g):
        raise RuntimeError(f"{name} computes no gradient of a parameter without a weight")
    center = in_dtype(mean, acc)
    one, mask = torch.ones_like(center), [False, True, True]
    if input.dtype in HALF:  # with other strides torch would round each product
        input = in_format_of(input, input)
    args: Any = grad_out, input, one, center, one, None, None, False, 0.0, mask
    _, sum_dy_xmu, sum_dy = torch.ops.aten.native_batch_norm_backward(*args)
    if mean.dtype == torch.float64:
        sum_dy_xmu = sum_dy_xmu - (mean - center) * sum_dy
    sums = (sum_dy, sum_dy_xmu) if input_g else (None, None)
    if weight is None:
        none = center.new_empty(0) if weight_g else None
        return *sums, none, none
    dweight = in_dtype(sum_dy_xmu * invstd, weight.dtype) if weight_g else None
    return *sums, dweight, in_dtype(sum_dy, weight.dtype) if bias_g else None


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
    """Computes the gradient of a shard, given the sums and the counts of all shards, in int32.

    The weight is in the accumulation dtype; in channels_last that of the input will do as well.
    """
    name, dtype = "batch_norm_backward_elemt", _check_shard("batch_norm_backward_elemt", input)
    is_last = _is_channels_last(grad_out) and _is_channels_last(input)
    _check_vectors(name, input.shape, (input.dtype,), grad_out)
    _check_vectors(name, input.shape[1:2], (dtype, input.dtype if is_last else dtype), weight)
    of_vectors = dtype, torch.float64
    _check_vectors(name, input.shape[1:2], of_vectors, mean, invstd, sum_dy, sum_dy_xmu)
    _check_vectors(name, count.shape, (torch.int32,), count)
    scale = invstd if weight is None else invstd * weight
    n = -(count.item() if count.numel() == 1 else count.sum().item())
    # In this order, so that a channel without variance does not leave the range of float32.
    slope, shift = sum_dy_xmu / n * invstd * invstd * scale, sum_dy / n * scale
    # Half precision is rounded once, at the end.
    dx = _affine(in_dtype(input, dtype), mean, slope, shift)
    dx.addcmul_(in_dtype(grad_out, dtype), per_channel(scale, dx))
    return in_dtype(dx, input.dtype)


# -- what CUDA's kernels refuse ----------------------------------------------------------------


def _check_shard(name: str, x: Tensor) -> torch.dtype:
    """Returns the accumulation dtype of a shard that a kernel takes, and raises on others."""
    if not x.dtype.is_floating_point:
        raise NotImplementedError(f"{name} is not implemented for {x.dtype}")
    if not x.numel():
        raise RuntimeError(f"{name} takes no empty tensor (got {tuple(x.shape)})")
    return accumulation_dtype(x.dtype)


def _check_vectors(
    name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype], *vectors: Tensor | None
) -> None:
    for vector in vectors:
        if vector is not None and (vector.dtype not in dtypes or vector.shape != shape):
            raise RuntimeError(
                f"{name} expected a tensor {tuple(shape)} in {' or '.join(map(str, dtypes))} (got "
                f"{tuple(vector.shape)} in {vector.dtype})"
            )


def _is_channels_last(x: Tensor) -> bool:
    """Whether CUDA has other kernels for a tensor: in channels_last, or ``(N, C)``."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last):
        return True
    return x.is_contiguous() and x.stride(1) == 1


ON_CPU = Kernels(
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
    are_on_host=True,
)


@lru_cache
def kernels_for(kind: str) -> Kernels | None:
    """The kernels of a type of device, or None if it lacks one of them."""
    if kind == "cpu":
        return ON_CPU
    return Kernels(*[getattr(torch, n) for n in NAMES]) if has_kernels(kind, *NAMES) else None


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
