"""Synchronized layers in the graphs of `torch.fx`: leaves, which still synchronize on replicas."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, fx, nn

from replication import DataParallel
from syncbn import SynchronizedBatchNorm2d, convert_model, summary
from tests.kit.layers import Fused, SyncFused
from tests.kit.memory import pickled
from tests.kit.shards import randomized

X = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Scaled(SynchronizedBatchNorm2d):
    """Has another argument, as BigGAN's layers have."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), Fused(3))

    def forward(self, x):  # torch.fx pickles no annotation that is a string
        return self.norms(self.conv(x)).mean((2, 3))


def networks() -> tuple[nn.Module, nn.Module]:
    """A plain network and its converted copy."""
    plain = randomized(Net().double())
    return plain, convert_model(copy.deepcopy(plain), classes={Fused: SyncFused})


def assert_trains_alike(traced: nn.Module, plain: nn.Module) -> None:
    plain = copy.deepcopy(plain)
    y, expected = DataParallel(traced, ["cpu"] * 3)(X), plain(X)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad(out, list(net.parameters()), dy)
        for out, net in ((y, traced), (expected, plain))
    ]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(traced.state_dict(), plain.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_a_synchronized_layer_is_a_leaf_like_torchs(training):
    layers = [nn.Conv2d(3, 3, 1), nn.SyncBatchNorm(3), nn.ReLU()]
    net = nn.Sequential(*layers).train(training)
    nodes = [
        [(node.op, node.target) for node in fx.symbolic_trace(each).graph.nodes]
        for each in (net, convert_model(copy.deepcopy(net)))
    ]
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize("copied", [lambda net: net, copy.deepcopy, pickled])
@pytest.mark.parametrize("training", [True, False])
def test_a_traced_network_still_synchronizes(training, copied):
    plain, net = networks()
    traced = copied(fx.symbolic_trace(net.train(training)))
    assert_trains_alike(traced, plain.train(training))


def test_hooks_and_further_arguments_are_traced_once():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hooked, self.scaled = SynchronizedBatchNorm2d(3), Scaled(3)
            self.hooked.register_forward_hook(lambda layer, args, y: y + 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(self.hooked(x), x)

    net = Wide().double()
    traced = fx.symbolic_trace(net)
    torch.testing.assert_close(DataParallel(traced, ["cpu"] * 3)(X), net(X))


def test_a_network_prepared_for_quantization_still_synchronizes():
    quantize = pytest.importorskip("torch.ao.quantization.quantize_fx", reason="is in torchao now")
    plain, net = networks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao replaces it
        mapping = torch.ao.quantization.QConfigMapping()  # observes nothing
        prepared = quantize.prepare_qat_fx(net, mapping, (X,))
    assert_trains_alike(prepared, plain)


def test_a_fused_network_in_training_for_quantization_is_converted_afterwards():
    """Fusion takes torch's own classes only. The weights are quantized, and no activations."""
    quantization = pytest.importorskip("torch.ao.quantization", reason="is in torchao now")
    x = X.float()
    plain = randomized(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao replaces it
        plain.qconfig = quantization.default_weight_only_qconfig
        plain = quantization.fuse_modules_qat(plain, ["0", "1", "2"])
        quantization.prepare_qat(plain, inplace=True)
    net = convert_model(copy.deepcopy(plain))
    assert summary(net).paths("synchronized") == ["0.bn"]
    y, expected = DataParallel(net, ["cpu"] * 3)(x), plain(x)
    torch.testing.assert_close(y, expected)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    gradients = [[p.grad for p in each.parameters()] for each in (net, plain)]
    # In float32, the only dtype of quantization: sums of other parts differ by some units.
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(net.state_dict(), plain.state_dict())
