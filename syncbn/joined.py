"""Joined: torch's own layer, called once for all shards. For small shards on the CPU.

Problem: there, calling operations takes longer than computing them.

Idea: the obvious version of a synchronized layer, ``batch_norm(cat(shards))`` split again, in the
thread of the last replica to arrive. It is torch's own arithmetic, bit by bit, and autograd needs
no node of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from replication._torch import sees_saved_tensors
from syncbn.channels import memory_format
from syncbn.statistics import CountBatch, LayerCall, all_match

#: The largest shard, in values. The copies cost more above it; `benchmarks.layer` shows where.
LARGEST = 2**18


class Joined:
    """A shard that may be joined with others. It sends nothing but the arguments of its call."""

    def __init__(self, call: LayerCall) -> None:
        self.call = call

    @staticmethod
    def takes(call: LayerCall) -> bool:
        x = call.x
        return (
            x.is_cpu
            and 0 < x.numel() <= LARGEST  # not empty, so that two replicas have enough values
            and (x.dtype == torch.float32 or x.dtype == torch.float64)
            and not call.denominator.clamps
            and torch.is_grad_enabled()
            and not sees_saved_tensors()  # an activation checkpoint needs the shard itself
        )

    @staticmethod
    def merge(shards: Sequence[Joined], count_batch: CountBatch) -> Sequence[Tensor] | None:
        calls = [shard.call for shard in shards]
        xs: list[Tensor] = list(map(itemgetter(0), calls))
        if not all_match(calls) or len({(x.shape[1:], memory_format(x)) for x in xs}) > 1:
            return None
        _, weight, bias, denominator = calls[0]
        mean, var, momentum = count_batch()
        # Without the Python of `functional.batch_norm`. The last argument is for CUDA only.
        args = weight, bias, mean, var, True, float(momentum), denominator.eps, False
        y = torch.batch_norm(torch.cat(xs), *args)
        # The results of `split` are views, which cannot be changed in place.
        return torch.unsafe_split_with_sizes(y, [x.size(0) for x in xs])

    def output(self, reply: Tensor) -> Tensor:
        return reply
