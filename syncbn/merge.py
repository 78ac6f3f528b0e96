"""The numbers of a synchronized layer: from the moments of the shards to those of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import moments as statistics
from syncbn.channels import statistics_device, values_per_channel
from syncbn.kernels import Kernels, Statistics, counts_tensor, kernels_for

__all__: list[str] = []


class Denominator(NamedTuple):
    """The square of the divisor: ``var + eps``, or ``max(var, eps)`` in clamp mode."""

    eps: float
    clamps: bool = False

    def of(self, var: Tensor) -> Tensor:
        """Returns the denominator for a variance."""
        return var.clamp(min=self.eps) if self.clamps else var + self.eps

    def slope(self, var: Tensor) -> Tensor:
        """Returns the derivative of the denominator by ``var``: 0 or 1."""
        return (var >= self.eps).to(var.dtype) if self.clamps else torch.ones_like(var)


class RunningStatistics(NamedTuple):
    """The buffers of a layer that a merge updates. They may be None."""

    mean: Tensor | None
    var: Tensor | None
    #: The weight of the new values: a number, or a tensor of one value.
    momentum: float | Tensor

    def update(self, mean: Tensor, var: Tensor, total: int | Tensor) -> None:
        """Updates the buffers in place, as torch does, with the unbiased variance of a batch.

        Args:
            mean: The mean of the batch, in the accumulation dtype, on the device of the buffers.
            var: The biased variance of the batch.
            total: Values per channel in the batch.
        """
        weight = self.momentum
        if isinstance(total, Tensor):  # the host does not know whether it is above 1
            weight = weight * (total > 0).to(var)
            total = total.clamp(min=2)
        if isinstance(weight, Tensor):
            weight = weight.to(mean)
        for running, new in ((self.mean, mean), (self.var, var * (total / (total - 1)))):
            if running is not None:
                # Hidden from autograd, as torch's kernels do it: the graph of a forward on one
                # device may have saved the buffer without needing its value.
                running, new = running.data, new.to(mean)
                if running.dtype == new.dtype:
                    running.lerp_(new, weight)
                else:
                    running.copy_(torch.lerp(running.to(new), new, weight))


#: Counts a batch and returns what is to be updated; None if the layer keeps no such statistics.
CountBatch = Callable[[], RunningStatistics | None]


class GlobalMoments(NamedTuple):
    """The moments of the whole batch, as one replica needs them."""

    #: Values per channel; a tensor where the host should not wait for it.
    total: int | Tensor
    statistics: Statistics
    #: Mean and biased variance. None if only `statistics` are known.
    mean_and_var: tuple[Tensor, Tensor] | None
    #: Whether each replica multiplies its sums by its weight before they are added in backward.
    weights_differ: bool = True

    def moments(self, denominator: Denominator) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance, in float64 where it is supported."""
        if self.mean_and_var is not None:
            return self.mean_and_var
        return self.statistics.mean.double(), variance(self.statistics.inverse, denominator)


