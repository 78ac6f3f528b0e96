"""The ways around the limits that ``docs/limits.md`` suggests work."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from replication.sync.lifecycle import this_thread
from syncbn import DataParallel, SynchronizedBatchNorm1d, convert_model
from tests.kit.layers import Recomputed

CPUS = ["cpu"] * 2


def test_dropout_between_checkpoints():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                Recomputed(nn.Sequential(nn.Linear(n, 4), nn.BatchNorm1d(4))) for n in (3, 4)
            )

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.empty(len(x), 4).bernoulli_(0.5) * 2
            kept[this_thread.current.replica] = mask
            return self.second(self.first(x) * mask)

    class Replayed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * torch.cat([kept[replica] for replica in (0, 1)]))

    kept: dict[int, Tensor] = {}
    net = convert_model(Net()).double()
    alone = copy.deepcopy(net)
    alone.__class__ = Replayed
    x = torch.randn(8, 3).double()
    dy = torch.randn(8, 4).double()
    DataParallel(net, CPUS)(x).backward(dy)
    alone(x).backward(dy)
    for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_momentum_that_makes_up_for_a_second_update():
    m = 0.1
    once = nn.BatchNorm1d(3, momentum=m)
    twice = Recomputed(SynchronizedBatchNorm1d(3, momentum=1 - (1 - m) ** 0.5))
    x = torch.randn(8, 3, requires_grad=True)
    once(x)
    twice(x).sum().backward()
    assert twice.net.num_batches_tracked == 2
    torch.testing.assert_close(twice.net.running_mean, once.running_mean)
    torch.testing.assert_close(twice.net.running_var, once.running_var)
