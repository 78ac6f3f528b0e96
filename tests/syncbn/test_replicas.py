"""Replicas: the numbers of a step, who computes what, and the joint autograd node."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef

from replication import DataParallel, ReplicasDiverged
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, replicas
from syncbn.kernels import ON_CPU
from syncbn.replicas import LARGEST_JOINED, _gradients
from syncbn.statistics import KernelMoments
from tests.kit import oracle
from tests.kit import stand_in_kernels as stand_ins
from tests.kit.deadlines import DEADLINE, soon
from tests.kit.layers import KNOWS_HOOKS, Recomputed, Stop, knows_hooks
from tests.kit.memory import freed, no_garbage_collection
from tests.kit.properties import pairwise
from tests.kit.shards import LAYOUTS, Sharded, eps_mode, randomized, run_sharded

#: For tests in which the CPU computes small shards on both of its fast paths.
joined_or_not = pytest.mark.usefixtures("joined_or_not")


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of shards of each call that is joined."""
    found: list[int] = []
    join = replicas.joined

    def counted(*args: Any) -> Any:
        outputs = join(*args)
        if outputs is not None:
            found.append(len(outputs))
        return outputs

    monkeypatch.setattr(replicas, "joined", counted)
    return found


# -- a step ------------------------------------------------------------------------------------

PATHS = ["joined", "on the CPU", "as on accelerators"]


