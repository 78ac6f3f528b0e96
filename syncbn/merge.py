"""Merges the moments of the shards into the statistics of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn import moments as statistics
from syncbn.channels import in_float64, with_usual_strides
from syncbn.kernels import KERNELS, Buffers, Statistics

__all__: list[str] = []


#: The largest shard, in values, that is measured together with the others. For small shards
#: per-operation overhead dominates.
SMALL = 2**15

#: The largest shard, in values, of which one operation computes moments in float32. Above it, the
#: several operations of `syncbn.moments` are faster.
MEDIUM = 2**17

#: In standard deviations. A larger mean would cost more than three bits of precision.
_LARGE_MEAN = 8


class Denominator(NamedTuple):
    """The square of the divisor: ``var + eps``, or ``max(var, eps)`` in clamp mode."""

    eps: float
    clamps: bool = False

    def of(self, var: Tensor) -> Tensor:
        """Returns the denominator for a variance."""
        return var.clamp(min=self.eps) if self.clamps else var + self.eps

    def slope(self, var: Tensor) -> Tensor:
        """Returns the derivative of the denominator with respect to ``var``: 0 or 1."""
        return (var >= self.eps).to(var.dtype) if self.clamps else torch.ones_like(var)


class RunningStatistics(NamedTuple):
    """The buffers of a layer that a merge updates. They may be None."""

    mean: Tensor | None
    var: Tensor | None
    #: The weight of the new values: a number, or a tensor of one value.
    momentum: float | Tensor

    def for_kernel(self, dtype: torch.dtype) -> Buffers | None:
        """Returns arguments for kernels of torch that update the buffers, hidden from autograd.

        None if they cannot, given moments of this dtype.
        """
        mean, var, momentum = self
        if mean is None or var is None or isinstance(momentum, Tensor):
            return None
        return (mean, var, momentum) if mean.dtype == var.dtype == dtype else None

    def update(self, mean: Tensor, var: Tensor, total: int | Tensor) -> None:
        """Updates the buffers in place, as torch does, with the unbiased variance of a batch.

        ``mean`` is in the accumulation dtype, on the device of the buffers. ``var`` is the biased
        variance, ``total`` the values per channel.
        """
        weight = self.momentum
        if isinstance(total, Tensor):  # the host does not know whether it is above 1
            weight = weight * (total > 0).to(var)
            total = total.clamp(min=2)
        narrow = mean.dtype if isinstance(weight, Tensor) or 0 <= weight <= 1 else None
        for buffer, new in ((self.mean, mean), (self.var, var * (total / (total - 1)))):
            if buffer is None:
                continue
            # Hidden from autograd, as torch's kernels do it: the graph of a forward on one device
            # may have saved the buffer without needing its value.
            running = buffer.data
            like = mean if running.dtype == narrow else var  # a weight may not fit into float32
            factor = weight.to(like) if isinstance(weight, Tensor) else weight
            if like is mean:
                running.lerp_(new.to(mean), factor)
            else:
                running.copy_(torch.lerp(running.to(var), new.to(var), factor))


#: The arguments of a kernel that updates no running statistics.
_NO_BUFFERS: Buffers = (None, None, 0.0)

#: Counts a batch, and returns the running statistics to update, or None if the layer has none.
CountBatch = Callable[[], RunningStatistics | None]


class Shard:
    """The numbers of one replica in one call, for the nodes (1) to (3) of `syncbn.graph`."""

    __slots__ = (
        "batch",
        "denominator",
        "device",
        "dtype",
        "kernels",
        "moments",
        "rounded_moments",
        "streams",
        "unmeasured",
        "values",
        "weight",
    )

    def __init__(self, x: Tensor, weight: Tensor | None, denominator: Denominator) -> None:
        #: Values per channel.
        self.values = x.numel() // max(1, x.size(1))
        self.device = x.device
        #: The accumulation dtype.
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.kernels = KERNELS[self.device.type]
        self.weight = weight
        self.denominator = denominator
        #: The values of a shard up to `MEDIUM`, until the merge measures it. None if (1) does.
        self.unmeasured: Tensor | None = None
        #: Mean and biased variance in float32, of an unmeasured shard above `SMALL`.
        self.rounded_moments: tuple[Tensor, Tensor] | None = None
        #: The result of `Kernels.moments`.
        self.moments: tuple[Tensor, Tensor] | None = None
        #: Set before (3).
        self.batch: Statistics
        #: The forward's streams on the devices of all replicas, if there are several.
        self.streams: dict[torch.device, Any] = {}

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance in float32, by one operation, which adds in float64."""
        if self.rounded_moments is None:
            assert self.unmeasured is not None
            x = with_usual_strides(self.unmeasured)
            self.rounded_moments = torch.batch_norm_update_stats(x, *_NO_BUFFERS)
        return self.rounded_moments

    def mean_and_var(self) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance of each channel, in float64 where it is supported."""
        if self.moments is None:
            assert self.unmeasured is not None
            self.moments = self.kernels.moments(self.unmeasured, self.denominator.eps)
            self.unmeasured = None  # (1) has saved it, and frees it after the backward
        if not self.kernels.returns_inverse or not self.values:
            return self.moments
        mean, inverse = self.moments
        return in_float64(mean), variance(inverse, self.denominator)

    def rows(self, totals: Tensor) -> Tensor:
        """Returns `Kernels.rows`, given the totals of a fast backward."""
        return self.kernels.rows(totals.to(self.device), self.batch, self.weight)

    def moments_of(self, batch: Statistics) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance of the whole batch, as `mean_and_var`."""
        if batch.mean_and_var is not None:
            return batch.mean_and_var
        return in_float64(batch.mean), variance(batch.inverse, self.denominator)


