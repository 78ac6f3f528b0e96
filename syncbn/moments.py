"""Mean and biased variance of each channel, ``(C,)`` in float64: on the CPU, or merged.

Variances are centered sums, never ``E[x^2] - E[x]^2``, so a large mean costs no precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from syncbn.channels import accumulation_dtype, constant_tensor, reduced_dims, values_per_channel

#: The size, in values, up to which per-operation overhead dominates.
_SMALL = 2**16

#: The number of values that are converted at a time, so that they stay in the cache.
_BLOCK = 2**18

#: The largest mean, in standard deviations, for which sums in float32 keep their precision.
_LARGE_MEAN = 4

#: The largest error of an estimated mean, in standard deviations.
_POOR_ESTIMATE = 2

#: The number of values from which a mean is estimated. Their order is assumed to be random.
_ENOUGH = 64

#: With shorter runs, converting to float64 is faster.
_SHORTEST_RUN = 16


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and biased variance of each channel of a tensor on the CPU, not empty."""
    if x.numel() <= _SMALL:
        return _exact_moments(x)
    fast = _moments_in_accumulation_dtype(x)
    if fast is not None:
        return fast
    blocks = x.split(max(1, _BLOCK // x[0].numel()))
    stats = zip(*map(_exact_moments, blocks), strict=True)
    return merge([values_per_channel(block) for block in blocks], *stats)


def merge(
    counts: Sequence[int], means: Sequence[Tensor], variances: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merges the moments of several sets of values, possibly empty, on the device of the first."""
    home, total = means[0].device, max(1, sum(counts))
    share = constant_tensor(tuple([n / total for n in counts]), home, torch.float64)
    stacked = [torch.stack([t.to(share) for t in tensors]) for tensors in (means, variances)]
    return merge_shares(share, *stacked)


def merge_shares(share: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `merge` of n sets, given the fraction of all values that each has, ``(n,)``."""
    # Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    # Variances", 1979.
    mean = share @ means
    apart = means - mean
    return mean, share @ torch.addcmul(variances, apart, apart)


def _exact_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `moments` in float64, given a tensor that is not empty and may be copied."""
    # Always a copy: torch's kernel infers a wrong format where a dimension of length 1 has an
    # unusual stride.
    if x.dtype == torch.float64:  # no spare digits: subtract one value of each channel
        start = x[(slice(1), slice(None), *[slice(1)] * (x.dim() - 2))]
        x = torch.sub(x, start, out=torch.empty(x.shape, dtype=x.dtype, device="cpu"))
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean + start.flatten(), var
    x = x.to(torch.float64, memory_format=torch.contiguous_format)
    return torch.batch_norm_update_stats(x, None, None, 0.0)


def _moments_in_accumulation_dtype(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Computes `moments` without a copy of ``x``; None if that loses precision, or is slower."""
    # Short runs of values are added in the accumulation dtype, as if each were a channel. Their
    # sums are added in float64.
    n, c, size = values_per_channel(x), x.size(1), x.shape[2:].numel()
    dtype = accumulation_dtype(x.dtype)
    if x.is_contiguous() and size >= _SHORTEST_RUN:
        # Longer in half precision, which has few digits and is slow for short runs.
        length = _divisor(size, 64 if x.dtype == dtype else 4096)
        runs, shape = x.view(1, -1, length), (len(x), c, size // length)
    elif (rows := x.movedim(1, -1)).is_contiguous():
        # As many as may be added one by one. torch adds those of (N, L, C), seen as (N, C, L), in
        # pairs.
        length = _divisor(n, 128 if x.dim() == 3 else 512)
        runs, shape = rows.view(1, length, 1, -1).permute(0, 3, 1, 2), (n // length, c, 1)
    else:
        return None
    if length < _SHORTEST_RUN:
        return None
    if runs.dim() == 4 and x.dtype == dtype:  # faster, where channels are last
        stats = torch.batch_norm_update_stats(runs, None, None, 0.0)
        means, variances = (of_runs.double().view(-1, c) for of_runs in stats)
        mean, var = merge_shares(means.new_full((len(means),), 1 / len(means)), means, variances)
        error = torch.zeros_like(mean)
    else:
        # torch's fused kernel for parameter gradients adds x * (x - estimate) and x.
        estimate = x[: 1 + _ENOUGH // size].mean(reduced_dims(x), dtype=dtype)
        centers = estimate.view(1, -1, 1).expand(shape).reshape(-1)
        args = (runs, runs, None, centers, torch.ones_like(centers), None, None, False, 0.0)
        _, *sums = torch.ops.aten.native_batch_norm_backward(*args, [False, True, True])
        products, plain = (one.view(shape).sum((0, 2), dtype=torch.float64) for one in sums)
        mean = plain.div_(n)
        error = mean - estimate
        # E[x (x - estimate)] = var + mean * (mean - estimate)
        var = products.div_(n).addcmul_(mean, error, value=-1)
    least = torch.maximum(mean.abs() / _LARGE_MEAN, error.abs() / _POOR_ESTIMATE).square()
    return (mean, var) if (var >= least).all().item() else None  # None for NaN


@lru_cache
def _divisor(number: int, largest: int) -> int:
    """Returns the largest divisor of ``number`` that is not above ``largest``."""
    return next(k for k in range(min(number, largest), 0, -1) if number % k == 0)
