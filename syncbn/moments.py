"""Mean and variance of each channel of a tensor, and of several tensors together.

Statistics are ``(2, C)`` in float64: means and variances. They are on the device of ``x``, or on
the CPU if that device does not support float64.

They are centered sums (two-pass, corrected; Chan, Golub & LeVeque, "Algorithms for Computing the
Sample Variance", The American Statistician 37, 1983, eq. 1.7), never ``E[x^2] - E[x]^2``: the
variance is never negative and a large mean costs no precision. If the mean is not large, only one
factor is centered, by an estimate of the mean, which needs no centered copy of ``x``.

See `syncbn.sums` for how values are added.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from syncbn import cuda_kernels, sums
from syncbn.channels import (
    accumulation_dtype,
    per_channel,
    reduced_dims,
    statistics_device,
    values_per_channel,
)

__all__: list[str] = []


def moments(x: Tensor) -> Tensor:
    """Computes the mean and the biased variance of each channel.

    Returns:
        ``(2, C)`` in float64: means, variances; zeros if ``x`` is empty.
    """
    home, n = statistics_device(x.device), values_per_channel(x)
    if n == 0:
        return torch.zeros(2, x.size(1), dtype=torch.float64, device=home)
    if x.is_cuda:
        return cuda_kernels.moments(x)
    if x.device.type == "cpu":
        stats = _uncentered_moments(x, n)
        if stats is not None:
            return stats
    dtype = accumulation_dtype(x.dtype)
    # Not `x.mean()`, which may add millions of values one by one.
    head = sums.cascaded(x).div_(n).to(x.device, dtype)
    stats = _sum_and_squares(x - per_channel(head, x)).div_(n)
    # The centered values still contain the rounding error of the mean.
    rest, variance = stats
    variance.addcmul_(rest, rest, value=-1).clamp_(min=0)
    # For infinite values the mean is infinite and the variance is NaN.
    rest.nan_to_num_(0.0, math.inf, -math.inf).add_(head.to(home))
    return stats


#: The size, in values, up to which per-operation overhead dominates.
_TINY = 2**15

#: The largest mean, in standard deviations, that needs no centered copy of ``x``.
_UNCENTERED = 4

#: The number of values per channel that estimate the mean well enough, in random order.
_TYPICAL = 64

#: The largest error of such an estimate, in standard deviations.
_APART = 2


def _uncentered_moments(x: Tensor, n: int) -> Tensor | None:
    """Computes `moments` on the CPU for a mean that is not large; None if that loses precision."""
    dtype, c = accumulation_dtype(x.dtype), x.size(1)
    has_rows = sums.has_rows(x)
    runs = [] if has_rows and x.numel() > _TINY else sums.runs(x, n)
    if runs and x.dtype == dtype:
        stats = _moments_of_runs(runs, n, c)
        return None if has_large_mean(stats, _UNCENTERED) else stats
    if not has_rows and not runs:
        return None
    # Estimate the mean from the first values.
    first = runs[0][:, :c] if len(runs) > 1 else x[: 1 + _TYPICAL // (n // len(x))]
    head = first.mean(reduced_dims(first), dtype=dtype)
    if not runs:
        products, plain = sums.of_rows(x, head)
    else:
        products, plain = sums.of_runs(runs, head)
    mean = plain.div_(n)
    apart = mean - head
    # E[x (x - head)] = var + mean (mean - head)
    var = products.div_(n).addcmul_(mean, apart, value=-1)
    if _are_beyond(torch.stack((mean, apart * (_UNCENTERED / _APART))), var, _UNCENTERED):
        return None
    return torch.stack((mean, var))


def _moments_of_runs(runs: list[Tensor], n: int, c: int) -> Tensor:
    """Computes the moments of ``c`` channels of ``n`` values, given their `sums.runs`."""
    # A single operation, vectorized also for channels_last.
    stats = [torch.stack(torch.batch_norm_update_stats(r, None, None, 0.0)) for r in runs]
    if len(runs) == 1 and runs[0].size(1) == c:
        return stats[0].double()
    share = [[[values_per_channel(run) / n]] for run in runs for _ in range(run.size(1) // c)]
    parts = torch.cat([s.double().view(2, -1, c).transpose(0, 1) for s in stats])
    return merge(parts.new_tensor(share), parts)


def _sum_and_squares(centered: Tensor) -> Tensor:
    """Computes the sums of each channel's values and of their squares, ``(2, C)`` in float64.

    It overwrites ``centered``.
    """
    if centered.device.type == "cpu" and sums.has_rows(centered):
        squares, plain = sums.of_rows(centered, centered.new_zeros(centered.size(1)))
    else:
        plain, squares = sums.cascaded(centered), sums.cascaded(centered.square_())
    return torch.stack((plain, squares))


#: In standard deviations. A larger mean would cost more than three bits of precision.
LARGE = 8


def has_large_mean(moments: Tensor, deviations: float = LARGE) -> bool:
    """Returns whether the mean of a channel may exceed so many standard deviations.

    Always true on accelerators, as the host does not wait for them.
    """
    return moments.device.type != "cpu" or _are_beyond(moments[0], moments[1], deviations)


def _are_beyond(values: Tensor, var: Tensor, deviations: float) -> bool:
    """Returns whether any of the values ``(..., C)`` exceeds so many deviations, or is NaN."""
    return not torch.addcmul(deviations**2 * var, values, values, value=-1).amin().item() >= 0


def merge(share: Tensor, stats: Tensor) -> Tensor:
    """Computes mean and biased variance of the union of several sets from those of each set.

    See Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979. Sets may be empty. If all are, mean and variance are 0.

    Args:
        share: The fraction of all values that each set has, ``(n, 1, 1)``.
        stats: The means and variances of the sets, ``(n, 2, C)``.

    Returns:
        ``(2, C)``.
    """
    merged = (share * stats).sum(0)
    apart = stats[:, 0] - merged[0]
    merged[1] += apart.square_().mul_(share[:, 0]).sum(0)
    return merged
