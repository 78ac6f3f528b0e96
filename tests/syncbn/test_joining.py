"""Small shards are normalized by one node, whose numbers are those of the other nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from replication import DataParallel, Scattered
from syncbn import SynchronizedBatchNorm1d, convert_model, joining
from tests import oracle
from tests.sharded import randomized, run_sharded

N = 3


needs_torch_to_tell = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="an older torch does not tell of hooks on saved tensors, so that nothing is joined",
)


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many shards each node has normalized."""
    seen: list[int] = []
    joined = joining._joined

    def noting(shards: Any, total: int) -> Any:
        seen.append(len(shards))
        return joined(shards, total)

    monkeypatch.setattr(joining, "_joined", noting)
    return seen


def net_of(*layers: nn.Module) -> nn.Module:
    return convert_model(randomized(nn.Sequential(*layers)))


def trained(net: nn.Module, shards: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs, gradients and buffers after a step on replicas."""
    shards = [shard.detach().clone().requires_grad_() for shard in shards]
    model = DataParallel(net, ["cpu"] * len(shards), gather_to_one_device=False)
    outputs = model(Scattered(shards))
    torch.autograd.backward(outputs, upstream)
    grads = [tensor.grad for tensor in (*shards, *net.parameters())]
    return [*outputs, *(g for g in grads if g is not None), *net.buffers()]


def apart(function: Callable[[], Any]) -> Any:
    """What a function returns if no shard is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "SMALL", -1)
        return function()


def step(net: nn.Module, *shapes: tuple[int, ...]) -> None:
    """A training step, which must give the numbers of the same step on shards that are apart."""
    shards, upstream = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    twin = copy.deepcopy(net)
    seen = trained(net, shards, upstream)
    expected = apart(lambda: trained(twin, shards, upstream))
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


@needs_torch_to_tell
@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 3), (3, 3), (0, 3)],
        [(2, 3, 4), (1, 3, 4), (1, 3, 4)],
        [(2, 3, 4, 5), (1, 3, 2, 2), (0, 3, 9, 9)],
    ],
    ids=["uneven", "lengths", "sizes"],
)
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_small_shards_are_joined(joins, shapes, mean):
    shards = [(torch.randn(shape).double() + mean).requires_grad_() for shape in shapes]
    upstream = [torch.randn(shape).double() for shape in shapes]
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shapes[0])]
    expected = oracle.batch_norm(shards, upstream)
    seen = trained(convert_model(layer(3).double()), shards, upstream)
    assert joins == [N]
    torch.testing.assert_close(seen[:N], list(expected.outputs), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(seen[N : 2 * N], list(expected.input_grads), rtol=1e-7, atol=1e-7)


@needs_torch_to_tell
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"group_size": 2},
    ],
    ids=str,
)
def test_options(joins, options):
    step(nn.Sequential(SynchronizedBatchNorm1d(3, **options)), (4, 3), (2, 3), (1, 3), (2, 3))
    assert set(joins) == {options.get("group_size", 4)}


@needs_torch_to_tell
def test_large_shards_are_apart_and_may_meet_small_ones(joins):
    size = joining.SMALL // 2
    step(net_of(nn.BatchNorm1d(2)), (1, 2, size), (1, 2, size))
    assert joins == [2]
    step(net_of(nn.BatchNorm1d(2)), (1, 2, size + 1), (1, 2, size + 1))
    step(net_of(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), (1, 2, size), (1, 2, size + 1))
    step(net_of(nn.BatchNorm1d(2)), (1, 2, size + 1), (3, 2, 4), (0, 2, 3))
    assert joins == [2]


