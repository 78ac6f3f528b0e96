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

from functools import partial

import torch
from torch import Tensor

from replication.errors import ReplicationError
from replication.groups.base import Layouts
from replication.groups.processes import Collective, ProcessGroup, debugging_advice
from syncbn.statistics import Moments, merge_shares

#: Input dtypes that need more digits than the sums keep.
_PRECISE = {torch.float64}


def to_sums(n: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Returns n, the sum and the sum of squares of each channel, ``(1 + 2 C,)``."""
    # The product at the end, for `syncbn.compiled`: Inductor lets ranks add a `cat` in place, and
    # would then read the sum of the ranks where it needs an operand of the `cat` once more.
    return torch.cat((mean.new_ones(1), mean, var + mean.square())) * n


def of_sums(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns n, ``(1,)``, and mean and biased variance, 0 without values, given added sums."""
    total = sums[:1].detach()
    mean, square = (sums[1:] / total.clamp(min=1)).chunk(2)
    return total, mean, (square - mean.square()).clamp(min=0)


class Ranks:
    """The two collectives of a call, one forward and one, if its input needs it, backward."""

    def __init__(self, group: ProcessGroup, layouts: Layouts, requires_grad: bool) -> None:
        self._group, self._is_precise = group, layouts[0][0] in _PRECISE
        self._exchange = partial(group.exchange, layouts=layouts, requires_grad=requires_grad)
        #: Adds the gradients of all ranks in backward. Differentiable.
        self.summed = partial(self._exchange, "batch_norm_backward", stack=False)

    def with_summed_gradient(self, tensor: Tensor) -> Tensor:
        """Returns the same tensor, whose gradient, perhaps none, is added over all ranks."""
        return Collective.apply(Tensor.detach, self.summed, tensor)  # type: ignore[no-any-return, no-untyped-call]

    def merge(self, own: Moments) -> Moments:
        """Returns the moments of all ranks. The count is a tensor where reading it would block."""
        n, mean, var = own
        # A kernel: a copy would block the host on a GPU.
        count = mean.new_full((1,), n)  # type: ignore[arg-type]
        packed, sizes = torch.cat((count, mean, var)), [1, len(mean), len(mean)]
        if self._is_precise or self._group.prefers_gather(packed):
            gathered = self._exchange("batch_norm", packed, stack=True)
            counts, means, variances = gathered.split(sizes, 1)
            total = self._checked(counts).sum()
            share = counts[:, 0] / total.clamp(min=1)
            mean, var = merge_shares(share, means, variances, means[0])
        else:
            sums = self._exchange("batch_norm", to_sums(count, mean, var), stack=False)
            total, mean, var = of_sums(sums)
            self._checked(total)
        return Moments(int(total.item()) if total.is_cpu else total, mean, var)

    def _checked(self, counts: Tensor) -> Tensor:
        """Returns counts that ranks announce, after a check where the host may read them."""
        for rank, count in enumerate(counts.flatten().tolist() if counts.is_cpu else ()):
            # NaN is refused as well, and more than float64 can count.
            if not (0 <= count < 2**53 and count % 1 == 0):
                who = f"rank {rank} announces" if len(counts) > 1 else "all ranks announce"
                raise ReplicationError(
                    f"{self._group._where()}: {who} {count} values per channel; is a layer "
                    f"in eval() on some ranks?{debugging_advice()}"
                )
        return counts
