"""One call of a synchronized layer.

It takes one of three roads:

==================  ==============================================================================
`syncbn.textbook`   plain operations: clamp mode, and devices without the five kernels
`syncbn.ranks`      five kernels, for one of several processes
`syncbn.fused`      the same for replicas: one autograd node, and one exchange, for all shards
==================  ==============================================================================

Each copy chooses by what all must have in common. Where they differ, the names of their calls do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from replication.groups.base import Group
from replication.groups.replicas import ReplicaGroup
from syncbn.channels import with_usual_strides
from syncbn.fused import Fused
from syncbn.kernels import ON_CPU, Kernels, kernels_for
from syncbn.ranks import normalized_in_rank
from syncbn.recomputation import RecordedCalls
from syncbn.statistics import CountBatch, LayerCall, check_count
from syncbn.textbook import exact_batch_norm


def synchronized_batch_norm(
    call: LayerCall, group: Group, calls: RecordedCalls | None, count_batch: CountBatch
) -> Tensor:
    """Normalizes a shard with the moments of the whole batch."""
    original = call.x
    x = original if type(original) is Tensor else original.as_subclass(Tensor)
    if 1 in x.shape:
        x = with_usual_strides(x)
    if x is not original:
        call = call._replace(x=x)
    kernels: Any = None if call.denominator.clamps else kernels_for(x.device.type)
    if kernels is None:
        y = _normalized_by_textbook(call, group, count_batch)
    elif type(group) is ReplicaGroup:  # `isinstance` of an abstract class takes calls in Python
        y = _normalized_in_replica(call, group, kernels, calls, count_batch)
    else:
        y = normalized_in_rank(call, group, kernels, count_batch)  # type: ignore[arg-type]
    # A subclass decides what its operations return, such as MONAI's MetaTensor with its metadata.
    return y if type(original) is Tensor else y.view_as(original)


def _normalized_by_textbook(call: LayerCall, group: Group, count_batch: CountBatch) -> Tensor:
    y, moments = exact_batch_norm(*call, group.all_reduce)
    n: Any = moments.n
    check_count(int(n) if n.is_cpu else n, call.x)
    count_batch().update(moments)
    return y


def _normalized_in_replica(
    call: LayerCall,
    group: ReplicaGroup,
    kernels: Kernels,
    calls: RecordedCalls | None,
    count_batch: CountBatch,
) -> Tensor:
    x, recomputes = call.x, group.in_later_backward
    shard = Fused(call, kernels, recomputes)
    if recomputes:
        record = calls.recall(shard.measured(), x)  # type: ignore[union-attr]
        # Not before, because a checkpoint ends the recomputation when all is saved.
        shard.connect()
        return shard.output(shard.recomputed(record))
    if not shard.joins:
        shard.connect()
    reply = group.exchange(
        _name(call.denominator.eps, kernels is ON_CPU),
        shard,
        # `group` and `count_batch` are those of the first of these replicas. If it is replica 0,
        # the buffers are the original module's.
        partial(_merge_shards, count_batch),
        layouts=((x.dtype, (x.size(1),)),),  # must match in every replica
        requires_grad=torch.is_grad_enabled(),  # tensors of other replicas may
    )
    if isinstance(reply, Tensor):
        return reply
    if shard.measured().n:
        check_count(reply.batch.n, x)
    if calls is not None:
        calls.records.append(shard.record(reply))
    return shard.output(reply)


def _merge_shards(count_batch: CountBatch, shards: Sequence[Fused]) -> Sequence[Any]:
    return Fused.merge(shards, count_batch)


@lru_cache(maxsize=1024)
def _name(eps: float, is_on_cpu: bool) -> str:
    """The name of a call, which must match in every replica."""
    return f"batch_norm(eps={eps}{', on the CPU' if is_on_cpu else ''})"
