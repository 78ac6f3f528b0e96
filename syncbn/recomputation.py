"""What a replica keeps of its calls for activation checkpoints, which call its layers once more.

The recomputation runs in backward, in whatever order and thread, often for one replica alone:
nobody may wait there. All that a layer needs of the others are the moments of the whole batch, so
a replica keeps those of each of its calls, vectors of length C, and answers with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replication import ReplicationError
from syncbn.functional import Shard, Whole

__all__: list[str] = []


class KeptCall(NamedTuple):
    """What was sent and what came back, cut off from the graph."""

    sent: Shard
    reply: Whole
    #: Whether the reply required gradients, and whether it could have.
    requires_grad: bool
    grad_enabled: bool


class KeptCalls:
    """The calls of one copy of a layer in one forward.

    Args:
        where: The layer and the replica, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._calls: list[KeptCall] = []

    def keep(self, sent: Shard, reply: Whole) -> None:
        """Notes a call."""
        merged = reply.moments
        self._calls.append(
            KeptCall(
                sent._replace(moments=sent.moments.detach()),
                reply if merged is None else reply._replace(moments=merged.detach()),
                merged is not None and merged.requires_grad,
                torch.is_grad_enabled(),
            )
        )

    def recall(self, sent: Shard) -> Whole:
        """The reply to the call that is recomputed.

        Which one that is nobody tells. If the layer has been called more than once, it is the one
        whose moments are nearest; they need not be equal, as some devices do not compute the same
        twice.

        Raises:
            ReplicationError: No call, or more than one, can be meant; or the forward ran without
                a graph.
        """
        calls = [call for call in self._calls if call.sent.values == sent.values]
        if not calls:
            raise ReplicationError(
                f"{self._where} is called in backward with {sent.values} values per channel, as "
                "in no call of its forward. An activation checkpoint must call its layers as the "
                "forward has; other calls belong into the forward."
            )
        if not all(call.grad_enabled for call in calls):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint with use_reentrant=True,"
                " whose forward makes no graph for the replicas to share; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        # Of no values at all nothing is computed, whatever the reply.
        is_clear = len(calls) == 1 or not sent.values
        call = calls[0] if is_clear else self._nearest(calls, sent.moments.detach())
        if call.reply.moments is None:
            return call.reply
        # A leaf: the recomputed graph serves its saved tensors only, of which as many must be.
        merged = call.reply.moments.detach().requires_grad_(call.requires_grad)
        return call.reply._replace(moments=merged)

    def _nearest(self, calls: list[KeptCall], moments: Tensor) -> KeptCall:
        distances = torch.stack([_distance(c.sent.moments, moments) for c in calls]).tolist()
        least = min(distances)
        nearest = [c for c, d in zip(calls, distances, strict=True) if d == least]
        if any(_replies_differ(nearest[0].reply, call.reply) for call in nearest[1:]):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint, and which of "
                f"{len(nearest)} calls that is cannot be told: the input of this replica was the "
                "same in them, that of others was not. Use another layer for each of the calls, "
                "or leave this one out of the checkpoint."
            )
        return nearest[0]


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The largest difference of two tensors; what is not finite in both is alike."""
    return (one - other).abs().nan_to_num(nan=0.0).amax() if one.numel() else one.new_zeros(())


def _replies_differ(one: Whole, other: Whole) -> bool:
    if one.moments is None or other.moments is None:
        return one.moments is not other.moments
    return not torch.equal(one.moments, other.moments)
