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

from replication.errors import ReplicationError
from replication.groups.base import Layouts
from replication.groups.processes import ProcessGroup
from syncbn import moments as statistics
from syncbn.graph import Batch, Reply, connect
from syncbn.merge import CountBatch, Message, Shard, set_statistics

#: Input dtypes that need more digits than the sums keep.
_PRECISE = {torch.float64}


def merge_ranks(
    group: ProcessGroup,
    message: Message,
    layouts: Layouts,
    count_batch: CountBatch | None,
) -> Reply:
    """Merges the moments of all ranks, and updates the running statistics.

    Args:
        group: The processes.
        message: The message of this rank.
        layouts: Dtypes and shapes that must match on all ranks.
        count_batch: Returns the running statistics to update. None in a recomputation.
    """
    shard = message[0]
    # Only with the gradient of an input does a backward make a collective.
    exchange = RankExchange(group, layouts, shard.needs_dx)
    total, mean, var = exchange.merge(shard)
    is_known = isinstance(total, int)
    running = count_batch() if count_batch is not None and not (is_known and total == 1) else None
    if is_known and total < 2:  # of 1 value the forward raises
        return total, None, None
    set_statistics([shard], total, mean, var)
    if running is not None:
        running.update(shard.stats.mean, var, total)
    (output,) = connect(Batch([shard], ranks=exchange), [message])
    return total, shard.stats, output


class RankExchange:
    """The two collectives of a call, one forward and one backward."""

    def __init__(self, group: ProcessGroup, layouts: Layouts, requires_grad: bool) -> None:
        self._group = group
        self._layouts = layouts
        self._gathers = any(dtype in _PRECISE for dtype, _ in layouts)
        self._requires_grad = requires_grad

    def merge(self, shard: Shard) -> tuple[int | Tensor, Tensor, Tensor]:
        """Returns count, mean and biased variance of all ranks, in float64.

        The count is a tensor where reading it would block the host.
        """
        mean, var = shard.mean_and_var()
        # A kernel: a copy would block the host on a GPU.
        count = mean.new_full((1,), shard.values)
        packed = torch.cat((count, mean, var))
        if self._gathers or self._group.prefers_gather(packed):
            gathered = self._exchange("batch_norm", packed, stack=True)
            counts, means, variances = gathered.split([1, len(mean), len(mean)], 1)
            self._check_counts(counts)
            total = counts.sum()
            share = counts[:, 0] / total.clamp(min=1)
            mean, var = statistics.merge_shares(share, means, variances)
        else:
            sums = torch.cat((count, count * mean, count * (var + mean.square())))
            count_of_all, *rest = self._exchange("batch_norm", sums, stack=False).split(
                [1, len(mean), len(mean)]
            )
            self._check_counts(count_of_all)
            total = count_of_all[0]
            mean, square = (one / total.clamp(min=1) for one in rest)
            var = (square - mean.square()).clamp(min=0)
        return known_to_host(total), mean, var

    def _check_counts(self, counts: Tensor) -> None:
        """Raises ReplicationError unless the announced values per channel are possible."""
        if counts.device.type != "cpu":  # reading them would block the host
            return
        for rank, count in enumerate(counts.flatten().tolist()):
            if not (0 <= count < 2**63 and count == int(count)):  # false for NaN
                who = (
                    f"rank {rank} announces" if len(counts) > 1 else "all ranks together announce"
                )
                raise ReplicationError(
                    f"{self._group.latest_call}: the number of values per channel must be whole, "
                    f"and {who} {count}; do all ranks run the same program?"
                )

    def summed(self, sums: Tensor) -> Tensor:
        """Adds what all ranks send in backward. Differentiable."""
        return self._exchange("batch_norm_backward", sums, stack=False)

    def zeros_like_sums(self, sums: Tensor) -> Tensor:
        """Returns zeros that have the derivatives of sums over all ranks.

        So ranks whose backward builds a graph make the same calls as ranks whose does not.
        """
        return KnownSums.apply(self, sums)  # type: ignore[no-any-return, no-untyped-call]

    def _exchange(self, name: str, tensor: Tensor, stack: bool) -> Tensor:
        return self._group.exchange(
            name,
            tensor,
            stack=stack,
            layouts=self._layouts,
            requires_grad=self._requires_grad,
        )


class KnownSums(Function):
    """Sums over all ranks, of which the forward knows the values: only the derivative is new."""

    @staticmethod
    def forward(ctx: Any, exchange: RankExchange, sums: Tensor) -> Tensor:
        ctx.exchange = exchange
        return torch.zeros_like(sums)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.summed(grad)


def known_to_host(total: Tensor) -> int | Tensor:
    """Returns a count as an int, unless that would make the host wait for an accelerator."""
    return int(total.item()) if total.device.type == "cpu" else total