def take(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU compute small shards on one of its fast paths, or as accelerators do."""
    if path != "joined":
        monkeypatch.setattr(replicas, "LARGEST_JOINED", -1)
    if path == "as on accelerators":
        found = stand_ins.AS_ON_ACCELERATORS
        monkeypatch.setattr("syncbn.batchnorm.kernels_for", lambda kind: found)


@pairwise(
    path=PATHS,
    options=[
        {},
        {"affine": False},
        {"bias": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"momentum": 1},
        {"eps": 0.5},
    ],
    sizes=[[4, 4], [3, 1, 2], [1, 1], [2, 0, 3], [0, 2, 2], [0, 0, 4], [1, 2, 3, 4, 5]],
    dtype=[torch.float32, torch.float64],
    layout=["contiguous", "channels_last"],
)
def test_a_step_has_the_numbers_of_torchs_layer(
    path, options, sizes, dtype, layout, joins, monkeypatch
):
    """Bit by bit where torch's layer computes them itself."""
    take(path, monkeypatch)
    ours = randomized(SynchronizedBatchNorm2d(3, dtype=dtype, **options))
    plain = nn.BatchNorm2d(3, dtype=dtype, **{k: v for k, v in options.items() if k != "bias"})
    if "bias" in options:
        plain.bias = None
    plain.load_state_dict(ours.state_dict())
    x = LAYOUTS[layout](torch.randn(sum(sizes), 3, 4, 5, dtype=dtype))
    dy, found = torch.randn_like(x), []
    for net in (plain, Sharded(ours, sizes)):
        leaf = x.clone().requires_grad_()
        y = net(leaf)
        grads = torch.autograd.grad(y, [leaf, *net.parameters()], dy)
        found.append([y.detach(), *grads, *net.buffers()])
    is_joined = path == "joined" and 0 not in sizes and KNOWS_HOOKS
    assert joins == [len(sizes)] * is_joined
    rounding = 0 if is_joined else 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(*found, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("path", PATHS[1:])
def test_on_the_cpu_all_replicas_compute_at_once_and_elsewhere_one_launches_all(path, monkeypatch):
    take(path, monkeypatch)
    found = ON_CPU if path == "on the CPU" else stand_ins.AS_ON_ACCELERATORS
    threads: dict[str, list[str]] = {"stats": [], "elemt": []}
    together = threading.Barrier(3 if path == "on the CPU" else 1, timeout=DEADLINE)

    def noting(name: str, kernel: Any) -> Any:
        def call(*args: Any, **out: Any) -> Any:
            threads[name].append(threading.current_thread().name)
            together.wait()
            return kernel(*args, **out)

        return call

    noted = replace(found, **{name: noting(name, getattr(found, name)) for name in threads})
    monkeypatch.setattr("syncbn.batchnorm.kernels_for", lambda kind: noted)
    DataParallel(SynchronizedBatchNorm2d(3), ["cpu"] * 3)(torch.randn(7, 3, 2, 2))
    for names in threads.values():
        assert len(names) == 3
        assert len(set(names)) == (3 if path == "on the CPU" else 1)


class Odd(nn.Module):
    """Calls another layer in replica 1."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.options = SynchronizedBatchNorm1d(3), options

    def forward(self, x: Tensor) -> Tensor:
        for name, value in self.options.items() if self.norm.group.rank == 1 else ():
            setattr(self.norm, name, value)
        return self.norm(x)


@joined_or_not
@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"eps": 0.5}, "eps=0.5, weight=True, bias=True"),
        ({"bias": None}, "eps=1e-05, weight=True, bias=False"),
        ({"weight": None, "bias": None}, "eps=1e-05, weight=False, bias=False"),
    ],
)
def test_replicas_with_another_eps_or_without_parameters_are_named(options, call):
    text = rf"replicas 0, 2: .*; replica 1: batch_norm\({call}, on the CPU\) of float32 \[3\]"
    with pytest.raises(ReplicasDiverged, match=text):
        run_sharded(Odd(**options), [torch.randn(2, 3) for _ in range(3)])


@joined_or_not
def test_a_batch_of_one_value_is_refused_and_not_counted():
    layer = SynchronizedBatchNorm1d(3)
    with pytest.raises(ValueError, match=r"more than 1 value .* torch.Size\(\[1, 3\]\)"):
        run_sharded(layer, [torch.randn(0, 3), torch.randn(1, 3)])
    assert layer.num_batches_tracked == 0


# -- small shards on the CPU -------------------------------------------------------------------


@knows_hooks
@pytest.mark.parametrize("sizes", [(2, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, repeat=2)], ids="-".join)
def test_outputs_have_the_layouts_that_plain_batch_norm_gives_them(layouts, sizes, joins):
    shards = [
        LAYOUTS[layout](torch.randn(n, 4, 3, 5)) for n, layout in zip(sizes, layouts, strict=True)
    ]
    outputs = run_sharded(SynchronizedBatchNorm2d(4), shards)
    assert [y.stride() for y in outputs] == [nn.BatchNorm2d(4)(x).stride() for x in shards]
    if layouts in (("contiguous",) * 2, ("channels_last",) * 2):
        assert joins == [2]


@knows_hooks
def test_single_values_are_joined_and_empty_shards_are_not(joins):
    layer = SynchronizedBatchNorm1d(2)
    for sizes in ([1, 1], [3, 1], [3, 0], [1, 1, 0]):
        x = torch.randn(sum(sizes), 2)
        y = torch.cat(run_sharded(layer, x.split(sizes)))
        torch.testing.assert_close(y, nn.functional.batch_norm(x, None, None, training=True))
    assert joins == [2, 2]


@knows_hooks
def test_large_shards_half_precision_and_steps_without_a_graph_are_not_joined(joins):
    layer = SynchronizedBatchNorm1d(2)
    for x in (torch.randn(LARGEST_JOINED, 2), torch.randn(4, 2).bfloat16()):
        DataParallel(layer, ["cpu"] * 2)(x.repeat(2, 1))
    with torch.no_grad():
        DataParallel(layer, ["cpu"] * 2)(torch.randn(4, 2))
    assert joins == []
    DataParallel(layer, ["cpu"] * 2)(torch.randn(LARGEST_JOINED, 2))  # of 2 shards, just small
    assert joins == [2]


# -- derivatives -------------------------------------------------------------------------------


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


@joined_or_not
@pytest.mark.filterwarnings("ignore:Backwards compatibility:UserWarning")
@pytest.mark.parametrize(
    ("sizes", "mode", "options"),
    [
        *(([*sizes], "plus", {}) for sizes in ((5,), (2, 3), (1, 1), (3, 1, 2), (2, 0, 3))),
        pytest.param([2, 3], "plus", {"affine": False}, marks=pytest.mark.slow),
        pytest.param([2, 3], "clamp", {}, marks=pytest.mark.slow),
        pytest.param([2, 3], "clamp", {"eps": 10.0}, marks=pytest.mark.slow),
    ],
)
def test_first_and_second_derivatives(sizes, mode, options):
    """Clause 1c: all gradients, and second derivatives."""
    inputs = leaves(sum(sizes))[: 1 if "affine" in options else 3]
    with eps_mode(mode):
        assert gradcheck(as_function(sizes, **options), inputs)
        assert gradgradcheck(as_function(sizes, **options), inputs)


@pytest.mark.cpu("compares with finite differences, in many forwards")
@pytest.mark.usefixtures("not_joined", "path")
@pytest.mark.filterwarnings("ignore:Backwards compatibility:UserWarning")
def test_third_derivatives():
    """torch's own layer, and so joined shards, have wrong ones (pytorch#186256)."""
    function = as_function([2, 3])

    def second(*inputs: Tensor) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad(function(*inputs).exp().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), inputs[:2], create_graph=True)

    assert gradcheck(second, leaves(5), rtol=1e-4)


def on_one_device(norm: Any, shards: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of shards ``(N, C)``, in plain operations."""
    var, mean = torch.var_mean(torch.cat([*shards]), 0, correction=0)
    scale = norm.weight / (var + norm.eps).sqrt()
    return [(x - mean) * scale + norm.bias for x in shards]


@joined_or_not
@pairwise(
    frozen=["", "x", "0", "1", "weight", "bias", "weight bias", "x weight"],
    used=[[0], [1], [2], [0, 2]],
    second=[False, True],
    dtype=[torch.float32, torch.float64],
)
def test_gradients_where_some_tensors_are_frozen_and_some_outputs_are_unused(
    frozen, used, second, dtype
):
    """Perhaps only the output of an empty shard is used."""
    layer = randomized(SynchronizedBatchNorm1d(3, dtype=dtype))
    shards = [torch.randn(n, 3, dtype=dtype) for n in (2, 4, 0)]
    names = {"x": shards, "weight": [layer.weight], "bias": [layer.bias]}
    names |= {"0": shards[:1], "1": shards[1:2]}
    for tensor in (*shards, layer.weight, layer.bias):
        tensor.requires_grad_()
    for tensor in itertools.chain(*map(names.__getitem__, frozen.split())):
        tensor.requires_grad_(False)
    inputs = [t for t in (*shards, layer.weight, layer.bias) if t.requires_grad]
    upstream = [torch.randn_like(shards[i]) for i in used]
    options = {"allow_unused": True, "materialize_grads": True}
    found = []
    for ys in (run_sharded(layer, shards), on_one_device(layer, shards)):
        dys = [dy.clone().requires_grad_() for dy in upstream]
        outputs = [ys[i] for i in used]
        grads = torch.autograd.grad(outputs, inputs, dys, create_graph=second, **options)
        if second:
            total = sum((grad.sin() ** 2).sum() for grad in grads)
            grads = torch.autograd.grad(total, [*inputs, *dys], **options)
        found.append(grads)
    rounding = 1e-3 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(*found, rtol=rounding, atol=rounding)


@joined_or_not
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_replica_without_a_graph_leaves_the_others_theirs(dtype, create_graph):
    class WithoutGraphIn0(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = randomized(SynchronizedBatchNorm1d(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.layer.group.rank > 0):
                return self.layer(x)

    net, dy = WithoutGraphIn0(), torch.randn(3, 3, dtype=dtype)
    shards = [torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (4, 3)]
    inputs, options = [*shards, net.layer.weight], {"create_graph": create_graph}
    constant, y = run_sharded(net, shards)
    assert not constant.requires_grad
    none, *grads = torch.autograd.grad(y, inputs, dy, allow_unused=True, **options)
    assert none is None
    expected = torch.autograd.grad(on_one_device(net.layer, shards)[1], inputs[1:], dy)
    torch.testing.assert_close(grads, [*expected], rtol=1e-5, atol=1e-5)


@joined_or_not
def test_a_second_backward_without_retain_graph_is_torchs_error():
    function = as_function([2, 3])
    inputs = leaves(5)
    y = function(*inputs)
    y.backward(torch.randn_like(y))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(torch.randn_like(y))


@joined_or_not
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("case", ["nothing", "hooks on saved tensors"])
def test_where_no_gradient_comes_none_is_passed_on(case, create_graph):
    """The engine runs the node, as it cannot tell that nothing comes."""
    net, shards = Around(case), [torch.randn(n, 3, requires_grad=True) for n in (4, 3)]
    loss = sum(Stop.apply(y).sum() for y in run_sharded(net, shards))
    options = {"create_graph": create_graph, "allow_unused": True}
    assert torch.autograd.grad(loss, [*shards, *net.parameters()], **options) == (None,) * 4


class Around(nn.Module):
    """A layer, and what a network does around it, in each replica but the first."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.norm = case, randomized(SynchronizedBatchNorm1d(3))
        if case == "strided weight":
            strided = torch.stack((self.norm.weight.detach(), torch.full((3,), 7.0)), 1)[:, 0]
            self.norm.weight = nn.Parameter(strided)

    def forward(self, x: Tensor) -> Tensor:
        if self.case == "hooks on saved tensors" and self.norm.group.rank:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return self.norm(x)
        return self.norm(x).mul_(2) if self.case == "output in place" else self.norm(x)


@joined_or_not
@pairwise(
    dtype=[torch.float32, torch.float64],
    create_graph=[False, True],
    used=[[0], [0, 2], [0, 1, 2]],
    case=["nothing", "strided weight", "hooks on saved tensors", "output in place"],
)
def test_gradients_whatever_a_network_does_around_the_layer(case, create_graph, dtype, used):
    net = Around(case).to(dtype)
    shards = [torch.randn(n, 3, dtype=dtype, requires_grad=True) for n in (4, 3, 5)]
    upstream = [torch.randn_like(shards[i]) for i in used]
    inputs = [*shards, net.norm.weight, net.norm.bias]
    factor = 2 if case == "output in place" else 1
    ys, plain = run_sharded(net, shards), on_one_device(net.norm, shards)
    outputs, expected = [ys[i] for i in used], [plain[i] * factor for i in used]
    grads = torch.autograd.grad(outputs, inputs, upstream, create_graph=create_graph)
    exact = torch.autograd.grad(expected, inputs, upstream)
    torch.testing.assert_close([*outputs, *grads], [*expected, *exact], rtol=1e-5, atol=1e-5)


class WithTangent(nn.Module):
    """Gives the input or a parameter of its layer a forward-mode derivative."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.norm = name, SynchronizedBatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        tensor = x if self.name == "x" else getattr(self.norm, self.name)
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        if self.name == "x":
            return self.norm(dual)
        setattr(self.norm, self.name, dual)
        return self.norm(x)


@joined_or_not
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it first loads a jvp
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_forward_mode_derivatives_are_refused(name):
    shards = [torch.randn(n, 3) for n in (4, 3)]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        run_sharded(WithTangent(name), shards)


# -- digits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [(1e8, -1e8, 1), (1e8, -1e8, 1, 2), (1e8, -1e8, 1, 2, 3)])
@pytest.mark.usefixtures("not_joined")
def test_sums_of_shards_are_added_in_the_order_of_the_replicas(sums):
    """In any other order, a sum of float32 loses the last ones."""
    layer = SynchronizedBatchNorm2d(2)
    outputs = run_sharded(layer, [torch.randn(1, 2, 1, 1) for _ in sums])
    upstream = [torch.full_like(y, value) for y, value in zip(outputs, sums, strict=True)]
    torch.autograd.backward(outputs, upstream)
    assert layer.bias.grad.tolist() == [sum(sums[2:])] * 2


@pytest.mark.parametrize("total", [2**31 + 5, 2**33, None], ids=str)
def test_a_count_beyond_int32_does_not_wrap(total):
    x, dy = torch.randn(2, 400, 3)

    class Context:
        """The batch has billions of values, and this shard's sums are as large as theirs."""

        kernels, needs_input_grad = ON_CPU, [False] * 2 + [True] * 3
        counts = None if total else torch.full((8,), 2**30).int()
        batches = (KernelMoments(total, torch.zeros(3), torch.ones(3), 1e-5, counts),)

    dweight, dbias, dx = _gradients(Context(), [dy], [x], [torch.ones(3)])
    torch.testing.assert_close(dx, dy - (dbias + x * dweight) / (total or 2**33))
    torch.testing.assert_close(dbias, dy.sum(0))
    torch.testing.assert_close(dweight, (dy * x).sum(0))


@pytest.mark.usefixtures("not_joined")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_gradients_are_exact_at_large_means(mean, create_graph):
    """Where the rounding of the mean would show: in what is proportional to ``x - mean``."""
    shards = [(torch.randn(n, 3, 7) + mean).requires_grad_() for n in (5, 4)]
    # Along x itself, so that the sum of dy * x_hat is as large as it can be.
    upstream = [shard.detach() - mean + torch.randn_like(shard) for shard in shards]
    expected = oracle.batch_norm(shards, upstream)
    outputs = run_sharded(SynchronizedBatchNorm1d(3), shards)
    grads = torch.autograd.grad(outputs, shards, upstream, create_graph=create_graph)
    for grad, exact in zip(grads, expected.input_grads, strict=True):
        torch.testing.assert_close(grad.double(), exact, rtol=0, atol=2e-6)


@joined_or_not
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
        step = torch.finfo(dtype).eps * wanted.abs()  # rounding takes half of it
        assert ((ours.double() - wanted).abs() <= 0.6 * step + 2e-5).all()


@pytest.mark.usefixtures("not_joined")
def test_many_rows_with_a_gradient_along_the_output_are_as_exact_as_in_torchs_layer():
    """Rounding errors of variance and sum cancel by chance, so several batches are compared."""
    plain = nn.BatchNorm1d(2)
    ours = Sharded(SynchronizedBatchNorm1d(2), [200_000, 200_000])
    errors: dict[nn.Module, list[float]] = {plain: [], ours: []}
    for _ in range(5):
        x = torch.randn(400_000, 2)
        along = plain(x).detach()
        leaf = x.double().requires_grad_()
        y = nn.BatchNorm1d(2).double()(leaf)
        (exact,) = torch.autograd.grad(y, leaf, along.double())
        for layer, found in errors.items():
            leaf = x.clone().requires_grad_()
            (dx,) = torch.autograd.grad(layer(leaf), leaf, along)
            found.append((dx.double() - exact).abs().max().item())
    assert max(errors[ours]) <= 2 * max(errors[plain]) + torch.finfo(torch.float32).eps


@pytest.mark.usefixtures("not_joined")
def test_the_variance_of_the_batch_is_clamped_instead_of_the_shards():
    """In the first channel only the batch's is above eps, in the second only one shard's."""
    layer = randomized(SynchronizedBatchNorm1d(2, eps=0.25, dtype=torch.float64))
    near, spread = torch.randn(2, 8, dtype=torch.float64)
    shards = [
        torch.stack((near[:2] / 10 + 1, spread[:2] / spread[:2].std()), 1),
        torch.stack((near / 10 - 1, spread / 100), 1),
    ]
    upstream = [torch.randn_like(shard.requires_grad_()) for shard in shards]
    with eps_mode("clamp"):
        outputs = run_sharded(layer, shards)
        grads = torch.autograd.grad(outputs, [*shards, layer.weight], upstream)
    expected = oracle.batch_norm(
        shards, upstream, layer.weight, layer.bias, eps=layer.eps, clamps=True
    )
    torch.testing.assert_close(grads, (*expected.input_grads, expected.weight_grad))


# -- what is saved and kept --------------------------------------------------------------------


class UnderHooks(nn.Module):
    """Calls its layer under hooks on saved tensors."""

    def __init__(self, layer: nn.Module, pack: Any, unpack: Any) -> None:
        super().__init__()
        self.layer, self.hooks = layer, (pack, unpack)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
            return self.layer(x)


@joined_or_not
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(
    ("replicas", "mean", "mode"), [(2, 0, "plus"), (3, 0, "plus"), (2, 1e4, "clamp")]
)
def test_no_more_is_saved_for_backward_than_the_input(replicas, mean, mode, requires_grad):
    layer = SynchronizedBatchNorm2d(4)
    layer.weight.requires_grad_(requires_grad)  # the bias always needs a gradient
    x = torch.randn(replicas, 8, 4, 16, 16) + mean
    shards = [shard.clone().requires_grad_(requires_grad) for shard in x]
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with eps_mode(mode):
        outputs = run_sharded(UnderHooks(layer, pack, lambda tensor: tensor), shards)
    inputs = sum(shard.numel() * shard.element_size() for shard in shards)
    assert sum(saved.values()) <= 1.1 * inputs
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])


