"""The fused way, with stand-ins of its kernels that compute on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import fused as stand_ins
from replication import DataParallel
from syncbn import SynchronizedBatchNorm2d
from syncbn import ways as roads
from syncbn.fused import Fused
from syncbn.kernels import ON_CPU
from syncbn.node import _gradients
from syncbn.statistics import KernelMoments
from tests.layers import Recomputed
from tests.sharded import eps_mode, randomized, run_sharded

pytestmark = pytest.mark.usefixtures("not_joined", "on_accelerator")


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncbn.batchnorm.kernels_for", lambda kind: stand_ins.AS_ON_ACCELERATORS)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the outputs that each way has given."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, way: str) -> None:
        output = getattr(owner, name)

        def call(*args: Any) -> Tensor:
            counts[way] += 1
            return output(*args)

        monkeypatch.setattr(owner, name, call)

    counted(Fused, "output", "Fused")
    counted(roads, "_normalized_by_textbook", "textbook")
    return counts


def test_a_rounded_variance_is_never_negative():
    inverse = torch.tensor([1e-5]).rsqrt() * (1 + 1e-6)
    assert KernelMoments(4, torch.zeros(1), inverse, 1e-5).exact().var == 0


@pytest.mark.parametrize("sums", [(1e8, -1e8, 1), (1e8, -1e8, 1, 2), (1e8, -1e8, 1, 2, 3)])
def test_sums_of_shards_are_added_in_the_order_of_the_replicas(sums):
    """In any other order, a sum of float32 loses the last ones."""
    layer = SynchronizedBatchNorm2d(2)
    shards = [torch.randn(1, 2, 1, 1) for _ in sums]
    outputs = run_sharded(layer, shards)
    upstream = [torch.full_like(y, value) for y, value in zip(outputs, sums, strict=True)]
    torch.autograd.backward(outputs, upstream)
    assert layer.bias.grad.tolist() == [sum(sums[2:])] * 2


@pytest.mark.parametrize("total", [2**31 + 5, 2**33, torch.tensor(2.0**33)], ids=str)
def test_a_count_beyond_int32_does_not_wrap(total):
    x, dy = torch.randn(2, 400, 3)

    class Context:
        """Of a batch in which the sums of this shard are as large as those of a billion values."""

        kernels, needs_input_grad = ON_CPU, [False] * 2 + [True] * 3
        batches = (KernelMoments(total, torch.zeros(3), torch.ones(3), 1e-5),)

    dweight, dbias, dx = _gradients(Context(), [dy], [x], [torch.ones(3)])
    torch.testing.assert_close(dx, dy - (dbias + x * dweight) / float(total))
    torch.testing.assert_close(dbias, dy.sum(0))
    torch.testing.assert_close(dweight, (dy * x).sum(0))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"momentum": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [[4, 4], [3, 1, 2], [1, 1], [1, 2, 3, 4, 5]], ids=str)
def test_replicas_train_as_torchs_layer_does(options, sizes, ways):
    check_step(SynchronizedBatchNorm2d(3, **options), sizes, **options)
    assert ways == {"Fused": len(sizes)}


def check_step(layer: nn.Module, sizes: list[int], **options: Any) -> None:
    """Compares a training step with torch's layer."""
    plain = nn.BatchNorm2d(3, **options)
    plain.load_state_dict(randomized(layer).state_dict())
    x, dy = torch.randn(2, sum(sizes), 3, 4, 5)
    results = []
    for module in (plain, DataParallel(layer, ["cpu"] * len(sizes), inputs_are_scattered=True)):
        leaf = x.clone().requires_grad_()
        y = module(leaf) if module is plain else module(leaf.split(sizes))
        y.backward(dy)
        grads = [parameter.grad for parameter in module.parameters()]
        results.append([y.detach(), leaf.grad, *grads, *module.buffers()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[2, 0, 3], [0, 2, 2], [0, 0, 4]], ids=str)
def test_empty_shards_go_the_same_way(sizes, ways):
    check_step(SynchronizedBatchNorm2d(3), sizes)
    assert ways == {"Fused": len(sizes)}


@pytest.mark.parametrize("used", [1, 2])
def test_a_checkpoint_of_images_has_derivatives_of_any_order(used, ways):
    """Also where a loss does not use the outputs of all replicas."""
    images, found = torch.randn(4, 3, 2, 2), []
    plain, layer = randomized(nn.BatchNorm2d(3)), SynchronizedBatchNorm2d(3)
    layer.load_state_dict(plain.state_dict())
    for net, shards in ((plain, [images]), (Recomputed(layer), images.split(2))):
        ys = torch.cat([net(*shards)] if net is plain else run_sharded(net, shards))[: 2 * used]
        (weight, _) = net.parameters()
        (first,) = torch.autograd.grad(ys.sin().sum(), weight, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), weight)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert ways["Fused"]


def test_a_clamped_variance_leads_to_the_textbook(ways):
    with eps_mode("clamp"):
        run_sharded(SynchronizedBatchNorm2d(3), [torch.randn(2, 3, 4, 5) for _ in range(2)])
    assert ways == {"textbook": 2}
