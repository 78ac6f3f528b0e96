"""Joined: torch's own layer, called once for all shards. For small shards on the CPU.

Problem: there, calling operations takes longer than computing them.

Idea: the obvious version of a synchronized layer, ``batch_norm(cat(shards))`` split again, in the
thread of the last replica to arrive. It is torch's own arithmetic, bit by bit, and autograd needs
no node of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replication._torch import sees_saved_tensors
from syncbn.channels import memory_format
from syncbn.statistics import CountBatch, LayerCall

#: The largest shard, in values. The copies cost more above it; `benchmarks.layer` shows where.
LARGEST = 2**18


def joins(call: LayerCall) -> bool:
    """Whether the shard of a call may be joined with others."""
    x = call.x
    return (
        x.is_cpu
        and 0 < x.numel() <= LARGEST  # not empty, so that two replicas have enough values
        and (x.dtype == torch.float32 or x.dtype == torch.float64)
        and torch.is_grad_enabled()
        and not sees_saved_tensors()  # an activation checkpoint needs the shard itself
    )


def joined(calls: Sequence[LayerCall], count_batch: CountBatch) -> Sequence[Tensor] | None:
    """Returns the outputs of all shards, or None if their shapes do not fit together."""
    xs = [call.x for call in calls]
    if len({(x.shape[1:], memory_format(x)) for x in xs}) > 1:
        return None
    _, weight, bias, denominator = calls[0]
    mean, var, momentum = count_batch()
    # Without the Python of `functional.batch_norm`. The last argument is for CUDA only.
    args = weight, bias, mean, var, True, float(momentum), denominator.eps, False
    y = torch.batch_norm(torch.cat(xs), *args)
    # The results of `split` are views, which cannot be changed in place.
    return torch.unsafe_split_with_sizes(y, [x.size(0) for x in xs])