@joined_or_not
@pytest.mark.parametrize("size", [3, 300], ids=["small", "large"])
def test_the_input_is_freed_in_backward_while_the_output_lives(size):
    shards = [torch.randn(n, 3, size, size, requires_grad=True) * 1 for n in (2, 1)]
    storages = [StorageWeakRef(shard.untyped_storage()) for shard in shards]
    outputs = run_sharded(SynchronizedBatchNorm2d(3), shards)
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    del shards
    assert soon(lambda: all(storage.expired() for storage in storages))


@pytest.mark.usefixtures("not_joined")
def test_an_input_changed_in_place_before_backward_is_torchs_error():
    shards = [torch.randn(n, 3, requires_grad=True) * 1 for n in (2, 4)]
    outputs = run_sharded(SynchronizedBatchNorm1d(3), shards)
    shards[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])


@joined_or_not
def test_nothing_is_kept_alive_by_a_cycle():
    with no_garbage_collection():
        shards = [torch.randn(n, 3, requires_grad=True) * 1 for n in (2, 4)]
        watched = [weakref.ref(shard) for shard in shards]
        outputs = run_sharded(SynchronizedBatchNorm1d(3), shards)
        loss = sum(y.square().sum() for y in outputs)
        grads = torch.autograd.grad(loss, shards, create_graph=True)
        del shards, outputs, loss, grads
        assert freed(*watched)


