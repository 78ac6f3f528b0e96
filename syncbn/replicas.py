"""The merge between replicas: `syncbn.joined`, or one node for all (`syncbn.graph`)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter

from syncbn.channels import empty_output
from syncbn.graph import Batch, Reply, connect
from syncbn.joined import have_one_layout, join
from syncbn.merge import (
    CountBatch,
    Message,
    merge_moments,
    share_denominator,
    share_parameters,
)


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
    are_alike = share_denominator(shards) and share_parameters(shards)
    if are_alike and all(map(attrgetter("joins"), shards)) and have_one_layout(messages):
        return [(total, None, y) for y in join(messages, running)]
    messages = list(map(measured, messages))
    merge_moments(shards, total, running)
    outputs = connect(Batch(shards, are_alike), messages)
    return [(total, shard.stats, y) for shard, y in zip(shards, outputs, strict=True)]


def measured(message: Message) -> Message:
    """Returns the message of a replica that counted on being joined, as the node needs it."""
    shard, x, y, weight, bias = message
    if y is not None:
        return message
    shard.measure(x)
    return shard, x, empty_output(x), weight, bias
