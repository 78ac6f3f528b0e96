"""The same bits in every run, however the threads of the replicas are delayed."""

from __future__ import annotations

import copy
import random
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.kit.devices import several

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.usefixtures("joined_or_not"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning"),
]

#: How often a test repeats what must give the same bits. A sum in the order of arrival differs in
#: every second of them.
RUNS = 12

#: Of the delays, not of the numbers.
chance = random.Random(0)


def delay() -> None:
    """Up to half a millisecond, or only a chance for others to run, or nothing."""
    kind = chance.randrange(3)
    if kind:
        time.sleep(0 if kind == 1 else chance.random() / 2000)


class Delay(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        delay()
        return x


def delayed(net: nn.Module) -> nn.Module:
    """Adds delays before and after each normalization."""
    for layer in net.modules():
        if isinstance(layer, (nn.modules.batchnorm._BatchNorm, ReplicaAware)):
            layer.register_forward_pre_hook(lambda *_: delay())
            layer.register_forward_hook(lambda *_: delay())
    return net


class Shared(nn.Module):
    """Convolutions, and several normalizations; one of them, and a convolution, called thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
        self.bn3 = nn.BatchNorm1d(4)
        self.delay = Delay()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.delay(self.conv1(x))).relu()
        for _ in range(3):
            x = self.delay(x + self.bn2(self.conv2(x)).tanh())
        return self.head(self.bn3(self.delay(x.amax((2, 3)))))


class Collectives(ReplicaAware, nn.Module):
    """Each collective in turn, in sums that depend on the order of what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 3, 16))

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        # Values of very different size: whatever is added in another order is rounded otherwise.
        y = x.flatten(1)[:, :16] * self.scale * 7.0**group.rank
        for op in ("sum", "mean", "max", "min", "product"):
            delay()
            y = y + group.all_reduce((y / 3).tanh().sum(0) + 1.1, op)
        delay()
        y = y + torch.cat(group.all_gather(y)).square().mean(0)
        delay()
        y = y + group.broadcast(y.sum(0), src=group.size - 1)
        delay()
        parts = y.mean(0) * torch.linspace(1, 2, group.size).unsqueeze(1)
        return (y + group.reduce_scatter(list(parts.unbind()))).sin()


class Twice(nn.Module):
    """One layer that talks, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.delay = Collectives(), Delay()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.delay(self.layer(x)))


def bits(model: nn.Module, x: Tensor) -> list[Tensor]:
    """All that a step gives and leaves: outputs, gradients, running statistics."""
    model = copy.deepcopy(model)
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(y.detach().cos())
    grads = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    return [y.detach(), *grads, *model.buffers()]


def assert_equal_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one, other), f"tensor {index} differs by {(one - other).abs().max()}"


def model_and_batch(network: type[nn.Module], replicas: int) -> tuple[nn.Module, Tensor]:
    net = delayed(convert_model(network()))
    # Of a large mean, so that there is something to round.
    return DataParallel(net, several(replicas)), torch.randn(9, 2, 6, 6) * 3 + 10


# -- what the threads have done before ---------------------------------------------------------


class Branches(nn.Module):
    """One normalization in two branches (as a head shared by the levels of a pyramid is)."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x) * 0.3 + self.bn(self.bn(2 * x).relu()) * 7


class Scatter(ReplicaAware, nn.Module):
    """A tensor is sent to all members."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:2] * (i + 1) / 3 for i in range(self.group.size)]
        return x * self.group.reduce_scatter(parts).sum() * 7.0**self.group.rank


class Busy(nn.Module):
    """Makes a few nodes of a graph in one replica; in the end some replica may fail."""

    def forward(self, x: Tensor, replica: int, nodes: int, fails: bool) -> Tensor:
        x = x * 1
        if threading.current_thread().name == f"replica-{replica}":
            for _ in range(nodes):
                _ = x * 1
            if fails:
                raise ArithmeticError
        return x


def unlike_before(replicas: int) -> None:
    """Gives every thread some other work first, each a different amount."""
    other = DataParallel(Busy(), several(replicas))
    x = torch.ones(replicas, requires_grad=True)
    with suppress(ArithmeticError):
        nodes, fails = chance.choice((1, 3, 10, 30, 100)), chance.random() < 0.5
        other(x, chance.randrange(replicas), nodes, fails)


@pytest.mark.parametrize("network", [Shared, Twice])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_steps_are_bit_equal_for_all_delays_and_all_earlier_work_of_the_threads(network, replicas):
    """Clause 4a: the same bits in replicas."""
    model, x = model_and_batch(network, replicas)
    expected = bits(model, x)
    assert all(tensor.isfinite().all() for tensor in expected)
    for run in range(RUNS):
        if run % 2:
            unlike_before(replicas)
        assert_equal_bits(bits(model, x), expected)


@pytest.mark.cpu("engine threads of several devices add gradients in order of arrival")
@pytest.mark.parametrize("network", [Branches, Scatter])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_branches_are_bit_equal_for_all_earlier_work_of_the_threads(network, replicas):
    """Clause 4a: the same bits in replicas."""
    model, x = DataParallel(network(), several(replicas)), torch.randn(10, 4)
    expected = bits(model, x)
    for _ in range(2 * RUNS):
        unlike_before(replicas)
        assert_equal_bits(bits(model, x), expected)


class Uneven(nn.Module):
    """Replicas make different numbers of nodes, before and after a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for _ in range(10 * self.bn.group.rank):
                _ = x * 1
            before = x.sin() / 3 + x.cos() * 0.7
            delay()
            x = self.bn(x) * 7 + before + x.tanh() / 7 + x.sigmoid() * 0.3
        return x


@pytest.mark.cpu("engine threads of several devices add gradients in order of arrival")
@pytest.mark.parametrize(
    ("replicas", "anomaly"),
    [(2, False), (3, False), (5, False), pytest.param(3, True, marks=pytest.mark.slow)],
)
def test_bits_do_not_depend_on_which_replica_merges(replicas, anomaly):
    """Clause 4a: the same bits in replicas."""
    model, x = DataParallel(Uneven(), several(replicas)), torch.randn(4 * replicas, 4)
    expected = bits(model, x)
    with torch.autograd.set_detect_anomaly(anomaly):
        for _ in range(RUNS):
            assert_equal_bits(bits(model, x), expected)
