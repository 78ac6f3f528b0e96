"""The joined autograd graph: derivatives, what it saves, and what it leaves behind."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks import fused
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, kernels, set_sbn_eps_mode
from tests import oracle
from tests.deadlines import ends, soon
from tests.layers import freed
from tests.sharded import Sharded, one_node_only, randomized, run_sharded

SIZES = [[5], [2, 3], [1, 1], [3, 1, 2], [2, 0, 3]]

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.fixture
def clamp_mode():
    set_sbn_eps_mode("clamp")
    yield
    set_sbn_eps_mode("plus")


def as_function(sizes: list[int], channels: int = 2, **options):
    """The layer over replicas, as a function of input, weight and bias."""
    net = Sharded(SynchronizedBatchNorm1d(channels, **options).double(), sizes)

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        names = ("net.weight", "net.bias")[: len(parameters)]
        return torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), (x,))

    return call


def leaves(samples: int, channels: int = 2, extent: int = 2) -> tuple[Tensor, ...]:
    x = torch.randn(samples, channels, extent, dtype=torch.float64, requires_grad=True)
    w = torch.randn(channels, dtype=torch.float64, requires_grad=True)
    b = torch.randn(channels, dtype=torch.float64, requires_grad=True)
    return x, w, b


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradcheck(sizes):
    assert gradcheck(as_function(sizes), leaves(sum(sizes)))


@pytest.mark.filterwarnings("ignore:Backwards compatibility:UserWarning")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradgradcheck(sizes):
    assert gradgradcheck(as_function(sizes), leaves(sum(sizes)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Backwards compatibility:UserWarning")
def test_gradgradcheck_without_affine_parameters():
    assert gradgradcheck(as_function([2, 3], affine=False), leaves(5)[:1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Backwards compatibility:UserWarning")
@pytest.mark.parametrize("eps", [1e-5, 10.0], ids=["free", "clamped"])
def test_gradcheck_in_clamp_mode(clamp_mode, eps):
    function, inputs = as_function([2, 3], eps=eps), leaves(5)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2]], ids=str)
def test_gradients_are_exact_when_only_some_outputs_enter_the_loss(used):
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=torch.float64))
    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 4, 3)]
    upstream = [torch.randn_like(s) * (i in used) for i, s in enumerate(shards)]
    outputs = run_sharded(layer, shards)
    torch.autograd.backward([outputs[i] for i in used], [upstream[i] for i in used])
    expected = oracle.batch_norm(shards, upstream, layer.weight, layer.bias)
    for shard, grad in zip(shards, expected.input_grads, strict=True):
        torch.testing.assert_close(shard.grad, grad)
    torch.testing.assert_close(layer.weight.grad, expected.weight_grad)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "weight and bias", "x and weight"])
def test_frozen_tensors_get_no_gradient_and_the_others_theirs(frozen):
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=torch.float64))
    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 4)]
    tensors = {"x": shards, "weight": [layer.weight], "bias": [layer.bias]}
    for name in frozen.split(" and "):
        for tensor in tensors.pop(name):
            tensor.requires_grad_(False)
    upstream = [torch.randn_like(s) for s in shards]
    torch.autograd.backward(run_sharded(layer, shards), upstream)
    expected = oracle.batch_norm(shards, upstream, layer.weight, layer.bias)
    grads = {"x": expected.input_grads, "weight": [expected.weight_grad]}
    grads["bias"] = [expected.bias_grad]
    for name, grad in grads.items():
        for tensor, g in zip(tensors.get(name, []), grad, strict=False):
            torch.testing.assert_close(tensor.grad, g)
    for tensor in [*shards, layer.weight, layer.bias]:
        assert (tensor.grad is not None) == tensor.requires_grad


def test_one_frozen_shard_leaves_the_gradients_of_the_others_exact():
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=torch.float64))
    shards = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 4, 3)]
    shards[1].requires_grad_()
    upstream = [torch.randn_like(s) for s in shards]
    torch.autograd.backward(run_sharded(layer, shards), upstream)
    expected = oracle.batch_norm(shards, upstream, layer.weight, layer.bias)
    torch.testing.assert_close(shards[1].grad, expected.input_grads[1])
    torch.testing.assert_close(layer.weight.grad, expected.weight_grad)


def test_a_backward_to_parameters_alone_keeps_no_input():
    """As long as the output lives, where hooks make the saved tensors anew (checkpoints)."""
    seen = []

    def fresh(tensor: Tensor) -> Tensor:
        copied = tensor.clone()
        seen.append(StorageWeakRef(copied.untyped_storage()))
        return copied  # of which torch makes another object, with the same storage

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SynchronizedBatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), fresh):
                return self.layer(x)

    net = Hooked()
    outputs = run_sharded(net, [torch.randn(n, 3, requires_grad=True) for n in (4, 2)])
    torch.autograd.grad(sum(y.square().sum() for y in outputs), net.layer.weight)
    assert len(seen) == 2
    assert soon(lambda: all(storage.expired() for storage in seen))


def test_a_graph_walked_with_create_graph_takes_a_plain_backward_afterwards():
    function = as_function([2, 3])
    x, w, b = leaves(5)
    y = function(x, w, b)
    dy = torch.randn_like(y)
    (exact,) = torch.autograd.grad(y, x, dy, create_graph=True)
    penalty = exact.square().sum()
    plain = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    torch.testing.assert_close(plain[0], exact)
    penalty.backward()
    reference = x.grad.clone()

    x.grad = None
    bn = nn.BatchNorm1d(2).double()
    z = torch.func.functional_call(bn, {"weight": w, "bias": b}, (x,))
    (exact,) = torch.autograd.grad(z, x, dy, create_graph=True)
    exact.square().sum().backward()
    torch.testing.assert_close(reference, x.grad)


def test_the_fast_and_the_exact_edges_agree():
    function = as_function([2, 3])
    inputs = leaves(5)
    dy = torch.randn(5, 2, 2, dtype=torch.float64)
    fast = torch.autograd.grad(function(*inputs), inputs, dy)
    exact = torch.autograd.grad(function(*inputs), inputs, dy, create_graph=True)
    torch.testing.assert_close(fast, exact)


@one_node_only
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_both_kinds_of_edges_are_exact_at_large_means(mean):
    """Where the rounding of the mean would show: in what is proportional to ``x - mean``."""
    layer = SynchronizedBatchNorm1d(3)
    shards = [(torch.randn(n, 3, 7) + mean).requires_grad_() for n in (5, 4)]
    # Along x itself, so that the sum of dy * x_hat is as large as it can be.
    upstream = [shard.detach() - mean + torch.randn_like(shard) for shard in shards]
    expected = oracle.batch_norm(shards, upstream)
    for create_graph in (False, True):
        outputs = run_sharded(layer, shards)
        grads = torch.autograd.grad(outputs, shards, upstream, create_graph=create_graph)
        for grad, exact in zip(grads, expected.input_grads, strict=True):
            torch.testing.assert_close(grad.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_second_derivatives_of_small_shards_in_float32(frozen):
    layer = randomized(SynchronizedBatchNorm1d(3))
    plain = nn.BatchNorm1d(3)
    plain.load_state_dict(layer.state_dict())
    plain.double()
    sizes = [2, 4]
    shards = [torch.randn(n, 3).requires_grad_(i != frozen) for i, n in enumerate(sizes)]
    upstream, direction = torch.randn(2, 6, 3)

    def second(layer: nn.Module, shards: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        x = [shard for shard in shards if shard.requires_grad]
        dy = upstream.to(x[0]).split(sizes)
        first = torch.autograd.grad(outputs, x, dy, create_graph=True)
        along = [direction[: len(grad)].to(grad) for grad in first]
        return list(torch.autograd.grad(first, [*x, layer.weight], along))

    exact = [shard.detach().double().requires_grad_(shard.requires_grad) for shard in shards]
    expected = second(plain, exact, list(plain(torch.cat(exact)).split(sizes)))
    for ours, theirs in zip(
        second(layer, shards, run_sharded(layer, shards)), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-4)


def test_two_backwards_through_a_retained_graph_give_the_same_numbers():
    function = as_function([2, 3])
    inputs = leaves(5)
    y = function(*inputs)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    (only_weight,) = torch.autograd.grad(y, inputs[1], dy, retain_graph=True)
    second = torch.autograd.grad(y, inputs, dy)
    assert all(map(torch.equal, first, second))
    assert torch.equal(only_weight, first[1])


def test_a_second_backward_without_retain_graph_is_torchs_error():
    function = as_function([2, 3])
    inputs = leaves(5)
    y = function(*inputs)
    y.backward(torch.randn_like(y))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(torch.randn_like(y))


def test_backward_runs_in_one_thread_and_waits_for_nobody():
    function = as_function([2, 3, 1])
    y = function(*leaves(6))
    before = set(threading.enumerate())
    # In the calling thread, as the engine does on the CPU: a wait for a peer could never end.
    worker = threading.Thread(target=y.backward, args=(torch.randn_like(y),), daemon=True)
    worker.start()
    assert ends(worker), "backward waits"
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("replicas", [2, 3])
def test_no_more_is_saved_for_backward_than_the_input(replicas, requires_grad):
    layer = SynchronizedBatchNorm2d(4)
    shards = [torch.randn(8, 4, 16, 16, requires_grad=requires_grad) for _ in range(replicas)]
    saved = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            # Every pack counts, also of a tensor that has been saved before.
            def pack(tensor: Tensor) -> Tensor:
                saved.append(tensor.numel() * tensor.element_size())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return self.layer(x)

    outputs = run_sharded(Counting(), shards)
    inputs = sum(shard.numel() * shard.element_size() for shard in shards)
    assert inputs <= sum(saved) <= 1.1 * inputs
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])


def test_an_output_may_be_changed_in_place():
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=torch.float64))
    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 4)]
    outputs = [y.relu_() for y in run_sharded(layer, shards)]
    upstream = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, upstream)
    passed = [u * (y > 0) for u, y in zip(upstream, outputs, strict=True)]
    expected = oracle.batch_norm(shards, passed, layer.weight, layer.bias)
    for shard, grad in zip(shards, expected.input_grads, strict=True):
        torch.testing.assert_close(shard.grad, grad)


@one_node_only
def test_an_input_changed_in_place_before_backward_is_torchs_error():
    shards = [torch.randn(n, 3, requires_grad=True) * 1 for n in (2, 4)]
    outputs = run_sharded(SynchronizedBatchNorm1d(3), shards)
    shards[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])


def test_nothing_is_kept_alive_by_a_cycle():
    gc.collect()
    gc.disable()
    try:
        shards = [torch.randn(n, 3, requires_grad=True) * 1 for n in (2, 4)]
        watched = [weakref.ref(shard) for shard in shards]
        outputs = run_sharded(SynchronizedBatchNorm1d(3), shards)
        grads = torch.autograd.grad(
            sum(y.square().sum() for y in outputs), shards, create_graph=True
        )
        del shards, outputs, grads
        assert freed(*watched)
    finally:
        gc.enable()


class OwnSettings(nn.Module):
    """Gives its layer, in each replica, an ``eps`` of its own and a weight from elsewhere."""

    def __init__(self, eps: list[float], weight: Tensor) -> None:
        super().__init__()
        self.layer = SynchronizedBatchNorm1d(3, dtype=torch.float64)
        self.eps = eps
        self.weights = [weight]

    def __data_parallel_replicate__(self, ctx: object, copy_id: int) -> None:
        self.layer.eps = self.eps[copy_id]
        self.layer.weight = self.weights[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def expected_of_own_settings(net: OwnSettings, shards: list[Tensor]) -> list[Tensor]:
    x = torch.cat(shards)
    mean, var = x.mean(0), x.var(0, correction=0)
    return [
        (shard - mean) * net.weights[0] / (var + eps).sqrt()
        for shard, eps in zip(shards, net.eps, strict=True)
    ]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("used", [[0], [1, 2], [0, 1, 2]], ids=str)
def test_replicas_may_differ_in_eps(used, create_graph):
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    net = OwnSettings([0.5, 2.0, 0.5], weight)
    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2, 3)]
    upstream = [torch.randn_like(shards[i]) for i in used]

    def grads(outputs: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [*shards, weight]
        outputs = [outputs[i] for i in used]
        return torch.autograd.grad(outputs, leaves, upstream, create_graph=create_graph)

    expected = grads(expected_of_own_settings(net, shards))
    for ours, exact in zip(grads(run_sharded(net, shards)), expected, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("used", [[0], [1], [0, 1]], ids=str)
def test_a_weight_may_change_as_soon_as_its_gradient_is_complete(used):
    """As where an optimizer steps inside the backward."""
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    net = OwnSettings([1e-5, 1e-5], weight)
    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2)]
    upstream = [torch.randn_like(shards[i]) for i in used]
    outputs = expected_of_own_settings(net, shards)
    expected = torch.autograd.grad([outputs[i] for i in used], shards, upstream)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.fill_(7)

    weight.register_post_accumulate_grad_hook(step)
    outputs = run_sharded(net, shards)
    torch.autograd.backward([outputs[i] for i in used], upstream)
    for shard, exact in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.grad, exact)


def test_a_master_without_grad_does_not_cut_the_graph_of_the_others():
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=torch.float64))

    class WithoutGradIn0(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(threading.current_thread().name != "replica-0"):
                return self.layer(x)

    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 4)]
    outputs = run_sharded(WithoutGradIn0(), shards)
    upstream = [torch.zeros_like(outputs[0]), torch.randn_like(outputs[1])]
    outputs[1].backward(upstream[1])
    expected = oracle.batch_norm(shards, upstream, layer.weight, layer.bias)
    assert shards[0].grad is None
    torch.testing.assert_close(shards[1].grad, expected.input_grads[1])


class Changed(nn.Module):
    """Changes the layer, or what is around it, in each replica but the first."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.norm = case, randomized(SynchronizedBatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        norm, rank = self.norm, self.norm.group.rank
        if rank:
            self.change(norm, rank)
        if self.case == "hooks on saved tensors" and rank:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return norm(x)
        return norm(x).mul_(2) if self.case == "output in place" else norm(x)

    def change(self, norm: Any, rank: int) -> None:
        if self.case == "weight":
            norm.weight = norm.weight * (1 + rank)
        if self.case == "strided weight":
            norm.weight = torch.stack((norm.weight, torch.full_like(norm.weight, 7.0)), 1)[:, 0]
        if self.case == "no bias":
            norm.bias = None
        if self.case == "no weight":
            norm.weight = None
        if self.case == "eps":
            norm.eps = 0.5 * rank

    def expected(self, shards: list[Tensor]) -> list[Tensor]:
        """The outputs, computed as on one device."""
        norm, outputs = self.norm, []
        var, mean = torch.var_mean(torch.cat(shards), 0, correction=0)
        for rank, x in enumerate(shards):
            eps = 0.5 * rank if rank and self.case == "eps" else norm.eps
            weight: Any = norm.weight * (1 + rank if self.case == "weight" else 1)
            weight = 1 if rank and self.case == "no weight" else weight
            bias = 0 if rank and self.case == "no bias" else norm.bias
            y = (x - mean) / (var + eps).sqrt() * weight + bias
            outputs.append(y * 2 if self.case == "output in place" else y)
        return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        "nothing",
        "weight",
        "strided weight",
        "no weight",
        "no bias",
        "eps",
        "hooks on saved tensors",
        "output in place",
    ],
)
def test_replicas_may_change_their_own_layer(case, create_graph, dtype):
    net = Changed(case).to(dtype)
    shards = [torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (4, 3, 5)]
    upstream = [torch.randn_like(shard) for shard in shards]
    inputs = [*shards, net.norm.weight, net.norm.bias]
    outputs = run_sharded(net, shards)
    grads = torch.autograd.grad(outputs, inputs, upstream, create_graph=create_graph)
    expected = net.expected(shards)
    exact = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close([*outputs, *grads], [*expected, *exact], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_batched_gradients_equal_one_after_the_other(dtype):
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=dtype))
    shards = [torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (4, 3)]
    y = torch.cat(run_sharded(layer, shards))
    inputs, upstream = [*shards, layer.weight, layer.bias], torch.randn(5, 7, 3, dtype=dtype)
    batched = torch.autograd.grad(y, inputs, upstream, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, inputs, dy, retain_graph=True) for dy in upstream]
    expected = [torch.stack(grads) for grads in zip(*single, strict=True)]
    torch.testing.assert_close(list(batched), expected)


