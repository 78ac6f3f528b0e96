"""Small shards are joined where, and only where, that changes nothing but the time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharded import randomized
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from replication import DataParallel, Scattered
from syncbn import SynchronizedBatchNorm1d, batchnorm, convert_model, joining, set_sbn_eps_mode

N = 3


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a layer whose shards are all small, whether they were joined."""
    seen: list[bool] = []

    def noting(*args: Any) -> Any:
        outputs = joining.normalized(*args)
        seen.append(outputs is not None)
        return outputs

    monkeypatch.setattr(batchnorm, "normalized", noting)
    return seen


def net_of(*layers: nn.Module) -> nn.Module:
    return convert_model(randomized(nn.Sequential(*layers)))


def trained(net: nn.Module, shards: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs, gradients and buffers after a step on replicas."""
    shards = [shard.clone().requires_grad_() for shard in shards]
    model = DataParallel(net, ["cpu"] * len(shards), gather_to_one_device=False)
    outputs = model(Scattered(shards))
    torch.autograd.backward(outputs, upstream)
    grads = [tensor.grad for tensor in (*shards, *net.parameters())]
    return [*outputs, *(g for g in grads if g is not None), *net.buffers()]


def step(net: nn.Module, *shapes: tuple[int, ...], **options: Any) -> None:
    """A training step, which must give the numbers of the same step on shards that are apart."""
    shards, upstream = ([torch.randn(shape, **options) for shape in shapes] for _ in range(2))
    twin = copy.deepcopy(net)
    seen = trained(net, shards, upstream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "SMALL", -1)
        expected = trained(twin, shards, upstream)
    tolerance = {} if seen[0].dtype in (torch.float32, torch.float64) else {"rtol": 2e-2}
    torch.testing.assert_close(seen, expected, atol=1e-5, **{"rtol": 1e-5, **tolerance})


def test_small_shards_are_joined_and_give_the_very_bits_of_one_device(joins):
    net = net_of(nn.BatchNorm2d(3))
    twin = randomized(nn.BatchNorm2d(3))
    twin.load_state_dict(net[0].state_dict())
    x, dy = torch.randn(2, 7, 3, 4, 5)
    seen = trained(net, list(x.split([4, 3, 0])), list(dy.split([4, 3, 0])))
    assert joins == [True]
    x = x.requires_grad_()
    y = twin(x)
    y.backward(dy)
    expected = [y, x.grad, twin.weight.grad, twin.bias.grad, *twin.buffers()]
    joined = [torch.cat(seen[:N]), torch.cat(seen[N : 2 * N]), *seen[2 * N :]]
    for one, other in zip(joined, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"bias": False}], ids=str
)
def test_options_that_do_not_matter(joins, options):
    layer = SynchronizedBatchNorm1d(3, **options)
    step(nn.Sequential(layer), (4, 3), (2, 3), (0, 3))
    assert True in joins


def test_large_shards_are_apart(joins):
    size = joining.SMALL // 2
    step(net_of(nn.BatchNorm1d(2)), (1, 2, size), (1, 2, size))
    assert joins == [True]
    step(net_of(nn.BatchNorm1d(2)), (1, 2, size + 1), (1, 2, size + 1))
    # One of them: the others have sent their parts, and send their moments next.
    step(net_of(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), (1, 2, size), (1, 2, size + 1))
    assert joins == [True]


def test_each_output_keeps_the_memory_format_of_its_input(joins):
    net = net_of(nn.BatchNorm2d(3))
    formats = [torch.channels_last, torch.contiguous_format, torch.channels_last]
    shards = [torch.randn(2, 3, 4, 5).contiguous(memory_format=f) for f in formats]
    outputs = DataParallel(net, ["cpu"] * N, gather_to_one_device=False)(Scattered(shards))
    for y, own in zip(outputs, formats, strict=True):
        assert y.is_contiguous(memory_format=own)
    assert joins == [False]


@pytest.mark.parametrize("value", [3.0, 1e4])
def test_shards_with_a_large_mean_are_apart_after_all(joins, value):
    """Where torch's kernel would lose digits: a constant channel, or nearly so."""
    net = net_of(nn.BatchNorm1d(2))
    shards = [value + 1e-3 * torch.randn(4, 2) for _ in range(N)]
    seen = trained(net, shards, [torch.randn(4, 2)] * N)
    assert joins == [False]
    x = torch.cat(shards).double()
    weight, bias = (p.double() for p in net.parameters())
    deviation = (x.var(0, correction=0) + net[0].eps).sqrt()
    expected = (x - x.mean(0)) / deviation * weight + bias
    torch.testing.assert_close(torch.cat(seen[:N]).double(), expected, rtol=1e-5, atol=1e-5)
    assert net[0].num_batches_tracked == 1


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(2, 3, 4), (2, 3, 5)], {}),
        ([(2, 3, 4), (2, 3, 4)], {"dtype": torch.bfloat16}),
        ([(1, 3), (0, 3), (0, 3)], {}),
    ],
    ids=["other lengths", "bfloat16", "one value"],
)
def test_shards_that_cannot_be_joined(joins, shapes, options):
    net = net_of(nn.BatchNorm1d(3)).to(options.get("dtype"))
    if len(shapes) == 3:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            step(net, *shapes, **options)
    else:
        step(net, *shapes, **options)
    assert True not in joins


class InReplica(nn.Module):
    """Does something to the layer, or around it, in one replica or all."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.bn = case, SynchronizedBatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        is_first = self.bn.group.rank == 0
        if self.case == "hooks":
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return self.bn(x)
        if self.case == "no grad" and is_first:
            with torch.no_grad():
                return self.bn(x)
        if self.case == "weight" and is_first:
            self.bn.weight = self.bn.weight * 2
        if self.case == "inplace":
            return self.bn(x).add_(1).relu_()
        return self.bn(x)


@pytest.mark.parametrize("case", ["hooks", "no grad", "weight", "inplace"])
def test_what_a_replica_does_to_itself(joins, case):
    torch.manual_seed(1)
    net = InReplica(case)
    shards = [torch.randn(4, 3) for _ in range(N)]
    twin = copy.deepcopy(net)

    def outputs_and_grads(net: nn.Module) -> list[Tensor]:
        outputs = DataParallel(net, ["cpu"] * N, gather_to_one_device=False)(Scattered(shards))
        # No gradient comes to the first replica where it makes no graph.
        torch.autograd.backward(outputs[1:], [torch.ones(4, 3).cumsum(0)] * (N - 1))
        return [*outputs, *(p.grad for p in net.parameters()), *net.buffers()]

    seen = outputs_and_grads(net)
    assert (True in joins) == (case == "inplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "SMALL", -1)
        torch.testing.assert_close(seen, outputs_and_grads(twin), rtol=1e-5, atol=1e-5)


def test_other_modes_are_apart(joins):
    step(net_of(nn.BatchNorm1d(3, momentum=None)), (4, 3), (2, 3))
    set_sbn_eps_mode("clamp")
    try:
        step(net_of(nn.BatchNorm1d(3)), (4, 3), (2, 3))
    finally:
        set_sbn_eps_mode("plus")
    assert True not in joins
