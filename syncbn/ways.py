"""One call of a synchronized layer: chooses the way in which its shards are computed.

=========  ====================================================  ================================
`Fused`    five kernels, and one autograd node for all shards    the usual way
`Joined`   torch's own layer, called once for all shards         small shards of CPU replicas
`Formula`  operations that autograd knows                        everything else, and derivatives
=========  ====================================================  ================================

A replica knows which way its shard could go, and sends what that way needs. The last to arrive
decides for all, perhaps that they exchange once more, for another way. Each way is a class, whose
objects are the shards:

    way.takes(call)                  whether a shard could go this way; `Formula` takes any
    shard = way(call)                in the thread of its replica or process
    shard.connect()                  saves the shard of a replica for backward; not if it is joined
    way.merge(shards, count_batch)   the replies to all replicas, or None if the shards differ
    shard.merge_ranks(ranks, ...)    the reply to a process
    shard.recomputed(record)         the reply to a call that a checkpoint recomputes
    shard.output(reply)              the output, in the same thread
    shard.measured()                 the moments of the shard, unless it is joined
    shard.record(reply)              what a recomputation needs, unless it is joined
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from replication.groups.base import Group, Layouts
from replication.groups.processes import ProcessGroup
from replication.groups.replicas import ReplicaGroup
from syncbn.channels import with_usual_strides
from syncbn.formula import Formula
from syncbn.fused import Fused
from syncbn.joined import Joined
from syncbn.processes import Ranks
from syncbn.recomputation import RecordedCalls
from syncbn.statistics import CountBatch, LayerCall, Moments, is_single


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
    layouts = ((x.dtype, (x.size(1),)),)  # must match on every copy
    exchanges = isinstance(group, ReplicaGroup) and not group.in_later_backward
    joins = exchanges and Joined.takes(call)
    shard: Any = (Joined if joins else Fused if Fused.takes(call) else Formula)(call)
    if not isinstance(group, ReplicaGroup):
        requires_grad = torch.is_grad_enabled() and x.requires_grad
        ranks = Ranks(cast(ProcessGroup, group), call.denominator, layouts, requires_grad)
        reply = shard.merge_ranks(ranks, count_batch)
        _check_count(reply.batch.n, x)  # in every rank, because no other process hears of it
    elif not exchanges:  # a checkpoint recomputes the call
        record = calls.recall(shard.measured(), x)  # type: ignore[union-attr]
        # Not before, because a checkpoint ends the recomputation when all is saved.
        shard.connect()
        if isinstance(shard, Fused) and isinstance(record.batch, Moments):
            shard = Formula(call)  # the way that all shards went after a first exchange
            shard.connect()
        reply = shard.recomputed(record)
    else:
        shard, reply = _exchanged(shard, group, layouts, count_batch)
        if not isinstance(shard, Joined):
            if shard.measured().n:
                _check_count(reply.batch.n, x)
            if calls is not None:
                calls.records.append(shard.record(reply))
    y = shard.output(reply)
    # A subclass decides what its operations return, such as MONAI's MetaTensor with its metadata.
    return y if type(original) is Tensor else y.view_as(original)  # type: ignore[no-any-return]


def _exchanged(
    shard: Any, group: ReplicaGroup, layouts: Layouts, count_batch: CountBatch
) -> tuple[Any, Any]:
    """Exchanges a shard with the other replicas, perhaps again for another way.

    Returns the shard of the way that all went at last, and the reply.
    """
    exchange = partial(
        group.exchange,
        "batch_norm",
        merge=partial(_merge, count_batch),
        layouts=layouts,
        requires_grad=torch.is_grad_enabled(),  # tensors of other replicas may
    )
    if not isinstance(shard, Joined):
        shard.connect()
    reply = exchange(shard)
    while isinstance(reply, type):  # the way that all shards go instead
        if type(shard) is not reply:  # once per shard: a checkpoint counts what is saved
            shard = reply(shard.call)
            shard.connect()
        reply = exchange(shard)
    return shard, reply


def _merge(count_batch: CountBatch, shards: Sequence[Any]) -> Iterable[Any]:
    """Returns the replies in replica order, or the way that all shards go instead."""
    # `count_batch` belongs to the first of these replicas. If it is replica 0, the buffers are the
    # original module's.
    ways: set[Any] = set(map(type, shards))
    if len(ways) == 1:
        (way,) = ways
        replies = way.merge(shards, count_batch)
        if replies is not None:
            return replies  # type: ignore[no-any-return]
    return [Fused if Joined in ways and Formula not in ways else Formula] * len(shards)


def _check_count(n: int | Tensor, x: Tensor) -> None:
    """Raises ValueError if a batch has one value per channel, as far as the host knows."""
    if is_single(n):
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} and "
            "1 value in all of its group; take a larger batch, or call the layer in eval()"
        )
