"""The merge of the moments between processes: one collective forward, one backward.

If a gather is faster (few ranks, see `ProcessGroup.prefers_gather`), or for float64 inputs, each
rank gathers all counts, means and variances, and merges them as replicas do. Otherwise the ranks
add float64 sums, a few values per channel for any number of ranks:

    forward    n, sum(x) = n * mean, sum(x^2) = n * (var + mean^2)
    backward   the derivatives with respect to mean and variance of the batch, so that some ranks
               may build a graph of their backward and others not

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
from syncbn.graph import Message, Reply, merge_derivative
from syncbn.merge import CountBatch, kernel_statistics

__all__: list[str] = []


#: Input dtypes that need more digits than the sums keep.
_PRECISE = {torch.float64}


def merge_ranks(
    group: Any, message: Message, layouts: Layouts, count_batch: CountBatch | None
) -> Reply:
    """Merges the moments of all ranks, and updates the running statistics.

    Args:
        group: The `ProcessGroup`.
        message: The message of this rank.
        layouts: Dtypes and shapes that must match on all ranks.
        count_batch: Returns the running statistics to update. None in a recomputation.
    """
    exchange = Exchange(group, message, layouts)
    shard, *edges = message
    edges = MergeRanks.apply(exchange, *edges)  # type: ignore[no-untyped-call]
    total, mean, var = exchange.total, exchange.mean, exchange.var
    known_single = isinstance(total, int) and total == 1
    running = None if count_batch is None or known_single else count_batch()
    if isinstance(total, int) and total < 2:
        return total, None, None
    stats = kernel_statistics(total, mean, var, shard)
    exchange.derivative_factors = shard.kernels.derivative_factors(stats.inverse).to(mean)
    if running is not None:
        running.update(stats.mean, var, total)
    return total, stats, edges


class Exchange:
    """The two collectives of a call, one forward and one backward."""

    #: Values per channel on all ranks. A tensor where reading it would block the host.
    total: int | Tensor
    #: Mean and biased variance of all ranks, in float64.
    mean: Tensor
    var: Tensor
    #: Turn the fast messages of backward into derivatives with respect to mean and variance.
    derivative_factors: Tensor

    def __init__(self, group: ProcessGroup, message: Message, layouts: Layouts) -> None:
        self._group = group
        self.shard, local, _ = message
        self._layouts = layouts
        self._gathers = any(dtype in _PRECISE for dtype, _ in layouts)
        self._requires_grad = torch.is_grad_enabled() and local.requires_grad

    def merge(self) -> None:
        """Computes the moments of all ranks."""
        mean, var = self.shard.mean_and_var()
        # A kernel: a copy would block the host on a GPU.
        count = mean.new_full((1,), self.shard.values)
        packed = torch.cat((count, mean, var))
        if self._gathers or self._group.prefers_gather(packed):
            gathered = self._exchange("batch_norm", packed, stack=True)
            counts, means, variances = gathered.split([1, len(mean), len(mean)], 1)
            total = counts.sum()
            share = counts[:, 0] / total.clamp(min=1)
            self.mean, self.var = statistics.merge_shares(share, means, variances)
        else:
            sums = torch.cat((count, count * mean, count * (var + mean.square())))
            count_of_all, *rest = self._exchange("batch_norm", sums, stack=False).split(
                [1, len(mean), len(mean)]
            )
            total = count_of_all[0]
            self.mean, square = (one / total.clamp(min=1) for one in rest)
            self.var = (square - self.mean.square()).clamp(min=0)
        self.total = known_to_host(total)

    def summed(self, sums: Tensor) -> Tensor:
        """Adds what all ranks send in backward. Differentiable."""
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
    def forward(ctx: Any, exchange: Exchange, *edges: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.exchange = exchange
        exchange.merge()
        merged, sums = (edge.new_empty(2, edge.size(1)) for edge in edges)
        ctx.save_for_backward(merged)
        return merged, sums

    @staticmethod
    def backward(ctx: Any, exact: Tensor | None, fast: Tensor | None) -> tuple[Any, ...]:
        exchange: Exchange = ctx.exchange
        factors, shard = exchange.derivative_factors, exchange.shard
        # Without any gradient as well, because the other ranks wait for this one.
        derivative = torch.zeros_like(factors) if fast is None else fast.to(factors) * factors
        if exact is None:
            totals = exchange.summed(derivative) / factors
            return None, None, shard.rows(totals.to(shard.device, shard.dtype))
        total = exchange.summed(exact.to(factors) + derivative)
        derivative = merge_derivative(total, shard, *ctx.saved_tensors)
        return None, derivative.to(shard.device, shard.dtype), None
