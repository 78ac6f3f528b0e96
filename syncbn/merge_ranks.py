"""The merge of the moments between processes: one collective forward, one backward.

What travels are float64 sums, of C values a few whatever the number of ranks:

    forward    n, sum(x) = n * mean, sum(x^2) = n * (var + mean^2)
    backward   the two sums that `syncbn.functional` describes

    var = sum(x^2) / n - mean^2 loses digits where the mean is large against the deviation; of the
    16 that float64 has it loses log10(mean^2 / var), which leaves 8 at a mean of 1e4, and more
    than the float32 of the inputs has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication import Group
from syncbn.functional import Joint, Shard, Whole

__all__: list[str] = []


def merge_ranks(group: Group, shard: Shard) -> Whole:
    """Sends this rank's moments, and returns those of all ranks."""
    joint = Joint(0)
    merged = MergeRanks.apply(joint, group, shard.values, shard.moments)  # type: ignore[no-untyped-call]
    has_data = not isinstance(joint.total, int) or joint.total > 1
    return Whole(joint, merged if has_data else None)


def known_to_host(total: Tensor) -> int | Tensor:
    """A count as a number, where the host does not have to wait for a GPU to tell."""
    return int(total.item()) if total.device.type == "cpu" else total


class MergeRanks(Function):
    """(2) of `syncbn.functional`, as each rank has a part of it."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, group: Group, n: int, moments: Tensor) -> Tensor:
        mean, var = moments
        count = moments.new_tensor([n])
        sums = torch.cat((count, n * mean, n * (var + mean.square())))
        total, *parts = group.all_reduce(sums).split([1, len(mean), len(mean)])
        mean, square = (part / total.clamp(min=1) for part in parts)
        merged = torch.stack((mean, (square - mean.square()).clamp(min=0)))
        joint.total = known_to_host(total)
        ctx.joint, ctx.group = joint, group
        ctx.save_for_backward(moments, merged, count / total.clamp(min=1))
        return merged

    @staticmethod
    def backward(ctx: Any, sums: Tensor) -> tuple[Any, ...]:
        total = ctx.group.all_reduce(sums)
        if not ctx.joint.walks_exact_edges():
            return None, None, None, total
        moments, merged, share = ctx.saved_tensors
        dmean, dvar = total
        # The variance's way through the merged mean adds up to nothing.
        return (
            None,
            None,
            None,
            torch.stack((share * (dmean + 2 * dvar * (moments[0] - merged[0])), share * dvar)),
        )
