"""How the fused kernels of CUDA are called, with stand-ins that compute on the CPU.

The stand-ins write down what `torch.nn.SyncBatchNorm` relies on. `tests/test_cuda.py` shows that
CUDA computes the same, where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from replication import DataParallel
from syncbn import SynchronizedBatchNorm2d, channels, kernels
from syncbn.kernels import Fused
from tests.sharded import randomized
from tests.syncbn.test_kernels import check_every_kernel, input_gradient, moments_of, statistics_of


def shaped(vector: Tensor | None, like: Tensor, default: float) -> Tensor:
    vector = torch.full((like.size(1),), default) if vector is None else vector
    return vector.double().view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = channels.reduced_dims(x)
    var = x.double().var(dims, correction=0)
    assert eps > 0  # else the inverse of no deviation is zero
    dtype = channels.accumulation_dtype(x.dtype)
    return x.double().mean(dims).to(dtype), (var + eps).rsqrt().to(dtype)


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    eps: float,
) -> Tensor:
    hat = (x.double() - shaped(mean, x, 0)) * shaped(inverse, x, 0)
    return (hat * shaped(weight, x, 1) + shaped(bias, x, 0)).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    assert dy.stride() == x.stride()
    assert wanted == (True, False, False) and weight is None
    dims = channels.reduced_dims(x)
    along_x = (dy.double() * (x.double() - shaped(mean, x, 0))).sum(dims)
    return dy.double().sum(dims).to(mean), along_x.to(mean), None, None


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    plain: Tensor,
    along_x: Tensor,
    count: Tensor,
) -> Tensor:
    assert dy.stride() == x.stride()
    assert count.dtype == torch.int32
    total = int(count.sum())
    s = shaped(inverse, x, 0)
    centered = x.double() - shaped(mean, x, 0)
    dx = (
        dy.double() - shaped(plain, x, 0) / total - centered * s**2 * shaped(along_x, x, 0) / total
    )
    return (dx * s * shaped(weight, x, 1)).to(x.dtype)


def batch_norm_gather_stats_with_counts(
    like: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert counts.dtype == means.dtype == like.dtype and (counts > 0).all()
    n, variances = counts.double()[:, None], inverses.double() ** -2 - eps
    total = n.sum()
    mean = (n * means.double()).sum(0) / total
    var = (n * (variances + (means.double() - mean) ** 2)).sum(0) / total
    for running, new in ((running_mean, mean), (running_var, var * total / (total - 1))):
        if running is not None:
            assert running.dtype == like.dtype
            running.copy_((1 - momentum) * running.double() + momentum * new)
    return mean.to(like), (var + eps).rsqrt().to(like)


STAND_INS: list[Any] = [
    batch_norm_stats,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
    batch_norm_gather_stats_with_counts,
]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in STAND_INS:
        assert hasattr(torch, stand_in.__name__)
        monkeypatch.setattr(torch, stand_in.__name__, stand_in)
    monkeypatch.setitem(kernels.KERNELS, "cpu", Fused)


SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 6), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kernels_give_the_numbers_of_float64(shape, last, dtype):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    x, dy = torch.randn(2, *shape).to(dtype)
    if last and layout is not None:
        x = x.contiguous(memory_format=layout)
    mean, inverse = Fused.moments(x, 1e-5)
    stats = statistics_of(*moments_of(x), x, 1e-5)
    torch.testing.assert_close((mean, inverse), stats[:2], rtol=1e-5, atol=1e-6)
    check_every_kernel(Fused, x, dy, stats, 1e-5)


def test_a_weight_of_zero_stops_the_gradient():
    x, dy = torch.randn(2, 4, 3)
    stats = statistics_of(*moments_of(x), x, 1e-5)
    weight, totals = torch.tensor([0.0, 1.0, 2.0]), torch.randn(2, 3)
    totals[:, 0] = 0
    dx = input_gradient(Fused, dy, x, stats, weight, totals, 4)
    assert dx.isfinite().all() and not dx[:, 0].any()


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
    dtype = torch.float32
    x, dy = torch.randn(2, sum(sizes), 3, 4, 5, dtype=dtype)
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


@pytest.mark.parametrize("create_graph", [False, True])
def test_replicas_of_different_weights_get_the_gradients_of_float64(create_graph):
    class Differs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = SynchronizedBatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.weight = self.norm.weight * (1 + self.norm.group.rank)
            return self.norm(x)

    net = Differs()
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    dy = torch.randn_like(x)
    y = DataParallel(net, ["cpu"] * 2)(x)
    dx, dw = torch.autograd.grad(y, (x, net.norm.weight), dy, create_graph=create_graph)
    exact, w = x.detach().double().requires_grad_(), torch.ones(3).double().requires_grad_()
    hat = torch.nn.functional.batch_norm(exact, None, None, training=True)
    scale = torch.tensor([1.0, 1.0, 2.0, 2.0]).view(4, 1, 1, 1) * w.view(1, 3, 1, 1)
    expected = torch.autograd.grad(hat * scale, (exact, w), dy.double())
    torch.testing.assert_close((dx.double(), dw.double()), expected, rtol=1e-5, atol=1e-5)
