"""Memory layouts of tensors ``(N, C, ...)``."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.stack((x, x), -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


def channels_last(x: Tensor) -> Tensor:
    """A copy with the channels last, for any number of dimensions."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def channels_of(x: Tensor) -> Tensor:
    """The values of each channel in float64, ``(C, n)``."""
    return x.double().transpose(0, 1).flatten(1)


def with_odd_strides(x: Tensor, layout: str, generator: random.Random) -> Tensor:
    """The same values in one format, with any strides where a dimension has length 1."""
    x = LAYOUTS[layout](x)
    steps = zip(x.shape, x.stride(), strict=True)
    strides = [generator.choice((0, 1, 17, 170)) if n == 1 else step for n, step in steps]
    return x.as_strided(x.shape, strides)


def batch_of(shape: tuple[int, ...], mean: float = 0.0, **options: Any) -> Tensor:
    return (torch.randn(shape) * 2 + mean).to(**options)
