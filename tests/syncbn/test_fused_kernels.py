"""How the fused kernels of CUDA are called, with stand-ins that compute on the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from replication import DataParallel
from syncbn import SynchronizedBatchNorm2d, kernels, merge
from tests.sharded import randomized
from tests.syncbn.test_kernels import (
    FUSED,
    NATIVE,
    PLAIN,
    check_every_kernel,
    moments_of,
    statistics_of,
)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, one_node: None, fused_kernels: None) -> None:
    monkeypatch.setitem(kernels.KERNELS, "cpu", FUSED)


SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 6), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kernels_give_the_numbers_of_float64(shape, last, dtype):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    x, dy = torch.randn(2, *shape).to(dtype)
    if last and layout is not None:
        x = x.contiguous(memory_format=layout)
    mean, inverse = FUSED.moments(x, 1e-5)
    stats = statistics_of(*moments_of(x), x, 1e-5)
    torch.testing.assert_close((mean, inverse), stats[1:3], rtol=1e-5, atol=1e-6)
    check_every_kernel(FUSED, x, dy, stats, 1e-5)


@pytest.mark.parametrize("total", [2**31 + 5, 2**33, torch.tensor(2.0**33).double()], ids=str)
def test_count_beyond_int32_does_not_wrap(total):
    x, dy = torch.randn(2, 4, 3, 5)
    stats = statistics_of(*moments_of(x), x, 1e-5)._replace(total=total)
    totals = torch.tensor([2.0**31, 2.0**32]).view(2, 1).expand(2, 3)
    derivatives = PLAIN.derivatives(totals, stats, None)
    expected = PLAIN.input_gradient(dy, x, stats, None, derivatives)
    # The second total of the fused kernels is in units of their own.
    scaled = totals / torch.stack((torch.ones(3), stats.inverse))
    torch.testing.assert_close(FUSED.input_gradient_by_sums(dy, x, stats, None, scaled), expected)
    torch.testing.assert_close(FUSED.input_gradient(dy, x, stats, None, derivatives), expected)


@pytest.mark.parametrize("deviation", [1e-10, 1e15])
def test_derivatives_of_extreme_deviations_are_exact(deviation):
    x, dy = torch.randn(6, 3) * deviation, torch.randn(6, 3)
    stats = statistics_of(*moments_of(x), x, 1e-30)._replace(total=6)
    sums = FUSED.reduce(dy, x, stats)
    derivatives = FUSED.derivatives(sums.double(), stats, None).float()
    expected = FUSED.input_gradient_by_sums(dy, x, stats, None, sums)
    dx = FUSED.input_gradient(dy, x, stats, None, derivatives)
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5 / deviation)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"momentum": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [[4, 4], [3, 1, 2], [2, 0, 3], [0, 2, 2]], ids=str)
def test_replicas_train_as_torchs_layer_does(options, sizes):
    layer = randomized(SynchronizedBatchNorm2d(3, **options))
    plain = torch.nn.BatchNorm2d(3, **options)
    plain.load_state_dict(layer.state_dict())
    x, dy = torch.randn(2, sum(sizes), 3, 4, 5)
    results = []
    for module in (plain, layer):
        leaf = x.clone().requires_grad_()
        if module is layer:
            model = DataParallel(layer, ["cpu"] * len(sizes), inputs_are_scattered=True)
            y = model(leaf.split(sizes))
        else:
            y = plain(leaf)
        y.backward(dy)
        grads = [parameter.grad for parameter in module.parameters()]
        results.append([y.detach(), leaf.grad, *grads, *module.buffers()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


class ByReplica(dict[str, kernels.Kernels]):
    """As if replica 1 were on another kind of device."""

    def __missing__(self, kind: str) -> kernels.Kernels:
        return NATIVE if threading.current_thread().name == "replica-1" else FUSED


@pytest.mark.parametrize("create_graph", [False, True])
def test_replicas_of_different_kernels_get_the_gradients_of_torchs_layer(
    create_graph, monkeypatch
):
    monkeypatch.setattr(merge, "KERNELS", ByReplica())
    layer, plain = SynchronizedBatchNorm2d(3), torch.nn.BatchNorm2d(3)
    x, dy = torch.randn(2, 5, 3, 2, 2)
    grads = []
    for module in (plain, DataParallel(layer, ["cpu"] * 2)):
        leaf = x.clone().requires_grad_()
        inputs = [leaf, *module.parameters()]
        grads.append(torch.autograd.grad(module(leaf), inputs, dy, create_graph=create_graph))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
