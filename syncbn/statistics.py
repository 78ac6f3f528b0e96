"""The statistics of a batch: moments, the denominator, and the running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn.channels import in_float64


class Denominator(NamedTuple):
    """The square of the divisor: ``var + eps``, or ``max(var, eps)`` in clamp mode."""

    eps: float
    clamps: bool = False

    def of(self, var: Tensor) -> Tensor:
        return var.clamp(min=self.eps) if self.clamps else var + self.eps


class Arguments(NamedTuple):
    """The arguments of one call of a layer, in one replica or process."""

    #: The shard, ``(N, C, ...)``, perhaps empty.
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    denominator: Denominator


class Moments(NamedTuple):
    """Mean and biased variance of each channel, ``(C,)`` in float64."""

    #: The number of values per channel. A tensor where reading it would block the host.
    n: int | Tensor
    mean: Tensor
    var: Tensor

    def detach(self) -> Moments:
        return Moments(self.n, self.mean.detach(), self.var.detach())


class KernelMoments(NamedTuple):
    """Moments as the kernels have them, ``(C,)`` in the dtype that they return."""

    #: The number of values per channel, or the counts of all ranks, in int32, where reading them
    #: would block the host.
    n: Any
    mean: Tensor
    #: ``1 / sqrt(var + eps)``
    inverse: Tensor
    eps: float

    def mean_and_variance(self) -> Moments:
        """Returns mean and biased variance."""
        n = self.n if isinstance(self.n, int) else in_float64(self.n.sum())
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
        (total, mean, var), weight = batch.detach(), self.momentum
        if isinstance(weight, Tensor):
            weight = weight.to(var)
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
                merged = torch.lerp(in_float64(running), new, weight)
                running.copy_(merged.to(running.dtype))


#: Counts a batch, and returns the running statistics to update.
CountBatch = Callable[[], RunningStatistics]


def check_count(n: int | Tensor, x: Tensor) -> None:
    """Raises ValueError if a batch has one value per channel, as far as the host knows."""
    if isinstance(n, int) and n == 1:
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} and "
            "1 value in all of its group; take a larger batch, or call the layer in eval()"
        )
