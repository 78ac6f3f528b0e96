"""What a replica keeps of its calls for activation checkpoints, which call its layers once more.

The recomputation runs in backward, in whatever order and thread, often for one replica alone:
nobody may wait there. All that a layer needs of the others are the moments of the whole batch, so
a replica keeps those of each of its calls, vectors of length C, and answers with them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from replication import ReplicationError
from syncbn.graph import GlobalMoments, LocalMoments

__all__: list[str] = []


class RecordedCall(NamedTuple):
    """What was sent and what came back, cut off from the graph."""

    sent: LocalMoments
    reply: GlobalMoments
    #: Whether the reply required gradients, and whether it could have.
    requires_grad: bool
    grad_enabled: bool


class RecordedCalls:
    """The calls of one copy of a layer in one forward.

    Args:
        where: The layer and the replica, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._calls: list[RecordedCall] = []

    def keep(self, sent: LocalMoments, reply: GlobalMoments) -> None:
        """Notes a call."""
        merged = reply.moments
        self._calls.append(
            RecordedCall(
                sent._replace(moments=sent.moments.detach()),
                reply if merged is None else reply._replace(moments=merged.detach()),
                merged is not None and merged.requires_grad,
                torch.is_grad_enabled(),
            )
        )

    def recall(self, sent: LocalMoments, dtype: torch.dtype) -> GlobalMoments:
        """The reply to the call that is recomputed.

        Which one that is nobody tells: it is the one whose moments are nearest. They need not be
        equal, as some devices do not compute the same twice; least of all in half precision.

        Raises:
            ReplicationError: No call, or more than one, can be meant; or the forward ran without
                a graph, or with other values.
        """
        alike = [call for call in self._calls if call.sent.values == sent.values]
        # Calls without a graph are made again as such, if at all.
        grad_enabled = torch.is_grad_enabled()
        calls = [call for call in alike if call.grad_enabled == grad_enabled] or alike
        if not calls:
            raise ReplicationError(
                f"{self._where} is called in backward with {sent.values} values per channel, as "
                "in no call of its forward that a checkpoint has made. An activation checkpoint "
                "must call its layers as the forward has; other calls belong into the forward."
            )
        if grad_enabled and not calls[0].grad_enabled:
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint with use_reentrant=True,"
                " whose forward makes no graph for the replicas to share; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        rounding = _ROUNDING.get(dtype, math.inf)
        call = self._nearest(calls, sent.moments.detach(), rounding, is_sole=len(alike) == 1)
        if call.reply.moments is None:
            return call.reply
        # A leaf: the recomputed graph serves its saved tensors only, of which as many must be.
        merged = call.reply.moments.detach().requires_grad_(call.requires_grad)
        return call.reply._replace(moments=merged)

    def _nearest(
        self, calls: list[RecordedCall], moments: Tensor, rounding: float, is_sole: bool
    ) -> RecordedCall:
        on_cpu = moments.device.type == "cpu"
        if not calls[0].sent.values or (is_sole and not on_cpu):
            return calls[0]  # without any values, or without making the host wait for a GPU
        distances = torch.stack([_distance(c.sent.moments, moments) for c in calls]).tolist()
        least = min(distances)
        if least > rounding:
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint with another input than "
                "in any call of its forward. Random numbers, as of dropout, cannot be drawn again "
                "where replicas on one device share its generator; nor may parameters change "
                "between forward and backward."
            )
        nearest = [c for c, d in zip(calls, distances, strict=True) if d == least]
        if any(_replies_differ(nearest[0].reply, call.reply) for call in nearest[1:]):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint, and which of "
                f"{len(nearest)} calls that is cannot be told: the input of this replica was the "
                "same in them, that of others was not. Use another layer for each of the calls, "
                "or leave this one out of the checkpoint."
            )
        return nearest[0]


#: Differences, in standard deviations, that may come of rounding in another order.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The largest difference of two pairs of moments, in standard deviations."""
    if not one.numel():
        return one.new_zeros(())
    deviation = one[1].sqrt() + torch.finfo(torch.float32).eps * one[0].abs()
    scale = torch.stack((deviation, deviation.square()))
    alike = (one == other) | (one.isnan() & other.isnan())
    return torch.where(alike, 0.0, (one - other).abs() / scale).nan_to_num(nan=math.inf).amax()


def _replies_differ(one: GlobalMoments, other: GlobalMoments) -> bool:
    """By more than rounding."""
    if one.moments is None or other.moments is None:
        return one.moments is not other.moments
    return bool(_distance(one.moments, other.moments) > 1e-6)
