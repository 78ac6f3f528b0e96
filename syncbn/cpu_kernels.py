"""The five kernels of a synchronized layer on the CPU.

Names and arguments are those of torch's kernels for accelerators (see `syncbn.kernels`). Each is
composed of a few operations that torch has on the CPU.

The output and the gradient of a shard are affine maps of each channel of x. So is batch norm in
evaluation mode (`native_batch_norm` with given moments), in one pass. On the CPU it computes
x * scale + (shift - mean * scale), which loses digits if a mean is large compared with the
standard deviation. Such means stay in float64, so that their merge loses nothing, and the kernels
that get one subtract it from x first. Otherwise vectors of length C are in the accumulation dtype.

The kernels refuse what CUDA's kernels refuse, and return what those return, so that a call that
fails on a GPU fails on the CPU as well. There are two differences: vectors may be in float64 where
CUDA's are in the accumulation dtype, and an empty shard is refused in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncbn.channels import HALF, accumulation_dtype, in_dtype, in_format_of, per_channel
from syncbn.statistics import is_large, moments


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
    _check_vectors(name, (counts.numel(), mean.size(-1)), (acc, torch.float64), mean, invstd)
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
    name, shape = "batch_norm_elemt", input.shape[1:2]
    acc = _check_shard(name, input)
    of_weight = (acc, input.dtype) if weight is None else (weight.dtype,)
    _check_vectors(name, shape, (acc, input.dtype), weight)
    _check_vectors(name, shape, of_weight, bias)
    _check_vectors(name, shape, (acc, torch.float64), mean, invstd)
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
    name, shape = "batch_norm_backward_reduce", input.shape[1:2]
    acc = _check_shard(name, input)
    _check_vectors(name, input.shape, (input.dtype,), grad_out)
    _check_vectors(name, shape, (acc, torch.float64), mean, invstd)
    _check_vectors(name, shape, (acc, input.dtype), weight)
    is_usual = input_g and weight_g and bias_g and weight is not None
    if not is_usual and _is_channels_last(grad_out) and _is_channels_last(input):
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
    name, shape = "batch_norm_backward_elemt", input.shape[1:2]
    dtype = _check_shard(name, input)
    _check_vectors(name, input.shape, (input.dtype,), grad_out)
    _check_vectors(name, shape, (dtype, torch.float64), mean, invstd, sum_dy, sum_dy_xmu)
    may_be_half = input.dtype in HALF and _is_channels_last(grad_out) and _is_channels_last(input)
    _check_vectors(name, shape, (dtype, input.dtype) if may_be_half else (dtype,), weight)
    _check_vectors(name, count.shape, (torch.int32,), count)
    scale = invstd if weight is None else invstd * weight
    n = -(count.item() if count.numel() == 1 else count.sum().item())
    # In this order, so that a channel without variance does not leave the range of float32.
    slope, shift = sum_dy_xmu / n * invstd * invstd * scale, sum_dy / n * scale
    # Half precision is rounded once, at the end.
    dx = _affine(in_dtype(input, dtype), mean, slope, shift)
    dx.addcmul_(in_dtype(grad_out, dtype), per_channel(scale, dx))
    return in_dtype(dx, input.dtype)


# -- computing ---------------------------------------------------------------------------------


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
