"""Recorded calls of a layer, from which activation checkpoints recompute it without waiting.

A recomputation runs in backward, in any order and thread, often for one replica only, so it must
not wait for other replicas. A layer needs only the moments of the whole batch from them. Each
replica therefore records the moments of each of its calls, vectors of length C.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replication.errors import ReplicationError
from replication.groups.replicas import hidden_from_hooks
from syncbn.graph import Batch, Reply, connect
from syncbn.kernels import Statistics
from syncbn.merge import Message, Shard


class RecordedCall(NamedTuple):
    """The numbers of a call, without its graph."""

    shard: Shard
    #: The total and the moments of the reply.
    total: int | Tensor
    batch: Statistics | None
    #: Whether the output required gradients.
    requires_grad: bool
    #: Whether the call ran with grad enabled.
    grad_enabled: bool


class RecordedCalls:
    """The calls of one copy of a layer in one forward. Errors name the copy by ``where``."""

    def __init__(self, where: str) -> None:
        self._where = where
        #: Plain tuples of the fields of `RecordedCall`. Most calls are never recalled.
        self._calls: list[tuple[Any, ...]] = []

    def record(self, shard: Shard, reply: Reply) -> None:
        """Records a call, whose shard has been measured."""
        total, batch, output = reply
        requires_grad = output is not None and output.requires_grad
        self._calls.append((shard, total, batch, requires_grad, shard.records_graph))

    def recomputed(self, call: RecordedCall, message: Message) -> Reply:
        """Returns the reply to a call that is being recomputed, with the recorded statistics."""
        shard, x, y, weight, bias = message
        if call.batch is None:
            return call.total, None, None
        if call.requires_grad and not shard.requires_grad:
            # Only the other replicas' inputs needed a gradient, so that the outputs have a graph.
            message = shard, x.detach().requires_grad_(), y, weight, bias
        shard.stats = call.batch
        with hidden_from_hooks():
            (output,) = connect(Batch([shard]), [message])
        return call.total, call.batch, output

    def recall(self, shard: Shard, dtype: torch.dtype) -> RecordedCall:
        """Returns the call that is being recomputed.

        torch does not say which call that is. It is the one whose moments are nearest. They need
        not be equal: some devices are not deterministic, and half precision rounds coarsely.
        Raises ReplicationError if no call matches, several calls match, the forward ran without a
        graph, or its input was different.
        """
        values = shard.values
        recorded = [RecordedCall(*call) for call in self._calls]
        same_size = [call for call in recorded if call.shard.values == values]
        # A call that ran without a graph is recomputed without one.
        grad_enabled = torch.is_grad_enabled()
        calls = [call for call in same_size if call.grad_enabled == grad_enabled] or same_size
        if not calls:
            raise ReplicationError(
                f"{self._where} is called in backward with {values} values per channel, "
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
        return self._nearest(calls, shard, rounding, is_only_call=len(same_size) == 1)

    def _nearest(
        self, calls: list[RecordedCall], shard: Shard, rounding: float, is_only_call: bool
    ) -> RecordedCall:
        """Returns the call whose shard had the nearest moments."""
        if not shard.values or (is_only_call and shard.kernels.is_asynchronous):
            return calls[0]  # a comparison would be empty, or make the host wait for a GPU
        moments = shard.mean_and_var()
        distances = [_distance(call.shard.mean_and_var(), moments) for call in calls]
        distances = torch.stack(distances).tolist()
        least = min(distances)
        if least > rounding:
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint with an input that "
                "matches no call of its forward. Random numbers (dropout) cannot be reproduced if "
                "replicas on one device share its generator, and parameters must not change "
                "between forward and backward."
            )
        nearest = [c for c, d in zip(calls, distances, strict=True) if d == least]
        if any(_batches_differ(nearest[0], call) for call in nearest[1:]):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint, and the recomputed "
                f"call may be any of {len(nearest)}: this replica's input was the same in each, "
                "the other replicas' inputs were not. Use a separate layer for each call, or keep "
                "this layer out of the checkpoint."
            )
        return nearest[0]


#: The largest difference, in standard deviations, that is taken for rounding.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


def _distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the largest difference between two pairs of moments, in standard deviations."""
    mean, var = one
    if not mean.numel():
        return mean.new_zeros(())
    deviation = var.sqrt() + torch.finfo(torch.float32).eps * mean.abs()
    scale = torch.stack((deviation, deviation.square()))
    first, second = torch.stack(one), torch.stack(other)
    equal = (first == second) | (first.isnan() & second.isnan())
    return torch.where(equal, 0.0, (first - second).abs() / scale).nan_to_num(nan=math.inf).amax()


def _batches_differ(one: RecordedCall, other: RecordedCall) -> bool:
    """Returns whether the batches of two calls differ by more than rounding."""
    batch, of_other = one.batch, other.batch
    assert batch is not None and of_other is not None  # calls without values have none
    moments = one.shard.moments_of(batch), other.shard.moments_of(of_other)
    return bool(_distance(*moments) > 1e-6)
