"""Recorded calls of a layer, from which activation checkpoints recompute it without waiting.

A recomputation runs in backward, in any order and thread, often for one replica only, so it must
not wait for other replicas. A layer needs only the moments of the whole batch from them. Each
replica therefore records the moments of each of its calls, vectors of length C.
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
    """The message and the reply of a call, detached from the graph."""

    sent: LocalMoments
    reply: GlobalMoments
    #: Whether the reply required gradients.
    requires_grad: bool
    #: Whether the call ran with grad enabled.
    grad_enabled: bool


class RecordedCalls:
    """The calls of one copy of a layer in one forward.

    Args:
        where: The layer and the replica, for error messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._calls: list[RecordedCall] = []

    def record(self, sent: LocalMoments, reply: GlobalMoments) -> None:
        """Records a call."""
        moments = reply.moments
        self._calls.append(
            RecordedCall(
                sent._replace(moments=sent.moments.detach()),
                reply if moments is None else reply._replace(moments=moments.detach()),
                moments is not None and moments.requires_grad,
                torch.is_grad_enabled(),
            )
        )

    def recall(self, sent: LocalMoments, dtype: torch.dtype) -> GlobalMoments:
        """Returns the recorded reply to the call that is being recomputed.

        torch does not say which call that is. It is the one whose moments are nearest. They need
        not be equal: some devices are not deterministic, and half precision rounds coarsely.

        Raises:
            ReplicationError: No call matches, several calls match, the forward ran without a
                graph, or its input was different.
        """
        same_size = [call for call in self._calls if call.sent.values == sent.values]
        # A call that ran without a graph is recomputed without one.
        grad_enabled = torch.is_grad_enabled()
        calls = [call for call in same_size if call.grad_enabled == grad_enabled] or same_size
        if not calls:
            raise ReplicationError(
                f"{self._where} is called in backward with {sent.values} values per channel, "
                "which matches no call of its forward inside a checkpoint. An activation "
                "checkpoint must repeat the calls of the forward; make other calls in the forward."
            )
        if grad_enabled and not calls[0].grad_enabled:
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint with use_reentrant=True,"
                " whose forward makes no graph for the replicas to share; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        rounding = _ROUNDING.get(dtype, math.inf)
        call = self._nearest(
            calls, sent.moments.detach(), rounding, is_only_call=len(same_size) == 1
        )
        if call.reply.moments is None:
            return call.reply
        # A leaf suffices: only the saved tensors of the recomputed graph are used.
        moments = call.reply.moments.detach().requires_grad_(call.requires_grad)
        return call.reply._replace(moments=moments)

    def _nearest(
        self, calls: list[RecordedCall], moments: Tensor, rounding: float, is_only_call: bool
    ) -> RecordedCall:
        """Returns the call whose message had the nearest moments."""
        on_cpu = moments.device.type == "cpu"
        if not calls[0].sent.values or (is_only_call and not on_cpu):
            return calls[0]  # a comparison would be empty, or make the host wait for a GPU
        distances = torch.stack([_distance(c.sent.moments, moments) for c in calls]).tolist()
        least = min(distances)
        if least > rounding:
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint with another input than "
                "in any call of its forward. Random numbers (dropout) cannot be reproduced if "
                "replicas on one device share its generator, and parameters must not change "
                "between forward and backward."
            )
        nearest = [c for c, d in zip(calls, distances, strict=True) if d == least]
        if any(_replies_differ(nearest[0].reply, call.reply) for call in nearest[1:]):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint, and the recomputed "
                f"call may be any of {len(nearest)}: this replica's input was the same in each, "
                "the other replicas' inputs were not. Use a separate layer for each call, or keep "
                "this layer out of the checkpoint."
            )
        return nearest[0]


#: The largest difference, in standard deviations, that is taken for rounding.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """Returns the largest difference between two pairs of moments, in standard deviations."""
    if not one.numel():
        return one.new_zeros(())
    deviation = one[1].sqrt() + torch.finfo(torch.float32).eps * one[0].abs()
    scale = torch.stack((deviation, deviation.square()))
    equal = (one == other) | (one.isnan() & other.isnan())
    return torch.where(equal, 0.0, (one - other).abs() / scale).nan_to_num(nan=math.inf).amax()


def _replies_differ(one: GlobalMoments, other: GlobalMoments) -> bool:
    """Returns whether two replies differ by more than rounding."""
    if one.moments is None or other.moments is None:
        return one.moments is not other.moments
    return bool(_distance(one.moments, other.moments) > 1e-6)
