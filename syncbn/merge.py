"""Merges the moments of the shards into the statistics of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import moments as statistics
from syncbn.channels import accumulation_dtype, in_float64, values_per_channel
from syncbn.kernels import KERNELS, Buffers, Fused, Statistics

#: In standard deviations. A larger mean would cost more than three bits of precision.
_LARGE_MEAN = 8


class Denominator(NamedTuple):
    """The square of the divisor: ``var + eps``, or ``max(var, eps)`` in clamp mode."""

    eps: float
    clamps: bool = False

    def of(self, var: Tensor) -> Tensor:
        """Returns the denominator for a variance."""
        return var.clamp(min=self.eps) if self.clamps else var + self.eps

    def variance(self, inverse: Tensor) -> Tensor:
        """Returns the variance, in float64, given ``1 / sqrt(var + eps)``."""
        return in_float64(inverse).square().reciprocal().sub_(self.eps).clamp_(min=0)


class RunningStatistics(NamedTuple):
    """The buffers of a layer that a merge updates. They may be None."""

    mean: Tensor | None = None
    var: Tensor | None = None
    #: The weight of the new values: a number, or a tensor of one value.
    momentum: float | Tensor = 0.0

    def for_kernel(self, dtype: torch.dtype) -> Buffers | None:
        """Returns arguments for torch's kernels that update the buffers, if they can, or None."""
        mean, var, momentum = self
        dtypes = {None if buffer is None else buffer.dtype for buffer in (mean, var)}
        if isinstance(momentum, Tensor) or dtypes not in ({None}, {dtype}):
            return None
        return mean, var, momentum

    def update(self, mean: Tensor, var: Tensor, total: int | Tensor) -> None:
        """Updates the buffers in place, as torch does, with the unbiased variance of a batch."""
        # Mean and biased variance are in float64. `total` is the values per channel.
        weight = self.momentum
        if isinstance(weight, Tensor):
            weight = weight.to(var)
        if isinstance(total, Tensor):  # the host does not know whether it is above 1
            weight = weight * (total > 1).to(var)
            total = total.clamp(min=2)
        elif total == 0:
            return
        for buffer, new in ((self.mean, mean), (self.var, var * (total / (total - 1)))):
            if buffer is not None:
                # Hidden from autograd, as torch's kernels do it: the graph of a forward on one
                # device may have saved the buffer without needing its value.
                running = buffer.data
                running.copy_(torch.lerp(running.to(new), new, weight))


#: Counts a batch, and returns the running statistics to update.
CountBatch = Callable[[], RunningStatistics]


class Shard:
    """The numbers of one replica in a call that is not joined. It does not keep the input."""

    #: The statistics of the whole batch, once they are merged.
    stats: Statistics
    #: Whether the output requires gradients, once it is made.
    output_requires_grad: bool

    def __init__(self, arguments: Arguments) -> None:
        x, weight, bias, self.denominator = arguments
        self.device, self.values = x.device, values_per_channel(x)
        self.dtype = accumulation_dtype(x.dtype)
        #: Weight and bias of the layer, in the accumulation dtype.
        self.weight, self.bias = (p if p is None else p.to(self.dtype) for p in (weight, bias))
        self.kernels = KERNELS[x.device.type]
        #: Whether the replica records a graph, and its input needs a gradient.
        self.records_graph = torch.is_grad_enabled()
        self.needs_dx = self.records_graph and x.requires_grad
        #: The result of `Kernels.moments`, or zeros if the input is empty.
        self.moments: tuple[Tensor, Tensor]
        if self.values:
            with torch.no_grad():
                self.moments = self.kernels.moments(x, self.denominator.eps)
        else:
            self.moments = (in_float64(x.new_zeros(x.size(1))),) * 2

    def mean_and_var(self) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance of each channel, in float64 where it is supported."""
        if not isinstance(self.kernels, Fused) or not self.values:
            return self.moments
        mean, inverse = self.moments
        return in_float64(mean), self.denominator.variance(inverse)

    def batch_mean_and_var(self) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance of the whole batch, as `mean_and_var`."""
        if self.stats.mean_and_var is not None:
            return self.stats.mean_and_var
        return in_float64(self.stats.mean), self.denominator.variance(self.stats.inverse)


