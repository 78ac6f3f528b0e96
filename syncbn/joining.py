"""Small shards on the CPU, joined: one replica normalizes the batch of all, as one device would.

    replica i   Part: x_i, weight_i, bias_i ──▶ the group's first: cat, torch's batch norm, split
    replica i   y_i                         ◀──

For small tensors the time of a layer is that of its many operations, for which the replicas'
threads stand in line. Here the first replica makes a few, all of them torch's own, so that
backward is torch's, too. Where that would lose digits, `syncbn.functional` does it, as for large
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replication.torch_internals import sees_saved_tensors
from syncbn import kernels

__all__: list[str] = []

#: Values of a shard, up to which it pays: to normalize them takes a core as long as the operations
#: take that each replica makes otherwise, one replica after the other in Python's eyes.
SMALL = 2**17


class Part(NamedTuple):
    """A replica's message."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


def is_small(x: Tensor) -> bool:
    """Whether a shard may be joined with those of others, if these are alike.

    Not where a replica looks at what is saved for backward, or computed: there each has its own.
    """
    return (
        x.numel() <= SMALL
        and type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and torch.is_grad_enabled()
        and not sees_saved_tensors()
    )


def normalized(
    parts: Sequence[Part],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Sequence[Tensor] | None:
    """Normalizes the shards together, and updates the running statistics.

    Returns:
        The outputs; None if the shards are not alike, or it would cost digits.
    """
    xs, (_, weight, bias) = [part.x for part in parts], parts[0]
    sizes = [len(x) for x in xs]
    if len(set(map(_what_is_alike, parts))) > 1 or sum(sizes) * xs[0].shape[2:].numel() < 2:
        return None
    y, mean, inverse = torch.native_batch_norm(
        torch.cat(xs), weight, bias, running_mean, running_var, True, momentum, eps
    )
    if not mean.detach().mul(inverse).abs_().amax() <= kernels.LARGE:  # as NaN is not, either
        return None
    # A replica may change its output in place: it must not be a view of those of all.
    return y.unsafe_split_with_sizes(sizes)


def _what_is_alike(part: Part) -> tuple[object, ...]:
    """In replicas on one device parameters are alike if they have their storage in common."""
    x, *parameters = part
    return (
        *(x.shape[1:], x.is_contiguous()),
        *(None if p is None else (p.data_ptr(), p.requires_grad) for p in parameters),
    )
