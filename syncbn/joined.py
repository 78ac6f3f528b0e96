"""The obvious version of a synchronized layer: one call of torch's layer for all shards.

    y = batch_norm(cat(shards)), split again

For small shards on the CPU it is the fastest: there, calling operations takes longer than
computing them, and autograd needs no node of ours. It is torch's own arithmetic, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

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


def may_join_all(messages: Sequence[Message], running: RunningStatistics | None) -> bool:
    """Whether all shards may be joined and have one layout, and the buffers are torch's."""
    for message in messages:
        if message[2] is not None:  # an output to be filled
            return False
    if running is not None and (running.mean is None) != (running.var is None):
        return False
    xs = list(map(itemgetter(1), messages))
    if all(map(Tensor.is_contiguous, xs)):
        return True
    return len({(memory_format(x), x.shape[1:]) for x in xs}) == 1


def join(messages: Sequence[Message], running: RunningStatistics | None) -> Sequence[Tensor]:
    """Returns the outputs of all replicas, and updates the running statistics."""
    shard, first, _, weight, bias = messages[0]
    mean, var, momentum = running or (None, None, 0.0)
    assert not isinstance(momentum, Tensor)
    options = mean, var, weight, bias, True, momentum, shard.denominator.eps
    xs: list[Tensor] = list(map(itemgetter(1), messages))
    for x in xs:
        if x.shape[1:] != first.shape[1:]:
            return _join_other_sizes(xs, *options)
    y = nn.functional.batch_norm(torch.cat(xs), *options)
    # The results of `split` are views, which cannot be changed in place.
    return torch.unsafe_split_with_sizes(y, list(map(len, xs)))


def _join_other_sizes(xs: Sequence[Tensor], *options: Any) -> list[Tensor]:
    """Joins images of different sizes, seen as ``(1, C, values)``."""
    flat = [x.movedim(1, 0).flatten(1).unsqueeze(0) for x in xs]
    y = nn.functional.batch_norm(torch.cat(flat, 2), *options)
    ys = torch.unsafe_split_with_sizes(y, [x.size(2) for x in flat], 2)
    return [
        # A copy, because a view of a part cannot be changed in place under every transform.
        y.reshape(x.size(1), len(x), *x.shape[2:])
        .movedim(0, 1)
        .clone(memory_format=torch.contiguous_format)
        for x, y in zip(xs, ys, strict=True)
    ]
