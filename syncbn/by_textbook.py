"""The path of the reference implementation: a call in the copies of any group, on any device.

Calls with a mask take it, calls in clamp mode, and calls on devices that lack the kernels of the
fast paths. The copies add two vectors forward and one backward (see `exact_batch_norm`). The first
has no derivative, so it can tell whether all copies make the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from replication import Group, ProcessGroup, ReplicaGroup, ReplicationError
from replication.extending import Phase, Signature, phase
from syncbn.channels import on_each
from syncbn.statistics import Arguments, CountBatch, check_count
from syncbn.textbook import exact_batch_norm


def normalized_by_textbook(
    arguments: Arguments, group: Group, count_batch: CountBatch, padding: Tensor | None = None
) -> Tensor:
    """Normalizes the shard of this copy with the moments of the whole batch."""
    first_add = partial(_first_sum, arguments, group, padding is not None)
    y, moments = exact_batch_norm(*arguments, group.all_reduce, padding, first_add)
    n = moments.n
    # Where it is free to read. A fake tensor has no values.
    check_count(int(n) if n.is_cpu and type(n) is Tensor else n, arguments.x)
    count_batch().update(moments)
    return y


def _first_sum(arguments: Arguments, group: Group, has_mask: bool, sums: Tensor) -> Tensor:
    """Returns the sum over all copies, after a check that they make the same call."""
    x, weight, bias, epsilon = arguments
    name = (
        f"batch_norm(eps={epsilon.eps}, weight={weight is not None}, bias={bias is not None}, "
        f"clamp={epsilon.clamps}, mask={has_mask})"
    )
    layouts = ((x.dtype, (x.size(1),)),)
    if isinstance(group, ReplicaGroup):
        if phase() is Phase.REPLAYED:
            what = "with a mask" if has_mask else "in clamp mode or on this device"
            raise ReplicationError(
                f"{group.where}: a replica cannot recompute a call {what}, for which the other "
                "replicas would have to answer again in backward; put the layer between "
                "activation checkpoints, or use one process per device"
            )
        return group.exchange(name, sums, _added, layouts=layouts)
    if isinstance(group, ProcessGroup):
        group.refuse_exports()
        requires_grad = x.requires_grad and torch.is_grad_enabled()
        # As many numbers as `syncbn.ranks` sends, so that ranks whose calls differ, some with a
        # mask and some without, can gather at all, and then compare their calls.
        rows, _ = group.gather(Signature(name, layouts, requires_grad), sums, sums[1:])
        return rows.sum(0)
    return sums


def _added(sums: Sequence[Tensor]) -> list[Tensor]:
    first_device = sums[0].device
    total = reduce(torch.add, [each.to(first_device) for each in sums])
    return on_each(total, [each.device for each in sums])
