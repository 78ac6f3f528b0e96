"""The two collectives of a call between processes: one forward, and one backward.

Forward, each rank gathers one vector of all ranks: how many values per channel a rank has, their
mean, and how far they spread. Backward, the ranks add one vector: the counts, and two sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replication.errors import ReplicationError
from replication.groups.base import Layouts
from replication.groups.comparison import debugging_advice
from replication.groups.processes import Collective, ProcessGroup
from syncbn.channels import constant_tensor
from syncbn.kernels import TINY
from syncbn.statistics import Denominator


class Ranks:
    """The other processes, in one call. ``requires_grad`` tells whether it has a backward."""

    #: The number of values per channel of this rank, ``(1,)``, in the dtype that ranks exchange.
    #: `gathered` sets it.
    _count: Tensor

    def __init__(
        self,
        group: ProcessGroup,
        denominator: Denominator,
        layouts: Layouts,
        requires_grad: bool,
    ) -> None:
        self._group = group
        eps, clamps = denominator
        # What ranks exchange depends on eps, and on its mode.
        self._name = f"batch_norm(eps={float(eps)}{', clamp' if clamps else ''})"
        self._exchange = partial(group.exchange, layouts=layouts, requires_grad=requires_grad)

    def gathered(self, n: Any, mean: Tensor, spread: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Returns n of the whole batch, and of all ranks: counts, ``(size,)``, means and spreads.

        A count of 0 is tiny (see `TINY`). Where reading counts would block the host, n is the
        counts, not their sum. Spreads are variances or inverse deviations.
        """
        self._count = constant_tensor((n or TINY[mean.dtype],), mean.device, mean.dtype)
        rows = self._exchange(self._name, (self._count, mean, spread), stack=True)
        counts, end = rows[:, 0], 1 + mean.numel()
        means, spreads = rows[:, 1:end], rows[:, end:]
        total = self._total(counts.tolist()) if counts.is_cpu else counts
        return total, counts, means, spreads

    def _total(self, counts: Sequence[float]) -> int:
        """Returns the sum of the counts that ranks announce, after a check."""
        for rank, count in enumerate(counts):
            # NaN is refused as well, and more than float64 can count.
            if count != TINY[torch.float64] and not (0 < count < 2**53 and count % 1 == 0):
                raise ReplicationError(
                    f"{self._group.where}: rank {rank} announces {count} values per channel; "
                    f"is a layer in eval() on some ranks?{debugging_advice()}"
                )
        return round(sum(counts))

    def averaged(self, sum_dy: Tensor, sum_dy_xmu: Tensor) -> Tensor:
        """Adds two vectors of all ranks, ``(2, C)``, and divides them by n of the whole batch."""
        total = self._summed(sum_dy, sum_dy_xmu)
        return (total[1:] / total[:1]).to(sum_dy.dtype).view(2, sum_dy.numel())

    def _summed(self, sum_dy: Tensor, sum_dy_xmu: Tensor) -> Tensor:
        vectors = self._count, sum_dy, sum_dy_xmu
        return self._exchange("batch_norm_backward", vectors, stack=False)

    def with_summed_gradient(self, tensor: Tensor, factors: Tensor | float = 1.0) -> Tensor:
        """Returns the same tensor, ``(2, C)``, whose gradient is added over the ranks.

        It is divided by ``factors`` before, and multiplied by them after.
        """

        def summed(gradient: Tensor) -> Tensor:
            total = self._summed(*(gradient / factors).to(self._count.dtype))
            return total[1:].view_as(gradient).to(gradient.dtype) * factors

        return Collective.apply(Tensor.detach, summed, tensor)  # type: ignore[no-any-return, no-untyped-call]
