"""The merge of the moments between processes: one collective forward, one backward.

If a gather is faster (few ranks, see `ProcessGroup.prefers_gather`), or for float64 inputs, each
rank gathers all counts, means and variances, and merges them as replicas do. Otherwise the ranks
add float64 sums, a few values per channel for any number of ranks:

    forward    n, sum(x) = n * mean, sum(x^2) = n * (var + mean^2)
    backward   the two totals that `syncbn.graph` describes

    var = sum(x^2) / n - mean^2 has lost log10(mean^2 / var) of the 16 digits of float64: 8 are
    left for a mean of 1e4 deviations, as many as the inputs have in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication import ProcessGroup
from replication.groups.base import Layouts
from syncbn import moments as statistics
from syncbn.graph import BatchContext, GlobalMoments, LocalMoments, needs_true_derivatives

__all__: list[str] = []


#: Input dtypes that need more digits than the sums keep.
_PRECISE = {torch.float64}


def merge_ranks(group: Any, local: LocalMoments, layouts: Layouts) -> GlobalMoments:
    """Merges the moments of all ranks."""
    batch = BatchContext(0)
    exchange = Exchange(group, local, layouts)
    merged = MergeRanks.apply(batch, exchange, local.moments, local.totals)  # type: ignore[no-untyped-call]
    has_data = not isinstance(batch.total, int) or batch.total > 1
    if not has_data:
        return GlobalMoments(batch, None)
    return GlobalMoments(batch, merged, statistics.has_large_mean(merged.detach()))


class Exchange:
    """The two collectives of a call, one forward and one backward."""

    def __init__(self, group: ProcessGroup, local: LocalMoments, layouts: Layouts) -> None:
        self._group = group
        self._values = local.values
        self._layouts = layouts
        self._gathers = any(dtype in _PRECISE for dtype, _ in layouts)
        self._requires_grad = torch.is_grad_enabled() and local.moments.requires_grad

    def merged(self, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's values per channel, all ranks' values, and the merged moments."""
        count = moments.new_full(
            (1,), self._values
        )  # a kernel: a copy would block the host on a GPU
        mean, var = moments
        packed = torch.cat((count, mean, var))
        if self._gathers or self._group.prefers_gather(packed):
            gathered = self._exchange("batch_norm", packed, stack=True)
            counts, stats = gathered[:, :1], gathered[:, 1:].unflatten(1, (2, -1))
            total = counts.sum()
            share = (counts / total.clamp(min=1)).unsqueeze(2)
            return count, total, statistics.merge(share, stats)
        sums = torch.cat((count, self._values * mean, self._values * (var + mean.square())))
        total, *rest = self._exchange("batch_norm", sums, stack=False).split(
            [1, len(mean), len(mean)]
        )
        mean, square = (one / total.clamp(min=1) for one in rest)
        return count, total[0], torch.stack((mean, (square - mean.square()).clamp(min=0)))

    def summed(self, sums: Tensor) -> Tensor:
        """Adds the totals of all ranks in backward. Differentiable."""
        return self._exchange("batch_norm_backward", sums, stack=False)

    def _exchange(self, name: str, tensor: Tensor, stack: bool) -> Tensor:
        return self._group.exchange(
            name,
            tensor,
            stack=stack,
            layouts=self._layouts,
            requires_grad=self._requires_grad,
        )


def known_to_host(total: Tensor) -> int | Tensor:
    """Returns a count as an int, unless that would make the host wait for an accelerator."""
    return int(total.item()) if total.device.type == "cpu" else total


class MergeRanks(Function):
    """(2) of `syncbn.graph`, on each rank."""

    @staticmethod
    def forward(
        ctx: Any, batch: BatchContext, exchange: Exchange, moments: Tensor, totals: Tensor
    ) -> Tensor:
        count, total, merged = exchange.merged(moments)
        batch.total = known_to_host(total)
        ctx.exchange = exchange
        ctx.save_for_backward(moments, merged, count / total.clamp(min=1))
        return merged

    @staticmethod
    def backward(ctx: Any, sums: Tensor) -> tuple[Any, ...]:
        total = ctx.exchange.summed(sums)
        if not needs_true_derivatives(total):
            return None, None, None, total
        moments, merged, share = ctx.saved_tensors
        dmean, dvar = total
        # The terms through the merged mean cancel.
        dmoments = (share * (dmean + 2 * dvar * (moments[0] - merged[0])), share * dvar)
        return None, None, torch.stack(dmoments), None
