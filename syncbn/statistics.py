"""The statistics of a batch: moments, ``eps``, and the running statistics.

The second half measures a shard on the CPU (see `moments`). Accelerators have a kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn.channels import (
    HALF,
    accumulation_dtype,
    in_float64,
    per_channel,
    values_per_channel,
)


class Epsilon(NamedTuple):
    """What keeps the variance above zero (see `set_sbn_eps_mode`)."""

    eps: float
    clamps: bool = False

    def regularized(self, var: Tensor) -> Tensor:
        """Returns the square of the divisor: ``var + eps``, or ``max(var, eps)`` in clamp mode."""
        return var.clamp(min=self.eps) if self.clamps else var + self.eps


class Arguments(NamedTuple):
    """The arguments of one call of a layer, in one replica or process."""

    #: The shard, ``(N, C, ...)``, perhaps empty.
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    epsilon: Epsilon


class Moments(NamedTuple):
    """Mean and biased variance of each channel, ``(C,)`` in float64."""

    #: The number of values per channel. A tensor where reading it would block the host.
    n: Any
    mean: Tensor
    var: Tensor


class KernelMoments(NamedTuple):
    """Moments as the kernels have them, ``(C,)`` in the dtype that they return."""

    #: The number of values per channel, or None where reading it would block the host.
    n: int | None
    mean: Tensor
    #: ``1 / sqrt(var + eps)``
    inverse: Tensor
    eps: float
    #: Where the host does not know ``n``: how many values each rank has, in int32.
    counts: Tensor | None = None

    def mean_and_variance(self) -> Moments:
        """Returns mean and biased variance."""
        n = self.n if self.counts is None else in_float64(self.counts.sum())
        var = in_float64(self.inverse).square().reciprocal().sub_(self.eps).clamp_(min=0)
        return Moments(n, in_float64(self.mean), var)


class RunningStatistics(NamedTuple):
    """The buffers of a layer that a batch updates. They may be None."""

    mean: Tensor | None = None
    var: Tensor | None = None
    #: The weight of the new values: a number, or a tensor of one value.
    momentum: float | Tensor = 0.0

    def update(self, batch: Moments) -> None:
        """Updates the buffers in place, as torch does, with mean and unbiased variance."""
        (total, mean, var), weight = batch, self.momentum
        if isinstance(weight, Tensor):
            weight = in_float64(weight).to(var.device)  # where a device has no float64, the CPU
        if isinstance(total, Tensor):  # the host does not know whether it is above 1
            weight = weight * (total > 1).to(var)
            total = total.clamp(min=2)
        elif total < 2:
            return
        for buffer, new in ((self.mean, mean), (self.var, var * (total / (total - 1)))):
            if buffer is not None:
                # Hidden from autograd, as torch's kernels do it: the graph of a forward on one
                # device may have saved the buffer without needing its value.
                running = buffer.data
                merged = torch.lerp(in_float64(running), new.detach(), weight)
                running.copy_(merged.to(running.dtype))


#: Counts a batch, and returns the running statistics to update.
CountBatch = Callable[[], RunningStatistics]


def check_count(n: int | Tensor | None, x: Tensor) -> None:
    """Raises ValueError if a batch has one value per channel, as far as the host knows."""
    if isinstance(n, int) and n == 1:
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} and "
            "1 value in all of its group; take a larger batch, or call the layer in eval()"
        )


# -- the moments of a shard on the CPU ---------------------------------------------------------

# Problem: torch's kernel on the CPU rounds a mean to the dtype of x. If a mean is large compared
# with the standard deviation, neither moment then has the digits that the merge of shards needs.
# The kernel also adds values one by one, which is slow.
#
# Idea: few values are measured in float64, and long rows by vectorized operations. If a mean is
# large, a shard is measured again about its rounded means.

#: The largest mean, in standard deviations, at which batch norm with given moments loses at most
#: three bits.
_LARGE_MEAN = 8

#: The least rounding error of a mean that is allowed for, in units of the last place.
_LEAST_ERROR = 2**12

#: The most values of a shard that is measured in float64, because calling operations takes longer.
_FEW_VALUES = 2**16

#: The fewest values of a channel in a sample for which `_moments_of_rows` is faster than torch's
#: kernel.
_LEAST_ROW = 32

#: The number of values that `_moments_of_rows` copies at a time, so that the copy fits a cache.
_CHUNK = 2**17


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
    buffers: Any = None, None
    if x.dtype in HALF:  # in which the kernel returns all digits only if it has buffers for them
        buffers = x.new_zeros(2, x.size(1), dtype=torch.float32)
    mean, var = torch.batch_norm_update_stats(x, buffers[0], buffers[1], 1.0)
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
    centers = center.repeat(samples).unsqueeze(1)
    at_once = max(1, _CHUNK // rows.size(1))
    squares, copy = rows.new_empty(len(rows)), torch.empty_like(rows[:at_once])
    for some, their_centers, sums in zip(
        *(t.split(at_once) for t in (rows, centers, squares)), strict=True
    ):
        centered = torch.sub(some, their_centers, out=copy[: len(some)])
        torch.sum(centered.square_(), 1, out=sums)
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
    """Whether a mean is so large that batch norm with given moments loses digits."""
    # False for a channel of zeros, and true for one of NaN, which must not hide other channels.
    least = torch.addcmul(var, mean, mean, value=-(_LARGE_MEAN**-2)).min().item()
    return not least >= 0
