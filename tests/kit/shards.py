"""Shards that need not be what a scatter would make of a batch, and memory layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import execute_replication_callbacks, parallel_apply, replicate
from syncbn import SynchronizedBatchNorm1d, set_sbn_eps_mode
from tests.kit.devices import several

#: For tests with the fixture ``joined_or_not`` of what torch's own layer does not promise.
not_joined_only = pytest.mark.parametrize("joined_or_not", ["not joined"], indirect=True)


def run_sharded(layer: nn.Module, shards: Sequence[Tensor]) -> list[Tensor]:
    """One replica of ``layer`` for each shard. Its output is where the shard was."""
    devices = several(len(shards))
    replicas = replicate(layer, devices, detach=not torch.is_grad_enabled())
    execute_replication_callbacks(replicas)
    there = [
        (shard.to(device) if isinstance(shard, Tensor) else shard,)  # a test may pass anything
        for shard, device in zip(shards, devices, strict=True)
    ]
    outputs = parallel_apply(replicas, there)
    return [y.to(shard.device) for y, shard in zip(outputs, shards, strict=True)]


class Sharded(nn.Module):
    """A network that splits its input by itself, into parts of the given sizes."""

    def __init__(self, net: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.net = net
        self.sizes = list(sizes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(run_sharded(self.net, x.split(self.sizes)))


#: For `norm`.
BATCH = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def norm() -> SynchronizedBatchNorm1d:
    return SynchronizedBatchNorm1d(3, dtype=torch.float64)


def whole_batch(x: Tensor) -> Tensor:
    """What `norm` makes of the shards of a batch, together."""
    return nn.functional.batch_norm(x, None, None, training=True)


@contextmanager
def eps_mode(mode: str) -> Iterator[None]:
    set_sbn_eps_mode(mode)
    try:
        yield
    finally:
        set_sbn_eps_mode("plus")


def randomized(layer: nn.Module) -> nn.Module:
    """Gives the parameters of a layer random values, as after some training."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return layer


def assert_reads_no_value(model: nn.Module, weight: Tensor, x: Tensor, second: bool) -> None:
    """Asserts that forward and backward run on the meta device, where reading a value raises.

    So on a GPU the host never waits for a value. ``second`` adds the second derivatives.
    """
    y = model(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y), create_graph=second)
    if second:
        dx.backward(torch.randn_like(x))
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
    with pytest.raises(RuntimeError, match="meta"):
        dx.sum().item()


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