class InReplica(nn.Module):
    """Does something to the layer, or around it, in one replica or all."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.bn = case, SynchronizedBatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        bn, rank = self.bn, self.bn.group.rank
        if self.case == "hooks on saved tensors":
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return bn(x)
        if self.case == "no grad" and rank == 0:
            with torch.no_grad():
                return bn(x)
        if self.case == "another weight" and rank:
            bn.weight = bn.weight * (1 + rank)
        if self.case == "a strided weight" and rank:
            bn.weight = torch.stack((bn.weight, torch.full((3,), 7.0)), 1)[:, 0]
        if self.case == "no bias" and rank:
            bn.bias = None
        if self.case == "a hook":
            bn.weight.register_hook(lambda grad: grad * (1 + rank))
        if self.case == "another eps" and rank:
            bn.eps = 0.5
        y = bn(x)
        if self.case == "an inner gradient":
            return y * torch.autograd.grad(y.pow(3).sum(), bn.weight, create_graph=True)[0]
        return y.add_(1).relu_() if self.case == "in place" else y


@needs_torch_to_tell
@pytest.mark.parametrize(
    ("case", "is_joined"),
    [
        ("hooks on saved tensors", False),
        ("no grad", False),
        ("another weight", True),
        ("a strided weight", True),
        ("no bias", False),
        ("a hook", True),
        ("another eps", False),
        ("an inner gradient", True),
        ("in place", True),
    ],
)
def test_what_a_replica_does_to_itself(joins, case, is_joined):
    net = InReplica(case).double()
    shards = [torch.randn(4, 3).double().requires_grad_() for _ in range(N)]
    twin = copy.deepcopy(net)

    def outputs_and_grads(net: nn.Module) -> list[Tensor]:
        outputs = DataParallel(net, ["cpu"] * N, gather_to_one_device=False)(Scattered(shards))
        used = [y for y in outputs if y.requires_grad]
        torch.autograd.backward(used, [torch.ones(4, 3).double().cumsum(0)] * len(used))
        return [*outputs, *(p.grad for p in net.parameters()), *net.buffers()]

    seen = outputs_and_grads(net)
    assert bool(joins) == is_joined
    expected = apart(lambda: outputs_and_grads(twin))
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


class Used(nn.Module):
    """Normalizes what a function makes of its input and the layer."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.bn = function, SynchronizedBatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.function(self.bn, x))


def hooked(bn: nn.Module, x: Tensor) -> Tensor:
    h = x * 1
    h.register_hook(lambda grad: 2 * grad)
    return h


def weighted(bn: nn.Module, x: Tensor) -> Tensor:
    h = x * 1
    bn.weight = 1 + h.square().mean(0)
    return h


def tied(bn: nn.Module, x: Tensor) -> Tensor:
    bn.bias = bn.weight * 2
    return x * 1


@needs_torch_to_tell
@pytest.mark.parametrize("function", [hooked, weighted, tied])
@pytest.mark.parametrize("way", ["plain", "create_graph", "is_grads_batched"])
def test_derivatives_stop_at_what_has_come_in(joins, function, way):
    net = Used(function)
    x, dy = torch.randn(2, 8, 3).double()
    x.requires_grad_()
    model, inputs = DataParallel(net, ["cpu"] * N), [x, net.bn.weight]

    def grads() -> Any:
        y = model(x)
        if way == "is_grads_batched":
            upstream = torch.stack((dy, 2 * dy))
            return torch.autograd.grad(
                y, inputs, upstream, is_grads_batched=True, allow_unused=True
            )
        creates_graph = way == "create_graph"
        return torch.autograd.grad(y, inputs, dy, create_graph=creates_graph, allow_unused=True)

    seen = grads()
    assert joins == [N]
    torch.testing.assert_close(seen, apart(grads))


def test_of_inputs_without_gradient_each_replica_has_a_graph_of_its_own(joins):
    net = SynchronizedBatchNorm1d(3).double()
    model = DataParallel(net, ["cpu"] * N, gather_to_one_device=False)
    for y in model(torch.randn(8, 3).double()):
        y.square().sum().backward()
    assert joins == []


def test_an_input_made_in_inference_mode_is_the_error_of_its_replica():
    """Which cannot save it for backward: the first replica is not to blame."""
    with torch.inference_mode():
        constant = torch.randn(2, 3)
    shards = [torch.randn(3, 3, requires_grad=True), constant]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved") as caught:
        run_sharded(SynchronizedBatchNorm1d(3), shards)
    assert caught.value.__notes__[0].startswith("in replica 1 of 2")


@needs_torch_to_tell
def test_each_output_is_its_own_and_keeps_the_memory_format_of_its_input(joins):
    net = net_of(nn.BatchNorm2d(3))
    formats = [torch.channels_last, torch.contiguous_format, torch.channels_last]
    shards = [torch.randn(2, 3, 4, 5).contiguous(memory_format=f) for f in formats]
    shards[0].requires_grad_()
    outputs = DataParallel(net, ["cpu"] * N, gather_to_one_device=False)(Scattered(shards))
    assert joins == [N]
    for y, own in zip(outputs, formats, strict=True):
        assert y.is_contiguous(memory_format=own)
        assert y.untyped_storage().nbytes() == y.numel() * y.element_size()


def test_parameters_and_buffers_of_another_size_are_refused():
    for key in ("weight", "bias", "running_mean", "running_var"):
        net = net_of(nn.BatchNorm2d(64))
        tensor = torch.ones(4)
        setattr(net[0], key, nn.Parameter(tensor) if key in ("weight", "bias") else tensor)
        with pytest.raises(RuntimeError, match=f"{key} should contain 64 elements not 4"):
            DataParallel(net, ["cpu"] * 2)(torch.randn(4, 64, 3, 3))
