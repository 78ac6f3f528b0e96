"""The merge between replicas: `syncbn.joined`, or one node for all (`syncbn.graph`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, itemgetter

from syncbn.channels import empty_output
from syncbn.graph import Batch, Reply, connect
from syncbn.joined import join, may_join_all
from syncbn.merge import CountBatch, Message, are_alike, merge_moments


def merge_replicas(
    messages: Sequence[Message], count_batch: CountBatch | None = None
) -> list[Reply]:
    """Returns the reply to each replica, in replica order. Runs once per call.

    ``count_batch`` is None in a recomputation, which must not update running statistics.
    """
    shards = list(map(itemgetter(0), messages))
    total = sum(map(attrgetter("values"), shards))
    running = None if count_batch is None or total == 1 else count_batch()
    if total < 2:  # of 1 value the forward raises
        return [(total, None, None)] * len(shards)
    alike = are_alike(shards)
    if alike and may_join_all(messages, running):
        return list(zip(repeat(total), repeat(None), join(messages, running), strict=False))
    messages = list(map(measured, messages))
    merge_moments(shards, total, running)
    outputs = connect(Batch(shards, alike), messages)
    return [(total, shard.stats, y) for shard, y in zip(shards, outputs, strict=True)]


def measured(message: Message) -> Message:
    """Returns the message of a replica that counted on being joined, as the node needs it."""
    shard, x, y, weight, bias = message
    if y is not None:
        return message
    shard.measure(x)
    return shard, x, empty_output(x), weight, bias
