"""The obvious version of a synchronized layer: one call of torch's layer for all shards.

    y = batch_norm(cat(shards)), split again

It is torch's own arithmetic, bit by bit. For small shards on the CPU it is the fastest: there,
calling operations takes longer than computing them, and autograd needs no node of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from replication._torch import sees_saved_tensors
from syncbn.channels import memory_format
from syncbn.merge import Arguments, CountBatch

#: The largest shard, in values. The copies cost more above it; `benchmarks.layer` shows where.
LARGEST = 2**17


def may_join(x: Tensor) -> bool:
    """Whether this shard may be joined with others, as far as its replica knows."""
    return (
        x.is_cpu
        and 0 < x.numel() <= LARGEST  # so that a batch of two replicas has enough values
        and (x.dtype == torch.float32 or x.dtype == torch.float64)
        # The output has the layout of the input.
        and (x.is_contiguous() or memory_format(x) is not torch.contiguous_format)
        and torch.is_grad_enabled()
        and not sees_saved_tensors()  # an activation checkpoint needs the shard itself
    )


def can_be_joined(arguments: Sequence[Arguments]) -> bool:
    """Whether shards that may be joined can be concatenated."""
    xs: list[Tensor] = list(map(itemgetter(0), arguments))
    return len({x.shape[1:] for x in xs}) == 1 and (
        all(map(Tensor.is_contiguous, xs)) or len(set(map(memory_format, xs))) == 1
    )


def join(arguments: Sequence[Arguments], count_batch: CountBatch) -> Sequence[Tensor]:
    """Returns the outputs of all replicas, and updates the running statistics."""
    _, weight, bias, denominator = arguments[0]
    mean, var, momentum = count_batch()
    xs: list[Tensor] = list(map(itemgetter(0), arguments))
    # Without the Python of `functional.batch_norm`. The last argument is for CUDA only.
    args = weight, bias, mean, var, True, float(momentum), denominator.eps, False
    y = torch.batch_norm(torch.cat(xs), *args)
    # The results of `split` are views, which cannot be changed in place.
    return torch.unsafe_split_with_sizes(y, [x.size(0) for x in xs])
