"""One call of a synchronized layer: chooses the way in which its shards are computed.

=========  ====================================================  ================================
`Joined`   torch's own layer, called once for all shards         small shards on the CPU
`Fused`    torch's kernels, one autograd node for all shards     devices that have the kernels
`Formula`  operations that autograd knows                        everything else, and derivatives
=========  ====================================================  ================================

A replica knows which way its shard could go, and sends what that way needs. The last to arrive
decides for all. Each way is a class, whose objects are the shards:

    way.takes(call)                 whether a shard could go this way; `Formula` takes any
    shard = way(call)               in the thread of its replica
    shard.connect()                 saves the shard for backward
    way.merge(shards, count_batch)  the replies to all, or None if these shards don't go this way
    shard.output(reply)             the output, in the same thread
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replication._torch import has_other_derivatives
from replication.errors import lost_derivatives
from replication.groups.base import Group, Layouts
from replication.groups.replicas import ReplicaGroup
from syncbn.formula import Formula
from syncbn.fused import Fused
from syncbn.joined import Joined
from syncbn.processes import Ranks
from syncbn.recomputation import RecordedCalls
from syncbn.statistics import Call, CountBatch, Moments, check_count


def synchronized_batch_norm(
    call: Call, group: Group, calls: RecordedCalls | None, count_batch: CountBatch
) -> Tensor:
    """Normalizes a shard with the moments of the whole batch."""
    if has_other_derivatives(call[:3]):
        raise lost_derivatives("a synchronized layer")
    x = call.x
    if type(x) is not Tensor:
        call = call._replace(x=x.as_subclass(Tensor))
    layouts = ((x.dtype, (x.size(1),)),)  # must match on every copy
    if not isinstance(group, ReplicaGroup):
        y = _of_process(call, group, layouts, count_batch)
    elif group.in_later_backward:
        y = _recomputed(call, calls)
    else:
        y = _of_replica(call, group, layouts, calls, count_batch)
    # A subclass decides what its operations return, such as MONAI's MetaTensor with its metadata.
    return y if type(x) is Tensor else y.view_as(x)


def _of_replica(
    call: Call,
    group: ReplicaGroup,
    layouts: Layouts,
    calls: RecordedCalls | None,
    count_batch: CountBatch,
) -> Tensor:
    way: Any = Joined if Joined.takes(call) else Fused if Fused.takes(call) else Formula
    shard = way(call)
    if way is not Joined:
        shard.connect()
    exchange = partial(
        group.exchange,
        "batch_norm",
        merge=partial(_merge, group, count_batch),
        layouts=layouts,
        requires_grad=torch.is_grad_enabled(),  # tensors of other replicas may
    )
    reply = exchange(shard)
    if reply is None:
        if way is not Formula:  # which all shards go now
            way, shard = Formula, Formula(call)
            shard.connect()
        reply = exchange(shard)
    if way is Formula and shard.own.n:
        check_count(reply.batch.n, call.x)
    if calls is not None and way is not Joined:
        calls.records.append(shard.record(reply))
    return shard.output(reply)  # type: ignore[no-any-return]


def _merge(group: ReplicaGroup, count_batch: CountBatch, shards: Sequence[Any]) -> Iterable[Any]:
    """Returns the replies in replica order, all None if the shards go different ways."""
    # `group` and `count_batch` belong to the first replica. Its buffers are the original module's.
    ways: set[Any] = set(map(type, shards))
    replies = None
    if len(ways) == 1:
        replies = group.commit(partial(ways.pop().merge, shards, count_batch))
    return [None] * len(shards) if replies is None else replies


def _of_process(call: Call, group: Any, layouts: Layouts, count_batch: CountBatch) -> Tensor:
    shard: Any = Fused(call) if Fused.takes(call) else Formula(call)
    shard.connect()
    ranks = Ranks(group, layouts, torch.is_grad_enabled() and call.x.requires_grad)
    batch = ranks.merge(shard.measured().exact().detach())
    check_count(batch.n, call.x)  # in every rank, because no other process hears of it
    count_batch().update(batch)
    return shard.output(shard.reply_of_ranks(batch, ranks))  # type: ignore[no-any-return]


def _recomputed(call: Call, calls: RecordedCalls | None) -> Tensor:
    """Returns the output of a call that a checkpoint recomputes."""
    assert calls is not None  # set together with the group
    shard: Any = Fused(call) if Fused.takes(call) else Formula(call)
    record = calls.recall(shard.measured(), call.x)
    # Not before, because a checkpoint ends the recomputation when all is saved.
    shard.connect()
    if isinstance(shard, Fused) and isinstance(record.batch, Moments):
        shard = Formula(call)  # the way that all shards went after a first exchange
        shard.connect()
    return shard.recompute(record)  # type: ignore[no-any-return]
