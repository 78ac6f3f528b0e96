"""Recorded calls of a layer, from which activation checkpoints recompute it without waiting.

A recomputation runs in backward, in any order and thread, often for one replica only, so it must
not wait for other replicas. All it needs from them are the moments of the whole batch, vectors of
length C, which each replica therefore records for each of its calls.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from replication.errors import ReplicationError
from syncbn.kernels import Statistics
from syncbn.merge import Reply, Shard

#: The largest difference, in standard deviations, that is taken for rounding.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


class RecordedCall(NamedTuple):
    """The numbers of a call, without its graph."""

    shard: Shard
    #: The total and the statistics of the reply.
    total: int | Tensor
    batch: Statistics | None
    #: Whether the output required gradients.
    requires_grad: bool


class RecordedCalls:
    """The calls of one copy of a layer in one forward. Errors name the copy by ``where``."""

    def __init__(self, where: str) -> None:
        self._where = where
        #: Plain tuples of the fields of `RecordedCall`. Most calls are never recalled.
        self._calls: list[tuple[Any, ...]] = []

    def record(self, shard: Shard, reply: Reply) -> None:
        """Records a call, whose shard has been measured."""
        total, batch, output = reply
        self._calls.append((shard, total, batch, output is not None and output.requires_grad))

    def recall(self, shard: Shard, dtype: torch.dtype) -> RecordedCall:
        """Returns the call that is being recomputed, or raises ReplicationError."""
        # torch does not say which call that is. It is the one whose moments are nearest. They need
        # not be equal: some devices are not deterministic, and half precision rounds coarsely.
        values, grad_enabled = shard.values, torch.is_grad_enabled()
        recorded = map(RecordedCall._make, self._calls)
        same_size = [call for call in recorded if call.shard.values == values]
        # A call that ran without a graph is recomputed without one.
        calls = [c for c in same_size if c.shard.records_graph == grad_enabled] or same_size
        if not calls:
            self._refuse(
                f"called in backward with {values} values per channel, which matches no call of "
                "its forward inside a checkpoint; make the same calls in both"
            )
        if grad_enabled and not calls[0].shard.records_graph:
            self._refuse(
                "recomputed by an activation checkpoint with use_reentrant=True, whose forward "
                "makes no graph for the replicas to share; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if not values or (len(same_size) == 1 and shard.kernels.is_asynchronous):
            return calls[0]  # a comparison would be empty, or make the host wait for a GPU
        moments = shard.mean_and_var()
        distances = [_distance(call.shard.mean_and_var(), moments) for call in calls]
        distances = torch.stack(distances).tolist()
        least = min(distances)
        if least > _ROUNDING.get(dtype, math.inf):
            self._refuse(
                "recomputed by an activation checkpoint with an input that matches no call of its "
                "forward; keep dropout out of it if replicas share a device, and change no "
                "parameters between forward and backward"
            )
        call, *others = [c for c, d in zip(calls, distances, strict=True) if d == least]
        if any(_batches_differ(call, other) for other in others):
            self._refuse(
                f"recomputed by an activation checkpoint, and the call may be any of "
                f"{1 + len(others)}: this replica's input was the same in each, but not the "
                "others'; use a layer for each call, or no checkpoint around this layer"
            )
        return call

    def _refuse(self, reason: str) -> NoReturn:
        raise ReplicationError(f"{self._where} is {reason}")


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
