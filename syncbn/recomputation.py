"""Recorded calls of a layer, from which activation checkpoints recompute it without waiting.

A recomputation runs in backward, in any order and thread, often for one replica only, so it must
not wait for other replicas. All it needs from them are the moments of the whole batch, vectors of
length C, which each replica therefore records for each of its calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replication.errors import ReplicationError
from syncbn.merge import Shard

#: The largest difference, in standard deviations, that is taken for rounding.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


class RecordedCalls:
    """The calls of one copy of a layer in one forward. Errors name the copy by ``where``."""

    def __init__(self, where: str) -> None:
        self._where = where
        #: The calls that were not joined.
        self.shards: list[Shard] = []

    def recall(self, shard: Shard, dtype: torch.dtype) -> Shard:
        """Returns the shard of the call that is recomputed, or raises ReplicationError."""
        # torch does not say which call that is. It is the one whose moments are nearest. They need
        # not be equal: some devices are not deterministic, and half precision rounds coarsely.
        # A call that made no graph, as in a checkpoint with use_reentrant=True, gives none later.
        calls = [
            call
            for call in self.shards
            if call.values == shard.values and call.records_graph >= shard.records_graph
        ]
        if calls and (not shard.values or (len(calls) == 1 and shard.kernels.is_asynchronous)):
            return calls[0]  # a comparison would be empty, or make the host wait for a GPU
        moments = shard.mean_and_var()
        found = [_distance(call.mean_and_var(), moments) for call in calls]
        distances: list[float] = torch.stack(found).tolist() if calls else []
        least = min(distances, default=math.inf)
        if not calls or least > _ROUNDING.get(dtype, math.inf):
            raise ReplicationError(
                f"{self._where} is called in backward with {shard.values} values per channel, "
                "which matches no call of its forward"
                f"{' with a graph' if shard.records_graph else ''}; use "
                "checkpoint(..., use_reentrant=False), make the same calls in both, keep dropout "
                "out of it if replicas share a device, and change no parameters between them"
            )
        call, *others = [c for c, d in zip(calls, distances, strict=True) if d == least]
        if any(
            _distance(call.batch_mean_and_var(), other.batch_mean_and_var()) > 1e-6
            for other in others
        ):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint, and the call may be "
                f"any of {1 + len(others)}: this replica's input was the same in each, but not "
                "the others'; use a layer for each call, or no checkpoint around this layer"
            )
        return call


def _distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the largest difference between two pairs of moments, in standard deviations."""
    mean, var = one
    deviation = var.sqrt() + torch.finfo(torch.float32).eps * mean.abs()
    scale = torch.stack((deviation, deviation.square()))
    first, second = torch.stack(one), torch.stack(other)
    equal = (first == second) | (first.isnan() & second.isnan())
    return torch.where(equal, 0.0, (first - second).abs() / scale).nan_to_num(nan=math.inf).amax()
