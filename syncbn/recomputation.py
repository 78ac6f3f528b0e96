"""Recorded calls of a layer, from which activation checkpoints recompute it without waiting.

A recomputation runs in backward, in any order and thread, often for one replica only, so it must
not wait for other replicas. All it needs from them are the moments of the whole batch, vectors of
length C, which each replica therefore records for each of its calls.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replication.errors import ReplicationError
from syncbn.statistics import Moments

#: The largest difference, in standard deviations, that is taken for rounding.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}


class Record(NamedTuple):
    """A call of one copy of a layer: without its input, as a checkpoint may keep it."""

    #: The moments of the shard and of the batch, as the way of the call has them: `exact` returns
    #: them in float64.
    own: Any
    batch: Any
    #: Whether the replica recorded a graph.
    records_graph: bool
    #: Whether the moments of the batch depended on any input that requires gradients.
    requires_grad: bool


class RecordedCalls:
    """The calls of one copy of a layer in one forward. Errors name the copy by ``where``."""

    def __init__(self, where: str) -> None:
        self._where = where
        #: The calls that were not joined.
        self.records: list[Record] = []

    def recall(self, own: Any, x: Tensor) -> Record:
        """Returns the record of the call that is recomputed, or raises ReplicationError."""
        # torch does not say which call that is. It is the one whose moments are nearest. They need
        # not be equal: some devices are not deterministic, and half precision rounds coarsely.
        # A call that made no graph, as in a checkpoint with use_reentrant=True, gives none later.
        makes_graph = torch.is_grad_enabled()
        records = [r for r in self.records if r.own.n == own.n and r.records_graph >= makes_graph]
        if records and (not own.n or (len(records) == 1 and not x.is_cpu)):
            return records[0]  # a comparison would be empty, or make the host wait for a GPU
        found = [_distance(r.own.exact(), own.exact()) for r in records]
        distances: list[float] = torch.stack(found).tolist() if found else []
        least = min(distances, default=math.inf)
        if not records or least > _ROUNDING.get(x.dtype, math.inf):
            raise ReplicationError(
                f"{self._where} is called in backward with {own.n} values per channel, "
                "which matches no call of its forward"
                f"{' with a graph' if makes_graph else ''}; use "
                "checkpoint(..., use_reentrant=False), make the same calls in both, keep dropout "
                "out of it if replicas share a device, and change no parameters between them"
            )
        record, *others = [r for r, d in zip(records, distances, strict=True) if d == least]
        if any(_distance(record.batch.exact(), other.batch.exact()) > 1e-6 for other in others):
            raise ReplicationError(
                f"{self._where} is recomputed by an activation checkpoint, and the call may be "
                f"any of {1 + len(others)}: this replica's input was the same in each, but not "
                "the others'; use a layer for each call, or no checkpoint around this layer"
            )
        return record


def _distance(one: Moments, other: Moments) -> Tensor:
    """Returns the largest difference between two means or variances, in standard deviations."""
    deviation = one.var.sqrt() + torch.finfo(torch.float32).eps * one.mean.abs()
    scale = torch.stack((deviation, deviation.square()))
    first, second = (torch.stack((moments.mean, moments.var)) for moments in (one, other))
    equal = (first == second) | (first.isnan() & second.isnan())
    return torch.where(equal, 0.0, (first - second).abs() / scale).nan_to_num(nan=math.inf).amax()