#: What a replica passes to a call: input, weight, bias and denominator.
Arguments = tuple[Tensor, Tensor | None, Tensor | None, Denominator]


def merge_moments(shards: Sequence[Shard], differ: bool, count_batch: CountBatch) -> None:
    """Sets the statistics of the whole batch, in replica order, and updates the running ones."""
    # `differ` is whether parameters, denominators or kernels differ between the shards.
    total = sum(shard.values for shard in shards)
    kernels, clamps = shards[0].kernels, shards[0].denominator.clamps
    if isinstance(kernels, Fused) and not (differ or clamps) and total > 1:
        merged = _merge_by_kernel(kernels, shards, total, count_batch())
        for shard in shards:
            mean, inverse = (vector.to(shard.device, non_blocking=True) for vector in merged)
            shard.stats = Statistics(total, mean, inverse, inverse)
        return
    means, variances = zip(*[shard.mean_and_var() for shard in shards], strict=True)
    mean, var = statistics.merge([shard.values for shard in shards], means, variances)
    set_statistics(shards, total, mean, var, count_batch)


def set_statistics(
    shards: Sequence[Shard],
    total: int | Tensor,
    mean: Tensor,
    var: Tensor,
    count_batch: CountBatch,
) -> None:
    """Sets and updates statistics, given mean and biased variance of the batch in float64."""
    # Usually all replicas are on one device and have the same eps.
    made: dict[object, Statistics] = {}
    for shard in shards:
        key = shard.denominator, shard.device
        if key not in made:
            made[key] = kernel_statistics(total, mean, var, shard)
        shard.stats = made[key]
    if not (isinstance(total, int) and total == 1):  # then the call raises, and does not count
        count_batch().update(mean, var, total)


def kernel_statistics(total: int | Tensor, mean: Tensor, var: Tensor, shard: Shard) -> Statistics:
    """Returns the statistics for a shard's kernels, given mean and biased variance."""
    divisor = shard.denominator.of(var)
    vectors = torch.stack((mean, divisor.rsqrt(), divisor)).to(shard.device, shard.dtype)
    head, inverse, divisor = vectors.unbind()
    mean_error = None
    # Always on accelerators, where the test would block the host, and for NaN.
    if shard.kernels.is_asynchronous or not (head * inverse).abs().amax().item() <= _LARGE_MEAN:
        mean_error = (mean - head.to(mean)).to(head)
    return Statistics(total, head, inverse, divisor, mean_error, (mean, var))


def _merge_by_kernel(
    kernels: Fused, shards: Sequence[Shard], total: int, running: RunningStatistics
) -> tuple[Tensor, Tensor]:
    """Calls `Fused.merge`, and updates the running statistics."""
    home, denominator = shards[0].device, shards[0].denominator
    shards = [shard for shard in shards if shard.values]
    moments = [
        torch.stack([moment.to(home) for moment in of_shards])
        for of_shards in zip(*[shard.moments for shard in shards], strict=True)
    ]
    counts = tuple([shard.values for shard in shards])
    buffers = running.for_kernel(moments[0].dtype)
    mean, inverse = kernels.merge(counts, moments, denominator.eps, buffers or (None, None, 0.0))
    if buffers is None:
        running.update(in_float64(mean), denominator.variance(inverse), total)
    return mean, inverse


def all_match(arguments: Sequence[Arguments]) -> bool:
    """Whether all replicas have copies of the same parameters, one eps, and one eps mode."""
    _, weight, bias, denominator = arguments[0]
    for _, w, b, own in arguments[1:]:
        if own != denominator or not (_are_copies(weight, w) and _are_copies(bias, b)):
            return False
    return True


def _are_copies(one: Tensor | None, other: Tensor | None) -> bool:
    if one is other:
        return True
    if one is None or other is None or one.requires_grad != other.requires_grad:
        return False
    if one.device == other.device:
        return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return one.grad_fn is not None and one.grad_fn is other.grad_fn  # made by one broadcast
