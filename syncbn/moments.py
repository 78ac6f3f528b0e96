"""Mean and variance of each channel of a tensor, and of several tensors together.

Statistics are ``(2, C)`` in float64, means and variances, which costs nothing at their size. They
are on the device of ``x``, or on the CPU if that device has no float64.

They are centered sums (two-pass, corrected; Chan, Golub & LeVeque, «Algorithms for Computing the
Sample Variance», The American Statistician 37, 1983, eq. 1.7), never ``E[x^2] - E[x]^2``: the
variance is not negative and does not suffer from a large mean. Where the mean turns out not to be
large one factor is centered, by a guess of the mean, which needs no centered copy of ``x``.

How values are added says `syncbn.sums`.
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
    """Mean and biased variance of each channel.

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
    # Not by `mean`, which may add millions of values, or samples of few, one by one.
    head = sums.cascaded(x).div_(n).to(x.device, dtype)
    stats = _sum_and_squares(x - per_channel(head, x)).div_(n)
    # What the rounding of the mean has left in the centered values.
    rest, variance = stats
    variance.addcmul_(rest, rest, value=-1).clamp_(min=0)
    # Of infinite values the mean is infinite, and nothing else is a number.
    rest.nan_to_num_(0.0, math.inf, -math.inf).add_(head.to(home))
    return stats


#: Values of a tensor for which the number of operations is the time.
_TINY = 2**15

#: In deviations: the largest mean for which the moments need no centered copy of ``x``.
_UNCENTERED = 4

#: So many values per channel tell the mean well enough, if they come in any order.
_TYPICAL = 64

#: In deviations: how far such a guess of the mean may be off.
_APART = 2


def _uncentered_moments(x: Tensor, n: int) -> Tensor | None:
    """As `moments`, on the CPU, for a mean that is not large; None if that would cost digits."""
    dtype, c = accumulation_dtype(x.dtype), x.size(1)
    has_rows = sums.has_rows(x)
    runs = [] if has_rows and x.numel() > _TINY else sums.runs(x, n)
    if runs and x.dtype == dtype:
        stats = _moments_of_runs(runs, n, c)
        return None if has_large_mean(stats, _UNCENTERED) else stats
    if not has_rows and not runs:
        return None
    # Of the first values: a guess that costs no look at all of them.
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
    """The moments of ``c`` channels of ``n`` values, which `sums.runs` has cut."""
    # A single operation; where the channels are last it is vectorized, too.
    stats = [torch.stack(torch.batch_norm_update_stats(r, None, None, 0.0)) for r in runs]
    if len(runs) == 1 and runs[0].size(1) == c:
        return stats[0].double()
    share = [[[values_per_channel(run) / n]] for run in runs for _ in range(run.size(1) // c)]
    parts = torch.cat([s.double().view(2, -1, c).transpose(0, 1) for s in stats])
    return merge(parts.new_tensor(share), parts)


def _sum_and_squares(centered: Tensor) -> Tensor:
    """The sums of each channel's values and of their squares, ``(2, C)`` in float64.

    ``centered`` is used up.
    """
    if centered.device.type == "cpu" and sums.has_rows(centered):
        squares, plain = sums.of_rows(centered, centered.new_zeros(centered.size(1)))
    else:
        plain, squares = sums.cascaded(centered), sums.cascaded(centered.square_())
    return torch.stack((plain, squares))


#: In deviations. A larger mean would cost more than three of the bits that ``x`` has.
LARGE = 8


def has_large_mean(moments: Tensor, deviations: float = LARGE) -> bool:
    """Whether the mean of some channel is more than so many deviations, for all that the host
    knows: it does not wait for an accelerator to tell."""
    return moments.device.type != "cpu" or _are_beyond(moments[0], moments[1], deviations)


def _are_beyond(values: Tensor, var: Tensor, deviations: float) -> bool:
    """Whether any of the values, of which the last dimension is C, is above so many deviations."""
    # A NaN is, too.
    return not torch.addcmul(deviations**2 * var, values, values, value=-1).amin().item() >= 0


def merge(share: Tensor, stats: Tensor) -> Tensor:
    """Mean and biased variance of the union of several sets, from those of the sets.

    Chan, Golub & LeVeque, «Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances», 1979. Sets may be empty; if all are, mean and variance are 0.

    Args:
        share: ``(n, 1, 1)``, of each set in the number of values.
        stats: ``(n, 2, C)``, their means and variances.

    Returns:
        ``(2, C)``.
    """
    merged = (share * stats).sum(0)
    apart = stats[:, 0] - merged[0]
    merged[1] += apart.square_().mul_(share[:, 0]).sum(0)
    return merged