@pytest.mark.parametrize("size", [3, 300], ids=["small", "large"])
def test_the_input_is_freed_in_backward_while_the_output_lives(size):
    shards = [torch.randn(n, 3, size, size, requires_grad=True) * 1 for n in (2, 1)]
    storages = [StorageWeakRef(shard.untyped_storage()) for shard in shards]
    outputs = run_sharded(SynchronizedBatchNorm2d(3), shards)
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    del shards
    assert soon(lambda: all(storage.expired() for storage in storages))


def test_a_batch_of_one_value_is_not_counted():
    layer = SynchronizedBatchNorm1d(3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        run_sharded(layer, [torch.randn(1, 3), torch.randn(0, 3)])
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inference_mode_in_one_replica_leaves_the_others_a_graph(dtype):
    class InferenceIn0(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = randomized(SynchronizedBatchNorm1d(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode(self.layer.group.rank == 0):
                return self.layer(x * 1).clone()

    net = InferenceIn0()
    shards = [torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (4, 3)]
    outputs = run_sharded(net, shards)
    upstream = torch.randn_like(outputs[1])
    outputs[1].backward(upstream)
    silent = [torch.zeros_like(shards[0]), upstream]
    expected = oracle.batch_norm(shards, silent, net.layer.weight, net.layer.bias)
    torch.testing.assert_close(shards[1].grad.double(), expected.input_grads[1])
    assert shards[0].grad is None


class OwnWeights(nn.Module):
    """Gives its layer, in each replica, a weight of its own."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.layer = SynchronizedBatchNorm1d(weights.size(1), bias=False, dtype=weights.dtype)
        self.weights = weights.unbind()

    def __data_parallel_replicate__(self, ctx: object, copy_id: int) -> None:
        self.layer.weight = self.weights[copy_id]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.fixture(params=["Native", "Plain", "Fused"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU use a strategy, with stand-ins for the kernels of CUDA."""
    if request.param == "Fused":
        for name, stand_in in fused.KERNELS.items():
            monkeypatch.setattr(torch, name, stand_in)
    made = {"Native": kernels.Native(), "Plain": kernels.PLAIN, "Fused": kernels.FUSED}
    monkeypatch.setitem(kernels.KERNELS, "cpu", made[request.param])


@one_node_only
@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_replica_may_have_a_weight_of_zero_where_another_has_not(dtype):
    weights = torch.tensor([[0.0, -2.0, 0.5], [3.0, 0.0, 1e-3]], dtype=dtype)
    shards = [torch.randn(n, 3, dtype=dtype).requires_grad_() for n in (4, 3)]
    upstream = [torch.randn_like(shard) for shard in shards]
    grads = torch.autograd.grad(run_sharded(OwnWeights(weights), shards), shards, upstream)

    exact = [shard.detach().double().requires_grad_() for shard in shards]
    whole = torch.cat(exact)
    deviation = (whole.var(0, correction=0) + 1e-5).sqrt()
    outputs = [(x - whole.mean(0)) / deviation * w for x, w in zip(exact, weights, strict=True)]
    expected = torch.autograd.grad(outputs, exact, [dy.double() for dy in upstream])
    for ours, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, wanted.to(dtype))


@one_node_only
@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_an_infinite_gradient_of_another_replica_is_seen(weight):
    """Where weights are frozen and not known to be copies, as on several devices."""
    weights = torch.tensor([[1.0, 1.0], [weight, 1.0]])
    shards = [torch.randn(3, 2).requires_grad_() for _ in range(2)]
    upstream = [torch.randn(3, 2) for _ in range(2)]
    upstream[0][1, 0] = torch.inf
    grads = torch.autograd.grad(run_sharded(OwnWeights(weights), shards), shards, upstream)
    for grad in grads:
        assert not grad[:, 0].isfinite().any()
        assert grad[:, 1].isfinite().all()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_half_precision_are_rounded_once(dtype, create_graph):
    """The sums of the replicas cancel, so that the error of a sum rounded per replica shows."""
    layer = SynchronizedBatchNorm1d(3).to(dtype)
    shards = [torch.randn(16, 3).to(dtype).requires_grad_() for _ in range(8)]
    upstream = [torch.randn(16, 3).to(dtype) + 4 * (-1) ** i for i in range(8)]
    leaves = [*shards, layer.weight, layer.bias]
    outputs = run_sharded(layer, shards)
    grads = torch.autograd.grad(outputs, leaves, upstream, create_graph=create_graph)
    expected = oracle.batch_norm(
        [x.detach().double() for x in shards], [dy.double() for dy in upstream]
    )
    exact = [*expected.input_grads, expected.weight_grad, expected.bias_grad]
    for ours, wanted in zip(grads, exact, strict=True):
        step = torch.finfo(dtype).eps * wanted.abs()  # of which rounding takes half
        assert ((ours.double() - wanted).abs() <= 0.6 * step + 2e-5).all()


@one_node_only
def test_many_rows_with_a_gradient_along_the_output_are_as_exact_as_in_torchs_layer():
    x = torch.randn(400_000, 2)
    plain = nn.BatchNorm1d(2)
    along = plain(x).detach()

    def error(run: Any) -> float:
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(run(leaf), leaf, along)
        return (dx.double() - exact).abs().max().item()

    leaf = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(nn.BatchNorm1d(2).double()(leaf), leaf, along.double())
    ours = Sharded(SynchronizedBatchNorm1d(2), [200_000, 200_000])
    assert error(ours) <= 2 * error(plain) + torch.finfo(torch.float32).eps


@one_node_only
def test_weights_of_one_storage_with_other_strides_are_no_copies():
    storage = torch.randn(6, dtype=torch.float64)
    weights = torch.stack((storage[:3], storage[::2]))
    net = OwnWeights(weights)
    net.weights = (storage[:3], storage[::2])
    shards = [torch.randn(4, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    upstream = [torch.randn_like(shard) for shard in shards]
    own = OwnWeights(weights.clone())
    torch.testing.assert_close(
        torch.autograd.grad(run_sharded(net, shards), shards, upstream),
        torch.autograd.grad(run_sharded(own, shards), shards, upstream),
    )


@one_node_only
def test_a_channel_of_nan_leaves_the_digits_of_a_channel_with_a_large_mean():
    x, dy = torch.randn(2, 6, 3)
    x[:, 1] += 1e5
    x[1, 0] = torch.nan
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    ours, plain = SynchronizedBatchNorm1d(3), nn.BatchNorm1d(3).double()
    y, wanted = Sharded(ours, [2, 4])(leaf), plain(exact)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (wanted,) = torch.autograd.grad(wanted, exact, dy.double())
    torch.testing.assert_close(dx.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