def variance(inverse: Tensor, denominator: Denominator) -> Tensor:
    """Returns the variance, in float64, given ``1 / sqrt(var + eps)``."""
    return in_float64(inverse).square().reciprocal().sub_(denominator.eps).clamp_(min=0)


def merge_moments(
    shards: Sequence[Shard], total: int, running: RunningStatistics | None
) -> list[Statistics]:
    """Merges the moments of all shards, in replica order, and updates the running statistics.

    ``total``, the values per channel, is at least 2. Returns the statistics of the whole batch for
    each replica.
    """
    weights_differ = not _share_weight(shards)
    if _are_unmeasured(shards):
        if any(map(attrgetter("rounded_moments"), shards)):
            stats = _merge_rounded(shards, total, weights_differ)
            if stats is not None and running is not None:
                running.update(stats.mean, shards[0].moments_of(stats)[1], total)
        else:
            stats = _measure(shards, total, running, weights_differ)
            running = None  # updated
        if stats is not None:
            return [stats] * len(shards)
        # A large mean takes more precise moments.
    if _have_fused_merge(shards):
        merged = _fused_merge(shards, total, running)
        batches = []
        for shard in shards:
            mean, inverse = (vector.to(shard.device, non_blocking=True) for vector in merged)
            batches.append(Statistics(total, mean, inverse, inverse, None, None, weights_differ))
        return batches
    mean, var = mean_and_var_of(shards)
    batches = statistics_of(shards, total, mean, var, weights_differ)
    if running is not None:
        running.update(batches[0].mean, var, total)
    return batches


def mean_and_var_of(shards: Sequence[Shard]) -> tuple[Tensor, Tensor]:
    """Returns mean and biased variance of all values of the shards, as `Shard.mean_and_var`."""
    means, variances = zip(*[shard.mean_and_var() for shard in shards], strict=True)
    counts, home = [shard.values for shard in shards], means[0].device
    if len(shards) == 1 or not any(counts):
        return means[0], variances[0]
    return statistics.merge(
        counts, [mean.to(home) for mean in means], [var.to(home) for var in variances]
    )


def statistics_of(
    shards: Sequence[Shard],
    total: int | Tensor,
    mean: Tensor,
    var: Tensor,
    weights_differ: bool = True,
) -> list[Statistics]:
    """Returns what the kernels of each shard take, given mean and biased variance of the batch."""
    messages_differ = len({(shard.denominator, shard.kernels) for shard in shards}) > 1
    # Usually all replicas are on one device and have the same eps.
    made: dict[object, Statistics] = {}
    batches = []
    for shard in shards:
        key = shard.denominator, shard.device
        if key not in made:
            stats = kernel_statistics(total, mean, var, shard, weights_differ)
            made[key] = stats._replace(messages_differ=messages_differ)
        batches.append(made[key])
    return batches


