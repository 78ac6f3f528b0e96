"""Runs a layer over shards that need not be what a scatter would make of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from replication import execute_replication_callbacks, parallel_apply, replicate
from syncbn import SynchronizedBatchNorm1d, set_sbn_eps_mode
from tests.devices import several

#: For tests with the fixture ``both_ways`` of what torch's own layer does not promise.
not_joined_only = pytest.mark.parametrize("both_ways", ["not joined"], indirect=True)


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
