"""The statistics of a batch: moments, their merge, the denominator, and the running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class LayerCall(NamedTuple):
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

    def exact(self) -> Moments:
        """Returns itself: see `KernelMoments.exact`."""
        return self

    def detach(self) -> Moments:
        return Moments(self.n, self.mean.detach(), self.var.detach())


class KernelMoments(NamedTuple):
    """Moments as the kernels have them, ``(C,)`` in the dtype that they return."""

    #: The number of values per channel, or the counts of all ranks where reading them would block.
    n: Any
    mean: Tensor
    #: ``1 / sqrt(var + eps)``
    inverse: Tensor
    eps: float

    def exact(self) -> Moments:
        """Returns mean and biased variance."""
        n = self.n if isinstance(self.n, int) else self.n.sum()
        var = in_float64(self.inverse).square().reciprocal().sub_(self.eps).clamp_(min=0)
        return Moments(n, in_float64(self.mean), var)


def merge(share: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the moments of k shards, ``(k, C)`` each, given the share of the values of each."""
    # Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    # Variances", 1979. From one of the means on, so that equal means give the same again.
    start = means[0].detach().nan_to_num(0.0, 0.0, 0.0)
    mean = start + share @ (means - start)
    apart = means - mean
    return mean, share @ torch.addcmul(variances, apart, apart)


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


def is_single(n: int | Tensor) -> bool:
    """Whether a batch has one value per channel, as far as the host knows.

    Then the call raises, and does not count.
    """
    return isinstance(n, int) and n == 1


def all_match(calls: Sequence[LayerCall]) -> bool:
    """Whether all replicas have copies of the same parameters, one eps, and one eps mode."""
    _, weight, bias, denominator = calls[0]
    for _, w, b, own in calls[1:]:
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