def _are_unmeasured(shards: Sequence[Shard]) -> bool:
    """Whether all shards can be measured together."""
    first = shards[0]
    for shard in shards:
        if shard.unmeasured is None or shard.denominator != first.denominator:
            return False
        if shard.device != first.device:
            return False
        if shard.unmeasured.shape[1:] != first.unmeasured.shape[1:]:  # type: ignore[union-attr]
            return False
    return True


def _measure(
    shards: Sequence[Shard], total: int, running: RunningStatistics | None, weights_differ: bool
) -> Statistics | None:
    """Measures all shards at once, and updates the running statistics, as torch's layer does.

    Returns None if the mean is large.
    """
    x = torch.cat([shard.unmeasured for shard in shards])  # type: ignore[misc]
    buffers = running and running.for_kernel(x.dtype)
    mean, var = moments = torch.batch_norm_update_stats(x, *(buffers or _NO_BUFFERS))
    if running is not None and buffers is None:
        running.update(mean, var, total)
    divisor = shards[0].denominator.of(var)
    if _is_large(mean, divisor):
        return None
    return Statistics(total, mean, divisor.rsqrt(), divisor, None, moments, weights_differ)


def _merge_rounded(shards: Sequence[Shard], total: int, weights_differ: bool) -> Statistics | None:
    """Merges moments that are rounded to float32. Returns None if the mean is large."""
    means, variances = zip(*map(Shard.rounded, shards), strict=True)
    mean, var = statistics.merge([shard.values for shard in shards], means, variances)
    stats = kernel_statistics(total, mean, var, shards[0], weights_differ)
    return stats if stats.rest is None else None


def kernel_statistics(
    total: int | Tensor, mean: Tensor, var: Tensor, shard: Shard, weights_differ: bool = True
) -> Statistics:
    """Returns the statistics for a shard's kernels, given mean and biased variance."""
    divisor = shard.denominator.of(var)
    vectors = torch.stack((mean, divisor.rsqrt(), divisor)).to(shard.device, shard.dtype)
    head, inverse, divisor = vectors.unbind()
    rest = None
    # Always on accelerators, where the test would block the host.
    if shard.kernels.is_asynchronous or _is_large(head, divisor):
        rest = (mean - head.to(mean)).to(head)
    return Statistics(total, head, inverse, divisor, rest, (mean, var), weights_differ)


def _is_large(mean: Tensor, divisor: Tensor) -> bool:
    """Whether the mean of any channel is large, or NaN."""
    difference = torch.addcmul(divisor, mean, mean, value=-1 / _LARGE_MEAN**2)
    return not difference.amin().item() >= 0


def _share_weight(shards: Sequence[Shard]) -> bool:
    """Whether the weights of all replicas are certainly copies of one parameter."""
    first = shards[0].weight
    for shard in shards:
        weight = shard.weight
        if weight is first:
            continue
        if weight is None or first is None:
            return False
        if weight.device == first.device:
            if weight.data_ptr() != first.data_ptr() or weight.stride() != first.stride():
                return False
        elif first.grad_fn is None or weight.grad_fn is not first.grad_fn:
            return False  # not made by one broadcast
    return True


def _have_fused_merge(shards: Sequence[Shard]) -> bool:
    """Whether the kernels of a strategy merge the moments of all shards."""
    kernels, denominator = shards[0].kernels, shards[0].denominator
    if not kernels.has_merge or denominator.clamps:
        return False
    return all(s.kernels is kernels and s.denominator == denominator for s in shards)


def _fused_merge(
    shards: Sequence[Shard], total: int, running: RunningStatistics | None
) -> tuple[Tensor, Tensor]:
    """Calls `Kernels.merge`, and updates the running statistics."""
    home, kernels, denominator = shards[0].device, shards[0].kernels, shards[0].denominator
    shards = [shard for shard in shards if shard.values]
    moments = [
        torch.stack([moment.to(home) for moment in of_shards])
        for of_shards in zip(*[shard.moments for shard in shards], strict=True)
    ]
    counts = tuple([shard.values for shard in shards])
    buffers = running and running.for_kernel(moments[0].dtype)
    mean, inverse = kernels.merge(counts, moments, denominator.eps, buffers or _NO_BUFFERS)
    if running is not None and buffers is None:
        running.update(mean, variance(inverse, denominator), total)
    return mean, inverse
