"""Whole networks over several optimizer steps: n replicas give the numbers of one device."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from replication import DataParallel
from syncbn import convert_model
from tests.kit import steps
from tests.kit.devices import several
from tests.kit.properties import examples
from tests.kit.steps import each_wrap, network, step

pytestmark = pytest.mark.accelerator


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out, momentum=None)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Classifier(nn.Module):
    """Two-dimensional, with a frozen layer and one without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 6, 2))
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.frozen = nn.BatchNorm1d(6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.stem(x)).mean((2, 3))
        return self.head(self.frozen(self.norm(y)).tanh())


class Volumes(nn.Module):
    """Three-dimensional, with one normalization shared by two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 3, 2)
        self.again = nn.Conv3d(3, 3, 1)
        self.bn = nn.BatchNorm3d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.again(self.bn(self.conv(x)).relu()))
        return self.head(y.amax((2, 3, 4)))


def batch(net: nn.Module, samples: int) -> tuple[Tensor, Tensor]:
    extent = (4, 4) if isinstance(net, Classifier) else (2, 3, 2)
    x = torch.randn(samples, 2, *extent, dtype=torch.float64) * 2 + 1
    return x.requires_grad_(), torch.randint(2, (samples,))


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], upstream: list[Tensor]):
    """What every step gives: outputs, gradients of input and parameters, and at last the state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Tensor] = []
    for (x, target), noise in zip(batches, upstream, strict=True):
        x = x.detach().clone().requires_grad_()
        optimizer.zero_grad()
        y = model(x)
        # A random direction beside the loss: its gradient has no symmetry to hide a mistake in.
        (F.cross_entropy(y, target) + (y * noise).sum()).backward()
        optimizer.step()
        seen += [y.detach(), x.grad]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*seen, *model.state_dict().values()]


def assert_trains_alike(net: nn.Module, model: nn.Module, sizes: list[int]) -> None:
    batches = [batch(net, samples) for samples in sizes]
    upstream = [torch.randn_like(copy.deepcopy(net)(x).detach()) for x, _ in batches]
    expected = train(copy.deepcopy(net), batches, upstream)
    for one, other in zip(train(model, batches, upstream), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@examples(0.24)
@given(
    network=st.sampled_from([Classifier, Volumes]),
    replicas=st.integers(1, 8),
    sizes=st.lists(st.integers(2, 17), min_size=1, max_size=4),
)
def test_training_on_replicas_equals_training_on_one_device(network, replicas, sizes):
    """Clause 1e: whole networks."""
    net = network().double()
    model = DataParallel(convert_model(copy.deepcopy(net)), several(replicas))
    assert_trains_alike(net, model, sizes)


def test_networks_that_share_a_layer_give_the_numbers_of_one_device():
    shared = nn.BatchNorm1d(3).double()
    first, second = (
        nn.Sequential(shared, nn.ReLU()),
        nn.Sequential(nn.Linear(3, 3).double(), shared),
    )
    pair = nn.ModuleList([first, second])
    synchronized = convert_model(copy.deepcopy(pair))
    models = [DataParallel(m, several(n)) for m, n in zip(synchronized, (2, 3), strict=True)]
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(models[1](models[0](x)), second(first(x)))
    for one, other in zip(synchronized.buffers(), pair.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@each_wrap
@pytest.mark.parametrize("sizes", [[8, 8, 3, 1, 8], [1, 8, 1, 2, 8], [4, 1, 1, 5]], ids=str)
def test_full_and_short_batches_through_one_model(wrap, sizes):
    """vacancy#44. A single chunk, and all of them again after it."""
    net = network()
    twin = copy.deepcopy(net)
    model = wrap(convert_model(net), 4)
    for samples in sizes:
        x, dy = steps.batch(samples)
        torch.testing.assert_close(step(model, net, x, dy), step(twin, twin, x, dy))


# -- checkpoints -------------------------------------------------------------------------------


@each_wrap
@pytest.mark.parametrize("prefix", ["", "module."], ids=["module", "DataParallel"])
def test_what_replicas_have_learnt_serves_on_one_device(wrap, prefix):
    """Clause 1f: the state dict."""
    net = network()
    plain = copy.deepcopy(net)
    model = wrap(convert_model(net), 3)
    for samples in (7, 4):
        step(model, net, *steps.batch(samples))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    file = io.BytesIO()
    torch.save((model if prefix else net).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(key.startswith(prefix) for key in state)
    consume_prefix_in_state_dict_if_present(state, prefix)
    plain.load_state_dict(state, strict=True)
    x, dy = steps.batch(5)
    assert torch.equal(plain.eval()(x), net.eval()(x))
    other = convert_model(network())
    other.load_state_dict(plain.state_dict(), strict=True)
    expected = step(plain.train(), plain, x, dy)
    torch.testing.assert_close(step(wrap(other, 2), other, x, dy), expected)
