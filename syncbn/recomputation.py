"""Recorded calls of a layer, from which activation checkpoints recompute it without waiting.

A recomputation runs in backward, in any order and thread, often for one replica only, so it must
not wait for other replicas. All it needs from them are the moments of the whole batch, vectors of
length C, which each replica therefore records for each of its calls.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from replication.errors import ReplicationError

if TYPE_CHECKING:
    from syncbn.merge import Shard

#: The largest difference, in standard deviations, that is taken for rounding.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


class RecordedCalls:
    """The calls of one copy of a layer in one forward. Errors name the copy by ``where``."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._calls: list[Shard] = []

    def record(self, shard: Shard) -> None:
        """Records a call that is not joined."""
        self._calls.append(shard)

    def recall(self, shard: Shard, dtype: torch.dtype) -> Shard:
        """Returns the shard of the call that is recomputed, or raises ReplicationError."""
        # torch does not say which call that is. It is the one whose moments are nearest. They need
        # not be equal: some devices are not deterministic, and half precision rounds coarsely.
        same_size = [call for call in self._calls if call.values == shard.values]
        # A call that ran without a graph is recomputed without one.
        calls = [call for call in same_size if call.records_graph == shard.records_graph]
        calls = calls or same_size
        if calls and shard.records_graph and not calls[0].records_graph:
            self._refuse(
                "recomputed by an activation checkpoint with use_reentrant=True, whose forward "
                "makes no graph for the replicas to share; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if calls and (not shard.values or (len(same_size) == 1 and shard.kernels.is_asynchronous)):
            return calls[0]  # a comparison would be empty, or make the host wait for a GPU
        moments = shard.mean_and_var()
        distances = [_distance(call.mean_and_var(), moments) for call in calls]
        found: list[float] = torch.stack(distances).tolist() if calls else []
        least = min(found, default=math.inf)
        if not calls or least > _ROUNDING.get(dtype, math.inf):
            self._refuse(
                f"called in backward with {shard.values} values per channel, which matches no "
                "call of its forward; make the same calls in both, keep dropout out of it if "
                "replicas share a device, and change no parameters between forward and backward"
            )
        call, *others = [c for c, d in zip(calls, found, strict=True) if d == least]
        if any(
            _distance(call.batch_mean_and_var(), other.batch_mean_and_var()) > 1e-6
            for other in others
        ):
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