class Shard:
    """The numbers of one replica in one call, which its nodes share with (2)."""

    __slots__ = ("batch", "denominator", "kernels", "moments", "values", "weight")

    def __init__(self, x: Tensor, weight: Tensor | None, denominator: Denominator) -> None:
        self.values = values_per_channel(x)
        self.kernels: type[Kernels] = kernels_for(x)
        self.weight = weight
        self.denominator = denominator
        #: The result of `Kernels.moments`. Set by (1).
        self.moments: tuple[Tensor, Tensor]
        #: Set before (3).
        self.batch: GlobalMoments

    def mean_and_var(self) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance of each channel, in float64 where it is supported."""
        if not self.kernels.returns_inverse or not self.values:
            return self.moments
        mean, inverse = self.moments
        return mean.double(), variance(inverse, self.denominator)


def variance(inverse: Tensor, denominator: Denominator) -> Tensor:
    """Returns the variance, in float64, given ``1 / sqrt(var + eps)``."""
    return inverse.double().square().reciprocal().sub_(denominator.eps).clamp_(min=0)


def merge_moments(
    shards: Sequence[Shard], like: Sequence[Tensor], running: RunningStatistics | None
) -> list[GlobalMoments]:
    """Merges the moments of all shards, and updates the running statistics.

    Args:
        shards: The shards, in replica order, with at least 2 values per channel in all.
        like: A tensor on each replica's device, in the accumulation dtype.
        running: The running statistics to update, if any.

    Returns:
        The moments of the whole batch for each replica.
    """
    total = sum([shard.values for shard in shards])
    weights_differ = not _is_shared([shard.weight for shard in shards])
    if _has_fused_merge(shards, running):
        merged = _fused_merge(shards, like[0], running)
        return [
            GlobalMoments(total, merged.to(tensor.device), None, weights_differ) for tensor in like
        ]
    home = statistics_device(like[0].device)
    moments = [[m.to(home) for m in shard.mean_and_var()] for shard in shards]
    mean, var = statistics.merge([shard.values for shard in shards], *zip(*moments, strict=True))
    # Usually all replicas are on one device and have the same eps.
    made: dict[object, Statistics] = {}
    batches = []
    for shard, tensor in zip(shards, like, strict=True):
        key = shard.denominator, tensor.device
        if key not in made:
            made[key] = kernel_statistics(mean, var, shard.denominator, tensor)
        batches.append(GlobalMoments(total, made[key], (mean, var), weights_differ))
    if running is not None:
        running.update(batches[0].statistics.mean, var, total)
    return batches


def kernel_statistics(
    mean: Tensor, var: Tensor, denominator: Denominator, like: Tensor
) -> Statistics:
    """Returns the vectors that kernels take, given mean and biased variance of the batch.

    They are on the device and in the dtype of ``like``.
    """
    divisor = denominator.of(var)
    vectors = torch.stack((mean, divisor.rsqrt(), divisor)).to(like)
    head, inverse, divisor = vectors.unbind()
    # The host does not wait for accelerators, whose kernels subtract the mean first.
    is_large = like.device.type != "cpu" or _is_large(head, divisor)
    rest = (mean - head.to(mean)).to(like) if is_large else None
    return Statistics(head, inverse, divisor, rest)


#: In standard deviations. A larger mean would cost more than three bits of precision.
_LARGE_MEAN = 8


def _is_large(mean: Tensor, divisor: Tensor) -> bool:
    """Whether the mean of any channel is large, or NaN."""
    difference = torch.addcmul(divisor, mean, mean, value=-1 / _LARGE_MEAN**2)
    return not difference.amin().item() >= 0


def _is_shared(weights: Sequence[Tensor | None]) -> bool:
    """Whether the weights of all replicas are certainly copies of one parameter."""
    first, *others = weights
    return all(other is first or _are_copies(first, other) for other in others)


def _are_copies(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    if one.device == other.device:
        return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one.grad_fn is not None and one.grad_fn is other.grad_fn  # made by one broadcast


def _has_fused_merge(shards: Sequence[Shard], running: RunningStatistics | None) -> bool:
    """Whether one kernel can merge the moments and update the running statistics."""
    first = shards[0]
    if not all(
        shard.kernels.returns_inverse and shard.denominator == first.denominator
        for shard in shards
    ):
        return False
    return not first.denominator.clamps and (
        running is None
        or (
            isinstance(running.momentum, float)
            and {first.moments[0].dtype}.issuperset(
                buffer.dtype for buffer in (running.mean, running.var) if buffer is not None
            )
        )
    )


def _fused_merge(
    shards: Sequence[Shard], like: Tensor, running: RunningStatistics | None
) -> Statistics:
    """Merges moments in the kernel that `torch.nn.SyncBatchNorm` uses."""
    shards = [shard for shard in shards if shard.values]
    mean, inverse = (
        torch.stack([moment.to(like.device) for moment in moments])
        for moments in zip(*[shard.moments for shard in shards], strict=True)
    )
    counts = counts_tensor(tuple([s.values for s in shards]), mean.device, mean.dtype)
    running_mean, running_var, momentum = running or (None, None, 0.0)
    mean, inverse = torch.batch_norm_gather_stats_with_counts(
        *(mean, mean, inverse, running_mean, running_var, momentum),  # type: ignore[arg-type]
        *(shards[0].denominator.eps, counts),
    )
    return Statistics(mean, inverse, inverse)