# -- subclasses of Tensor ----------------------------------------------------------------------


class Named(Tensor):
    """A subclass whose results take the name of an argument, as MONAI's MetaTensor does."""

    name = ""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        named = [arg for arg in args if isinstance(arg, Named) and arg.name]
        if named and isinstance(result, Named):
            result.name = named[0].name
        return result


def named(x: Tensor, name: str) -> Named:
    made = x.as_subclass(Named)
    made.name = name
    return made


@joined_or_not
@pytest.mark.cpu("other than on the CPU, kernels refuse subclasses")
@pytest.mark.parametrize("wrap", [lambda layer: layer, Recomputed], ids=["called", "recomputed"])
def test_a_shard_of_a_tensor_subclass_keeps_its_own_metadata(wrap):
    x, sizes = torch.randn(7, 3), [2, 4, 1]
    leaf, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
    shards = [named(shard, f"file{i}") for i, shard in enumerate(leaf.split(sizes))]
    layer = SynchronizedBatchNorm1d(3)
    ys = run_sharded(wrap(layer), shards)
    assert [(type(y), y.name) for y in ys] == [(Named, f"file{i}") for i in range(3)]
    expected = nn.BatchNorm1d(3)(exact)
    torch.testing.assert_close(
        torch.cat([y.relu_() for y in ys]).as_subclass(Tensor), expected.relu()
    )
    torch.cat(ys).square().sum().backward()
    expected.relu().square().sum().backward()
    torch.testing.assert_close(leaf.grad, exact.grad)
    with torch.no_grad():
        ys = run_sharded(layer, shards)
    assert [(type(y), y.name) for y in ys] == [(Named, f"file{i}") for i in range(3)]
