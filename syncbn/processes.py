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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication import ProcessGroup
from replication.groups.base import Layouts
from syncbn import moments as statistics
from syncbn.graph import Message, Reply, added, merge_derivative, rows_of
from syncbn.merge import CountBatch, Shard, mean_and_var_of, statistics_of

__all__: list[str] = []


#: Input dtypes that need more digits than the sums keep.
_PRECISE = {torch.float64}


def merge_ranks(
    group: Any,
    messages: Sequence[Message],
    layouts: Layouts,
    count_batch: CountBatch | None,
    commit: Callable[[Callable[[], None]], None] = lambda update: update(),
) -> list[Reply]:
    """Merges the moments of all ranks, and updates the running statistics.

    Args:
        group: The `ProcessGroup`.
        messages: The messages of the replicas of this rank.
        layouts: Dtypes and shapes that must match on all ranks.
        count_batch: Returns the running statistics to update. None in a recomputation.
        commit: Calls a function that updates them, or raises if the forward is closed. Nothing
            waits inside it.

    Returns:
        The replies to the replicas.
    """
    shards, local, totals = zip(*messages, strict=True)
    exchange = RankExchange(group, shards, layouts, any(edge.requires_grad for edge in local))
    edges = MergeRanks.apply(exchange, *local, *totals)  # type: ignore[no-untyped-call]
    total, mean, var = exchange.total, exchange.mean, exchange.var
    is_known = isinstance(total, int)
    batches = [] if is_known and total < 2 else statistics_of(shards, total, mean, var)

    def update() -> None:
        running = count_batch and count_batch()
        if running is not None and batches:
            running.update(batches[0].mean, var, total)

    is_single = is_known and total == 1  # the forward raises
    if count_batch is not None and not is_single:
        commit(update)
    n = len(shards)
    if not batches:
        return [(total, None, None)] * n
    factors = shards[0].kernels.derivative_factors(batches[0].inverse)
    exchange.derivative_factors = factors.to(mean)
    for shard, batch in zip(shards, batches, strict=True):
        shard.batch, shard.unmeasured = batch, None
    return list(zip([total] * n, batches, zip(edges[:n], edges[n:], strict=True), strict=True))


class RankExchange:
    """The two collectives of a call, one forward and one backward."""

    #: Values per channel on all ranks. A tensor where reading it would block the host.
    total: int | Tensor
    #: Mean and biased variance of all ranks, in float64.
    mean: Tensor
    var: Tensor
    #: Turn the fast messages of backward into derivatives with respect to mean and variance.
    derivative_factors: Tensor

    def __init__(
        self, group: ProcessGroup, shards: Sequence[Shard], layouts: Layouts, requires_grad: bool
    ) -> None:
        self._group = group
        self.shards = shards
        self._layouts = layouts
        self._gathers = any(dtype in _PRECISE for dtype, _ in layouts)
        self._requires_grad = torch.is_grad_enabled() and requires_grad

    def merge(self) -> None:
        """Computes the moments of all ranks."""
        mean, var = mean_and_var_of(self.shards)
        # A kernel: a copy would block the host on a GPU.
        count = mean.new_full((1,), sum(shard.values for shard in self.shards))
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
    """(2) of `syncbn.graph`, on each rank.

    Its inputs are local of this rank's replicas, then totals; its outputs global, then sums.
    """

    @staticmethod
    def forward(ctx: Any, exchange: RankExchange, *edges: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.exchange = exchange
        exchange.merge()
        outputs = [edge.new_empty(2, edge.size(1)) for edge in edges]
        ctx.save_for_backward(outputs[0])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange: RankExchange = ctx.exchange
        factors, shards = exchange.derivative_factors, exchange.shards
        n = len(shards)
        exact, fast = added(grads[:n]), added(grads[n:])
        none: list[Tensor | None] = [None] * n
        # Without any gradient as well, because the other ranks wait for this one.
        derivative = torch.zeros_like(factors) if fast is None else fast.to(factors) * factors
        # Fast totals are in the units of the first shard.
        if exact is None and not shards[0].batch.messages_differ:
            totals = exchange.summed(derivative) / factors
            return None, *none, *rows_of(shards, totals.to(shards[0].dtype))
        if exact is not None:
            derivative = exact.to(factors) + derivative
        total = exchange.summed(derivative)
        derivative = merge_derivative(total, shards[0], *ctx.saved_tensors)
        return None, *(derivative.to(shard.device, shard.dtype) for shard in shards), *none
