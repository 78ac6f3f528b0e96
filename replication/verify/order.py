"""Tensors that are one device's, except that their samples are in another order, or padded less.

Problem: a forward may put two views below each other, `torch.cat([a, b])`, or fold time into the
batch. The copies then have the rows of one device in another order, and nothing is wrong.

Idea: sort the rows of both tensors, and compare these. Rows are sorted by a sum of their numbers
with random weights, which two different rows do not share but by a chance that does not occur.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from replication.verify.quantities import Parts


def in_one_order(parts: Parts, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of the rows of all copies and those of one device, each in an order of their own.

    Rows are first the entries along the dimension of the batch, then along all but the last. Equal
    tensors of either pair have the same rows.
    """
    tensors = [parts[index] for index in sorted(parts)]
    if not reference.dim() or reference.numel() == 0:
        return
    if all(part.shape == reference.shape for part in tensors):  # each has all samples
        whole, expected = torch.cat(tensors), torch.cat([reference] * len(tensors))
        yield _sorted(whole.flatten(1)), _sorted(expected.flatten(1))
        return
    for dim in range(reference.dim()):
        rows = [_rows(part, dim) for part in tensors if dim < part.dim()]
        expected = _rows(reference, dim)
        if len(rows) == len(tensors) and {row.shape[1:] for row in rows} == {expected.shape[1:]}:
            whole = torch.cat(rows)
            if whole.shape == expected.shape:
                yield _sorted(whole), _sorted(expected)
    if all(part.dim() and part.shape[-1] == reference.shape[-1] for part in tensors):
        whole = torch.cat([part.reshape(-1, part.shape[-1]) for part in tensors])
        expected = reference.reshape(-1, reference.shape[-1])
        if whole.shape == expected.shape:
            yield _sorted(whole), _sorted(expected)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _sorted(rows: Tensor) -> Tensor:
    rows = rows.reshape(len(rows), -1)
    numbers = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    # What is not finite has no sum that could be sorted.
    numbers = numbers.double().nan_to_num(0.5, 1.5, -1.5)
    weights = torch.randn(numbers.shape[1], generator=torch.Generator().manual_seed(0))
    return rows[(numbers @ weights.double()).argsort(stable=True)]


def as_far_as_each_goes(parts: Parts, reference: Tensor) -> tuple[Tensor, Tensor] | None:
    """The numbers of all copies, and those of one device at the same places.

    None unless the copies split one dimension, and some are shorter in one other, such as the time
    of sequences that each pads to its own longest one. One is as long as one device.
    """
    tensors = [parts[index] for index in sorted(parts)]
    if len(tensors) < 2 or any(part.dim() != reference.dim() for part in tensors):
        return None
    for split in range(reference.dim()):
        sizes = [part.shape[split] for part in tensors]
        others = [dim for dim in range(reference.dim()) if dim != split]
        shorter = [d for d in others if any(p.shape[d] != reference.shape[d] for p in tensors)]
        if sum(sizes) != reference.shape[split] or len(shorter) != 1:
            continue
        lengths = [part.shape[shorter[0]] for part in tensors]
        if max(lengths) != reference.shape[shorter[0]]:
            continue
        places = reference.split(sizes, split)
        same = [place.narrow(shorter[0], 0, n) for place, n in zip(places, lengths, strict=True)]
        return (
            torch.cat([part.flatten() for part in tensors]),
            torch.cat([part.flatten() for part in same]),
        )
    return None
