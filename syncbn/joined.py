"""The obvious version of a synchronized layer: one call of torch's layer for all shards.

    y = batch_norm(cat(shards)), split again

For small shards on the CPU it is the fastest: there, calling operations takes longer than
computing them, and autograd needs no node of ours. It is torch's own arithmetic, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from replication._torch import sees_saved_tensors
from syncbn.channels import memory_format
from syncbn.merge import Message, RunningStatistics

#: The largest shard, in values. The copies cost more above it; `benchmarks.layer` shows where.
LARGEST = 2**17


def may_join(x: Tensor) -> bool:
    """Whether this shard may be joined with others, as far as its replica knows."""
    return (
        x.device.type == "cpu"
        and x.numel() <= LARGEST
        and (x.dtype == torch.float32 or x.dtype == torch.float64)
        # The output has the layout of the input.
        and (x.is_contiguous() or memory_format(x) is not torch.contiguous_format)
        and torch.is_grad_enabled()
        and not sees_saved_tensors()  # an activation checkpoint needs the shard itself
    )


def have_one_layout(messages: Sequence[Message]) -> bool:
    """Whether all shards, which may join, are contiguous, or channels_last and of one size."""
    xs = list(map(itemgetter(1), messages))
    if all(map(Tensor.is_contiguous, xs)):
        return True
    return len({(memory_format(x), x.shape[1:]) for x in xs}) == 1


def join(messages: Sequence[Message], running: RunningStatistics | None) -> Sequence[Tensor]:
    """Returns the outputs of all replicas, and updates the running statistics."""
    shard, _, _, weight, bias = messages[0]
    xs = [message[1] for message in messages]
    shapes = [x.shape for x in xs]
    sizes_differ = len({shape[1:] for shape in shapes}) > 1
    if sizes_differ:  # seen as (1, C, values)
        xs = [x.movedim(1, 0).flatten(1).unsqueeze(0) for x in xs]
    dim = 2 if sizes_differ else 0
    mean, var, momentum = running or (None, None, 0.0)
    assert not isinstance(momentum, Tensor)
    y = nn.functional.batch_norm(
        torch.cat(xs, dim), mean, var, weight, bias, True, momentum, shard.denominator.eps
    )
    # The results of `split` are views, which cannot be changed in place.
    ys = torch.unsafe_split_with_sizes(y, [x.size(dim) for x in xs], dim)
    if not sizes_differ:
        return ys
    return [
        y.reshape(shape[1], shape[0], *shape[2:]).movedim(0, 1).contiguous()
        for y, shape in zip(ys, shapes, strict=True)
    ]
