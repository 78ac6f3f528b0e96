"""The moments of a shard: mean and biased variance of each channel, in float64.

Problem: torch's kernel on the CPU rounds a mean to the dtype of x. Where a mean is large against
the deviation, neither moment then has the digits that the merge of shards needs. The kernel also
adds values one by one, which is slow.

Idea: few values are measured in float64, and long rows by vectorized operations. If a mean is
large, a shard is measured again about its rounded means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncbn.channels import (
    HALF,
    accumulation_dtype,
    per_channel,
    values_per_channel,
)

#: The largest mean, in standard deviations, at which evaluation mode loses up to three bits.
_LARGE_MEAN = 8

#: The least rounding error of a mean that is allowed for, in units of the last place.
_LEAST_ERROR = 2**12

#: The most values of a shard that is measured in float64, because calling operations takes longer.
_FEW_VALUES = 2**16

#: The fewest values of a channel in a sample for which `_moments_of_rows` is faster than torch's
#: kernel.
_LEAST_ROW = 32

#: The number of values that `_moments_of_rows` copies at a time, so that the copy fits a cache.
_CHUNK = 2**18


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and biased variance of each channel, ``(C,)`` in float64, 0 without values."""
    if not x.numel():
        return x.new_zeros(2, x.size(1), dtype=torch.float64).unbind()  # type: ignore[return-value]
    if x.numel() <= _FEW_VALUES and x.dtype != torch.float64:
        return torch.batch_norm_update_stats(x.double(), None, None, 0.0)
    mean, var = _moments(x)
    if is_large(mean, var):
        center = _center(x, mean)
        mean, var = _moments(x - per_channel(center, x))
        mean += center
    return mean, var


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes moments of many values, with the rounding error of a mean in the dtype of x."""
    if x.is_contiguous() and x[0, 0].numel() >= _LEAST_ROW:
        return _moments_of_rows(x)
    if x.dtype in HALF:
        # The kernel returns all digits only if it has buffers for them.
        like = x.new_zeros(x.size(1), dtype=torch.float32)
        mean, var = torch.batch_norm_update_stats(x, like, like.clone(), 1.0)
    else:
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean.double(), var.double()


# torch's kernel adds values one by one, and takes most of the time of a plain forward. This takes
# more passes, but all of them are vectorized.
def _moments_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and biased variance where a channel has many values in each sample."""
    samples, channels = x.shape[:2]
    rows = x.to(accumulation_dtype(x.dtype)).view(samples * channels, -1)
    n = samples * rows.size(1)
    mean = rows.sum(1).view(samples, channels).sum(0, dtype=torch.float64).div_(n)
    center = mean.to(rows.dtype)
    centers, at_once = center.repeat(samples).unsqueeze(1), max(1, _CHUNK // rows.size(1))
    squares, copy = rows.new_empty(len(rows)), torch.empty_like(rows[:at_once])
    for some, their_centers, sums in zip(
        *(t.split(at_once) for t in (rows, centers, squares)), strict=True
    ):
        deviation = torch.sub(some, their_centers, out=copy[: len(some)])
        torch.sum(deviation.square_(), 1, out=sums)
    var = squares.view(samples, channels).sum(0, dtype=torch.float64).div_(n)
    return mean, var.sub_((mean - center).square_()).clamp_(min=0)


def _center(x: Tensor, mean: Tensor) -> Tensor:
    """The mean of each channel in the dtype of x, or its first value if it may be constant."""
    # The mean of a constant channel has rounding errors: torch's kernel may add values one by one.
    first = x[0] if x.dim() == 2 else x[0].flatten(1)[:, 0]
    ulps = max(_LEAST_ERROR, values_per_channel(x))
    is_near = (mean - first).abs() <= ulps * torch.finfo(x.dtype).eps * mean.abs()
    center = torch.where(is_near, first.to(mean), mean).to(x.dtype)
    return center.nan_to_num_(0.0, 0.0, 0.0)  # infinite values stay as they are


def is_large(mean: Tensor, var: Tensor) -> bool:
    """Whether batch norm in evaluation mode loses digits, because a mean is large."""
    # A channel of zeros has no large mean. One of NaN may have: it must not hide other channels.
    if not mean.numel():
        return False
    least = torch.addcmul(var, mean, mean, value=-(_LARGE_MEAN**-2)).min().item()
    return not least >= 0
