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

from replication.groups.replicas import ReplicaGroup
from syncbn.fused import Fused
from syncbn.kernels import ON_CPU, Kernels
from syncbn.recomputation import RecordedCalls
from syncbn.statistics import CountBatch, LayerCall, check_count


def normalized_in_replica(
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
