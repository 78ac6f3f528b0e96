"""`SynchronizedBatchNorm` between processes, on gloo over loopback."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from replication import ProcessGroup
from syncbn import SynchronizedBatchNorm1d, batchnorm, convert_model
from syncbn.kernels import Kernels, kernels_for
from tests.kit import oracle, stand_in_kernels
from tests.kit.layers import Recomputed, Stop
from tests.kit.ranks import needs_gloo, recorded_collectives, run_ranks
from tests.kit.shards import assert_reads_no_value, randomized
from tests.kit.threads import outcome_of

pytestmark = needs_gloo
shards_on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of torch 2.6 needs a GPU"
)

#: What computes: the kernels of the CPU, or what stands for those of accelerators, where the host
#: does not know the counts of other ranks.
PATHS = ["cpu", "accelerator"]

OF_ACCELERATORS = Kernels(*stand_in_kernels.KERNELS.values())


def go(path: str) -> None:
    of_accelerators = path == "accelerator"
    batchnorm.kernels_for = (lambda kind: OF_ACCELERATORS) if of_accelerators else kernels_for


#: Samples of each rank, by the number of ranks.
SIZES = {2: [3, 4], 3: [2, 0, 5]}


def shards_of(size: int, seed: int = 0) -> list[Tensor]:
    """Random shards, the same in each process."""
    generator = torch.Generator().manual_seed(10 * size + seed)
    return [torch.randn(n, 2, 3, generator=generator).double() for n in SIZES[size]]


def layer_like(features: int = 2, **options: Any) -> SynchronizedBatchNorm1d:
    torch.manual_seed(1)
    return randomized(SynchronizedBatchNorm1d(features, **options))


# -- the numbers -------------------------------------------------------------------------------


def unlike(rank: int, size: int) -> list[Tensor]:
    """The input's gradient, where ranks differ in the derivatives that they want."""
    found = []
    layer, x = layer_like(dtype=torch.float64), shards_of(size)[rank].requires_grad_()
    y = layer(x)
    found += torch.autograd.grad(layer(x).pow(3).sum() + y.pow(3).sum(), x)
    found += torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    y = layer(x)
    (dx,) = torch.autograd.grad(
        (Stop.apply(y) if rank == 0 else y).pow(3).sum(),
        x,
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return [grad.detach() for grad in (*found, dx)]


def numbers(rank: int, size: int, **options: Any) -> dict[str, Tensor]:
    layer = layer_like(dtype=torch.float64, **options)
    x = shards_of(size)[rank].requires_grad_()
    dy = shards_of(size, seed=1)[rank]
    y = layer(x)
    (exact,) = torch.autograd.grad(y, x, dy, create_graph=True)
    (second,) = torch.autograd.grad(exact.square().sum(), x)
    y = layer(x)
    fast, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    evaluated = layer.eval()(x) if rank == 0 else x  # evaluation does not wait
    return {
        "y": y.detach(),
        "exact": exact.detach(),
        "second": second,
        "fast": fast,
        "dw": dw,
        "db": db,
        "mean": layer.running_mean,
        "var": layer.running_var,
        "count": layer.num_batches_tracked,
        "evaluated": evaluated.detach(),
    }


def without_data(rank: int, size: int) -> tuple[Tensor, Tensor, int]:
    layer = layer_like()
    layer.running_mean.fill_(3)
    layer.running_var.fill_(4)
    y = layer(torch.zeros(0, 2, 3))
    running = torch.stack((layer.running_mean, layer.running_var))
    return y.detach(), running, layer.num_batches_tracked.item()


def one_value_in_all(rank: int, size: int) -> tuple[str, Tensor, int]:
    layer = layer_like()
    error = outcome_of(lambda: layer(torch.ones(int(rank == 0), 2))).error
    running = torch.stack((layer.running_mean, layer.running_var))
    return str(error), running, layer.num_batches_tracked.item()


def of_tiny_deviation(size: int) -> list[Tensor]:
    return [1e4 + 1e-3 * shard for shard in shards_of(size)]


def tiny_variance(rank: int, size: int) -> Tensor:
    layer = SynchronizedBatchNorm1d(2, momentum=1.0, dtype=torch.float64)
    layer(of_tiny_deviation(size)[rank])
    return layer.running_var


def constant_and_large(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = 1e8 * torch.rand(16, generator=generator, dtype=torch.float64)
    return SynchronizedBatchNorm1d(16, dtype=torch.float64)(values.expand(3, 16)).detach()


def one_value_each(rank: int, size: int) -> Tensor:
    return layer_like()(torch.full((1, 2), float(rank))).detach()


def at_momenta(rank: int, size: int) -> dict[float | None, dict[str, Tensor]]:
    return {momentum: numbers(rank, size, momentum=momentum) for momentum in (0.1, None)}


def on_each_path(
    rank: int, paths: list[str], calls: list[Callable[[int, int], Any]], size: int
) -> dict[tuple[str, str], Any]:
    found = {}
    for path in paths:
        go(path)
        for call in calls:
            found[path, call.__name__] = call(rank, size)
    return found


def repeated_at_random_times(rank: int, size: int) -> list[dict[str, Tensor]]:
    chance, found = random.Random(rank), []
    for _ in range(5):
        time.sleep(chance.random() / 100)
        found.append(numbers(rank, size))
    return found


@needs_gloo
def test_steps_of_ranks_have_the_same_bits():
    """Clause 4b: the same bits in ranks, and the same running statistics on all."""
    of_ranks = run_ranks(3, repeated_at_random_times, 3)
    for first, *others in of_ranks:
        for other in others:
            assert all(torch.equal(other[name], first[name]) for name in first)
        for name in ("mean", "var"):
            assert first[name].equal(of_ranks[0][0][name])


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


def found_by_ranks(*calls: Callable[[int, int], Any], paths: list[str] = PATHS) -> Any:
    """A fixture of what each rank finds. Tests of different fixtures fail independently."""

    @pytest.fixture(scope="module")
    def found(size: int) -> list[dict[tuple[str, str], Any]]:
        return run_ranks(size, on_each_path, paths, [*calls], size)

    return found


in_training = found_by_ranks(at_momenta)
with_derivatives = found_by_ranks(unlike)
with_few_values = found_by_ranks(without_data, one_value_each, one_value_in_all)
far_from_zero = found_by_ranks(constant_and_large, tiny_variance)


def assert_equal_one_device(
    processes: Sequence[dict[str, Tensor]],
    shards: Sequence[Tensor],
    upstream: Sequence[Tensor],
    layer: SynchronizedBatchNorm1d,
) -> nn.BatchNorm1d:
    """Compares the `numbers` of processes with a plain layer. Returns it after its two steps."""
    plain = nn.BatchNorm1d(2, dtype=torch.float64, momentum=layer.momentum)
    plain.load_state_dict(layer.state_dict())
    expected = oracle.batch_norm(shards, upstream, layer.weight, layer.bias)
    x = torch.cat([*shards]).requires_grad_()
    (dx,) = torch.autograd.grad(plain(x), x, torch.cat([*upstream]), create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), x)
    plain(x)
    joined = {
        name: torch.cat([process[name] for process in processes])
        for name in ("y", "exact", "fast", "second")
    }
    torch.testing.assert_close(joined["y"], torch.cat(expected.outputs))
    torch.testing.assert_close(joined["exact"], torch.cat(expected.input_grads))
    torch.testing.assert_close(joined["fast"], torch.cat(expected.input_grads))
    torch.testing.assert_close(joined["second"], second)
    # A process has the gradients of its loss. DDP averages them.
    torch.testing.assert_close(sum(p["dw"] for p in processes), expected.weight_grad)
    torch.testing.assert_close(sum(p["db"] for p in processes), expected.bias_grad)
    for process in processes:
        torch.testing.assert_close(process["mean"], plain.running_mean)
        torch.testing.assert_close(process["var"], plain.running_var)
        assert process["count"] == 2
    return plain


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ranks_compute_what_one_process_computes(in_training, size, path, momentum):
    """Clause 1b: any shards in ranks."""
    ranks = [results[path, "at_momenta"][momentum] for results in in_training]
    shards, upstream = shards_of(size), shards_of(size, seed=1)
    layer = layer_like(dtype=torch.float64, momentum=momentum)
    plain = assert_equal_one_device(ranks, shards, upstream, layer)
    torch.testing.assert_close(ranks[0]["evaluated"], plain.eval()(shards[0]).detach())


@pytest.mark.parametrize("path", PATHS)
def test_ranks_may_differ_in_the_derivatives_that_they_want(with_derivatives, size, path):
    plain = nn.BatchNorm1d(2, dtype=torch.float64)
    plain.load_state_dict(layer_like(dtype=torch.float64).state_dict())
    shards = shards_of(size)
    x = torch.cat(shards).requires_grad_()
    (once,) = torch.autograd.grad(plain(x).pow(3).sum(), x)
    (of_others,) = torch.autograd.grad(plain(x)[len(shards[0]) :].pow(3).sum(), x)
    of_ranks = [results[path, "unlike"] for results in with_derivatives]
    joined = map(torch.cat, zip(*of_ranks, strict=True))
    torch.testing.assert_close(list(joined), [2 * once, once, of_others])


@pytest.mark.parametrize("path", PATHS)
def test_statistics_stay_if_no_rank_has_data(with_few_values, path):
    for results in with_few_values:
        y, running, count = results[path, "without_data"]
        assert y.shape == (0, 2, 3)
        assert running.tolist() == [[3, 3], [4, 4]]
        assert count == 1


@pytest.mark.parametrize("path", PATHS)
def test_one_value_per_rank_is_enough(with_few_values, size, path):
    plain = nn.BatchNorm1d(2)
    plain.load_state_dict(layer_like().state_dict())
    x = torch.arange(float(size)).unsqueeze(1).expand(-1, 2)
    y = torch.cat([results[path, "one_value_each"] for results in with_few_values])
    torch.testing.assert_close(y, plain(x).detach())


def test_one_value_in_all_is_torchs_error_in_every_rank(with_few_values):
    for results in with_few_values:
        error, _, batches = results["cpu", "one_value_in_all"]
        assert batches == 0
        assert error.startswith(
            "Expected more than 1 value per channel when training, got input size"
        )


def test_one_value_in_all_that_the_host_does_not_know_does_no_harm(with_few_values):
    for results in with_few_values:
        error, running, _ = results["accelerator", "one_value_in_all"]
        assert error == "None"
        assert running.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_constant_channels_of_large_means_give_the_bias(far_from_zero, path):
    for results in far_from_zero:
        y = results[path, "constant_and_large"]
        torch.testing.assert_close(y, torch.zeros_like(y), rtol=0, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_float64_loses_nothing_of_a_tiny_variance_at_a_large_mean(far_from_zero, size, path):
    x = torch.cat(of_tiny_deviation(size))
    expected = (x - 1e4).transpose(0, 1).flatten(1).var(1)
    for results in far_from_zero:
        torch.testing.assert_close(results[path, "tiny_variance"], expected, rtol=1e-9, atol=0)


# -- what ranks may differ in, and what not ----------------------------------------------------


def without_parameters(rank: int) -> list[Tensor]:
    found = []
    for options in ({"affine": False}, {"bias": False}):
        x = shards_of(2)[rank].requires_grad_()
        y = SynchronizedBatchNorm1d(2, dtype=torch.float64, **options)(x)
        found += torch.autograd.grad(y, x, shards_of(2, seed=1)[rank])
    return found


def test_layers_without_weight_or_bias_have_gradients():
    x = torch.cat(shards_of(2)).requires_grad_()
    y = nn.BatchNorm1d(2, affine=False, dtype=torch.float64)(x)
    (expected,) = torch.autograd.grad(y, x, torch.cat(shards_of(2, seed=1)))
    for joined in map(torch.cat, zip(*run_ranks(2, without_parameters), strict=True)):
        torch.testing.assert_close(joined, expected)


def after_a_fake_forward(rank: int) -> list[Tensor]:
    layer, x = SynchronizedBatchNorm1d(2), shards_of(2)[rank].float()
    with FakeTensorMode():
        outcome_of(lambda: SynchronizedBatchNorm1d(2)(torch.randn(4, 2, 3)))
    return [layer(x).detach().double(), x.double()]


@pytest.mark.slow
def test_what_a_forward_of_fake_tensors_leaves_behind_harms_no_other():
    ys, shards = zip(*run_ranks(2, after_a_fake_forward), strict=True)
    expected = oracle.batch_norm(shards, [torch.zeros_like(shard) for shard in shards])
    torch.testing.assert_close(list(ys), expected.outputs, rtol=1e-5, atol=1e-5)


def with_another_eps(rank: int) -> str:
    layer = SynchronizedBatchNorm1d(4, eps=1.0 if rank else 1e-5)
    return str(outcome_of(lambda: layer(torch.randn(3, 4))).error)


def test_eps_that_differs_is_named():
    for error in run_ranks(2, with_another_eps):
        assert "batch_norm(eps=1e-05) of" in error
        assert "batch_norm(eps=1.0) of" in error


def under_other_defaults(rank: int) -> list[list[Tensor]]:
    """Second derivatives at a weight of 0, and a gathered vector, without and with defaults."""
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float16, "meta")):
        layer = layer_like(eps=1 if rank else 1.0).float()
        x, dy = (shards_of(2, seed)[rank].float() for seed in (0, 1))
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank))
        nn.init.zeros_(layer.weight)
        torch.set_default_dtype(dtype)
        with torch.device(device):
            results = step(layer, x, dy, direction)
            found.append([*results, *ProcessGroup().all_gather(x)])
    return found


def test_the_default_dtype_and_device_do_not_matter():
    for expected, other in run_ranks(2, under_other_defaults):
        torch.testing.assert_close(other, expected, rtol=0, atol=0)
        assert all(tensor.isfinite().all() for tensor in expected)


#: What is trained, by the name of a layer's input or parameter.
SUBSETS = [
    subset
    for size in (1, 2, 3)
    for subset in itertools.combinations(("x", "weight", "bias"), size)
]


def penalized(x: Tensor, layer: nn.Module, trained: Sequence[str]) -> list[Tensor]:
    """The gradients of a penalty on the gradients of what is trained."""
    leaves = {"x": x, "weight": layer.weight, "bias": layer.bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in trained)
    inputs = [leaves[name] for name in trained]
    y = layer(x)
    grads = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
    (y.sum() + sum(grad.square().sum() for grad in grads)).backward()
    return [leaf.grad for leaf in inputs]


def penalties_with_an_empty_rank(rank: int) -> list[list[Tensor]]:
    shards = shards_of(3)[1 : rank + 2]  # none on rank 0
    return [
        penalized(shards[rank].clone(), layer_like(dtype=torch.float64), trained)
        for trained in SUBSETS
    ]


def test_an_empty_shard_takes_part_in_derivatives_of_each_subset_of_gradients():
    """The other rank would wait for the sums that the empty one does not reach."""
    ranks = run_ranks(2, penalties_with_an_empty_rank)
    for trained, *found in zip(SUBSETS, *ranks, strict=True):
        plain = nn.BatchNorm1d(2, dtype=torch.float64)
        plain.load_state_dict(layer_like(dtype=torch.float64).state_dict())
        expected = penalized(shards_of(3)[2].clone(), plain, trained)
        for name, empty, full, want in zip(trained, *found, expected, strict=True):
            got = full if name == "x" else empty + full
            torch.testing.assert_close(got, want, msg=f"{name} of {trained}")


class WithAdapter(nn.Module):
    """An adapter before the layer, declared last, which only some ranks run."""

    def __init__(self, runs: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)
        self.adapter = nn.Linear(2, 2)
        self.runs = runs

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(self.adapter(x) if self.runs else x))


def with_an_adapter_on_some_ranks(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = convert_model(WithAdapter(rank == 1), process_group=distributed.new_group())
    model = DistributedDataParallel(net.double(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    for shard in shards_of(2)[rank].unbind(2):
        model(shard).square().sum().backward()
    return [parameter.grad for parameter in net.parameters()]


def test_layers_with_a_separate_group_train_beside_unused_parameters():
    """In one group DDP's buckets and the layers' sums would come in another order on each rank."""
    torch.manual_seed(0)
    net = WithAdapter(True).double()
    for first, second in zip(*[shard.unbind(2) for shard in shards_of(2)], strict=True):
        y = net.last(net.norm(torch.cat((net.first(first), net.adapter(net.first(second))))))
        (y.square().sum() / 2).backward()  # DDP takes the mean over the ranks
    for found in run_ranks(2, with_an_adapter_on_some_ranks):
        torch.testing.assert_close(found, [p.grad for p in net.parameters()])


def traced_and_exported(rank: int) -> list[str]:
    warnings.simplefilter("ignore")  # torch announces that tracing is deprecated
    net, x = convert_model(nn.Sequential(nn.BatchNorm1d(2))), torch.randn(3, 2)
    errors = [outcome_of(lambda: torch.jit.trace(net, x)).error]
    if torch.__version__ >= "2.7":  # torch 2.6 raises an error of its own, before the call as well
        errors.append(outcome_of(lambda: torch.export.export(net, (x,), strict=False)).error)
    net(x)  # which the other rank answers
    return list(map(str, errors))


def test_traces_and_exports_of_training_are_refused_before_the_call():
    for errors in run_ranks(2, traced_and_exported):
        for error in errors:
            assert "`0`: calls between processes cannot be exported or traced" in error


# -- large means -------------------------------------------------------------------------------

MEANS = [0.0, 1e2, 1e3, 1e4]


def whole_batch(mean: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(3, 12, 16, 27, generator=generator)
        + torch.tensor([mean, 0, 0]).view(3, 1, 1, 1)
    )


def step(layer: nn.Module, x: Tensor, dy: Tensor, direction: Tensor | None) -> list[Tensor]:
    x = x.to(dy.dtype).requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(
        y, (x, layer.weight, layer.bias), dy, create_graph=direction is not None
    )
    if direction is not None:
        grads = torch.autograd.grad(grads[0], (x, layer.weight), direction)
    return [y.detach(), *grads, layer.running_mean, layer.running_var]


def at_means(rank: int) -> dict[Any, list[Tensor]]:
    found = {}
    go("cpu")
    for mean, second in itertools.product(MEANS, [False, True]):
        layer = layer_like(features=16)
        part = slice(0, 7) if rank == 0 else slice(7, 12)
        x, dy, direction = (t[part] for t in whole_batch(mean))
        found[mean, second] = step(layer, x, dy, direction if second else None)
    return found


@pytest.fixture(scope="module")
def at_large_means() -> list[dict[Any, list[Tensor]]]:
    return run_ranks(2, at_means)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_large_means_are_as_accurate_as_in_torchs_layer(at_large_means, mean, second):
    """Clause 1d: at most twice the error of `nn.BatchNorm`."""
    x, dy, direction = whole_batch(mean)
    plain = nn.BatchNorm1d(16)
    plain.load_state_dict(layer_like(features=16).state_dict())
    exact = copy.deepcopy(plain).double()
    theirs = step(plain, x, dy, direction if second else None)
    true = step(exact, x, dy.double(), direction.double() if second else None)
    first, other = (results[mean, second] for results in at_large_means)
    joined = [torch.cat([a, b]) for a, b in zip(first[:2], other[:2], strict=True)]
    ours = [*joined, *(a + b for a, b in zip(first[2:-2], other[2:-2], strict=True)), *first[-2:]]
    for index, (got, them, want) in enumerate(zip(ours, theirs, true, strict=True)):
        # For a mean near zero, the ulp of the values that it is the mean of counts.
        scale = x if index == len(true) - 2 else want
        ulp = scale.abs().max() * torch.finfo(torch.float32).eps
        assert (got - want).abs().max() <= 2 * (them - want).abs().max() + ulp, index


# -- what travels ------------------------------------------------------------------------------


def traffic(rank: int, channels: int) -> list[Any]:
    found = []
    for path in PATHS:
        go(path)
        layer = SynchronizedBatchNorm1d(channels)
        with recorded_collectives() as forward:
            y = layer(torch.randn(4, channels, 5, requires_grad=True))
        with recorded_collectives() as backward:
            y.backward(torch.randn_like(y))
        found.append((forward, backward))
    return found


@pytest.mark.parametrize("channels", [3, 10_000])
def test_one_collective_forward_and_one_backward_of_a_few_values_per_channel(channels):
    """Two values per channel, on the CPU the number of the call, and forward a count."""
    for on_cpu, of_accelerator in run_ranks(2, traffic, channels):
        # Short vectors on the CPU are gathered, and added on each rank.
        name = "all_gather" if channels < 10_000 else "all_reduce"
        backward = [(name, 4 * (2 * channels + 1))]
        assert on_cpu == ([("all_gather", 8 * (2 * channels + 2))], backward)
        # Kernels of accelerators return float32. Here their vectors are on the CPU as well.
        assert of_accelerator == ([("all_gather", 4 * (2 * channels + 2))], backward)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))

    def forward(self, x: Tensor, used: int, keeps_the_other: bool = False) -> Tensor:
        outputs = [head(self.trunk(x)) for head in self.heads]
        loss = outputs[used].pow(3).sum()
        return loss + 0.0 * outputs[1 - used].sum() if keeps_the_other else loss


def with_losses_of_different_heads(rank: int, keeps_the_other: bool) -> str | Tensor:
    torch.manual_seed(0)
    net = convert_model(TwoHeads().double(), process_group=distributed.new_group())
    model = DistributedDataParallel(net, find_unused_parameters=not keeps_the_other)
    error = outcome_of(model(drawn_of_rank(rank), rank, keeps_the_other).backward).error
    return net.trunk.weight.grad if error is None else f"{type(error).__name__}: {error}"


def drawn_of_rank(rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)).double()


def test_backwards_of_different_layers_are_named_on_the_host():
    """With channels as many as those of the other layer, so that their sums could be added."""
    for text in run_ranks(2, with_losses_of_different_heads, False):
        assert text.startswith("ReplicasDiverged: `heads.")
        for rank in range(2):
            assert f"rank {rank}: `heads.{rank}`, call 3: batch_norm_backward of " in text


def test_a_head_kept_in_the_loss_of_all_ranks_trains_as_on_one_device():
    torch.manual_seed(0)
    net = TwoHeads().double()
    x = net.trunk(torch.cat([drawn_of_rank(rank) for rank in range(2)]))
    first, second = net.heads[0](x)[:5], net.heads[1](x)[5:]
    ((first.pow(3).sum() + second.pow(3).sum()) / 2).backward()
    for found in run_ranks(2, with_losses_of_different_heads, True):
        torch.testing.assert_close(found, net.trunk.weight.grad)


class TwoAlike(ProcessGroup):
    """A group of two ranks with the same tensors."""

    def __init__(self) -> None:
        self.size = 2

    def gather(self, signature: Any, *parts: Tensor) -> list[Tensor]:
        return [part.expand(2, -1) for part in parts]

    def all_reduce(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return tensor * 2


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_the_host_waits_for_no_device(second, monkeypatch):
    layer = SynchronizedBatchNorm1d(3, momentum=None, device="meta")
    monkeypatch.setattr(SynchronizedBatchNorm1d, "group", TwoAlike())
    x = torch.randn(5, 3, device="meta", requires_grad=True)
    assert_reads_no_value(layer, layer.weight, x, second)


# -- which processes ---------------------------------------------------------------------------


def limited(rank: int) -> dict[str, Any]:
    """To ranks 0 and 1 of three, each in another way."""
    pair = distributed.new_group([0, 1])
    found: dict[str, Any] = {}
    x = shards_of(3)[rank] + rank
    parted = SynchronizedBatchNorm1d(2, dtype=torch.float64, group_size=2)
    found["group_size"] = parted(x).detach()
    if rank < 2:
        layers = {
            "argument": SynchronizedBatchNorm1d(2, dtype=torch.float64, process_group=pair),
            "conversion": convert_model(
                nn.BatchNorm1d(2, dtype=torch.float64), process_group=pair
            ),
            "torch's": convert_model(nn.SyncBatchNorm(2, process_group=pair).double()),
        }
        layers["copy"] = copy.deepcopy(layers["argument"])
        found |= {name: layer(x).detach() for name, layer in layers.items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = pickle.loads(pickle.dumps(layers["argument"]))
        found["warning"] = str(caught[0].message)
        found["loaded"] = loaded.process_group
    else:
        stranger = SynchronizedBatchNorm1d(2, process_group=pair)
        found["stranger"] = str(outcome_of(lambda: stranger(torch.ones(2, 2))).error)
        stranger.eval()(torch.ones(2, 2))
    return found


@pytest.mark.slow
def test_process_group_limits_the_processes():
    results = run_ranks(3, limited)
    shards = shards_of(3)
    expected = nn.BatchNorm1d(2, dtype=torch.float64)(torch.cat([shards[0], shards[1] + 1]))
    alone = nn.BatchNorm1d(2, dtype=torch.float64)(shards[2] + 2).detach()
    torch.testing.assert_close(results[2]["group_size"], alone)
    for name in ("group_size", "argument", "conversion", "torch's", "copy"):
        torch.testing.assert_close(
            torch.cat([found[name] for found in results[:2]]), expected.detach()
        )
    assert results[2]["stranger"].startswith(
        "`SynchronizedBatchNorm1d`: process_group must contain this process"
    )
    for found in results[:2]:
        assert "a process_group is not pickled with a layer" in found["warning"]
        assert found["loaded"] is None


# -- DistributedDataParallel, checkpoints, FSDP2 -----------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()


def train(
    model: nn.Module, part: slice, rank: int | None, accumulate: int, scale: int | None = None
) -> dict[str, Tensor]:
    """The state after steps on a part of each batch. ``accumulate`` of them share an update."""
    # Gradients are averaged over the ranks, and of a sum of two the mean is half.
    scale = scale or (1 if rank is None else 2)
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(7, 2, 3, generator=generator, dtype=torch.float64)[part]
        target = torch.randn(7, 3, generator=generator, dtype=torch.float64)[part]
        last = (step + 1) % accumulate == 0
        with model.no_sync() if rank is not None and not last else warnings.catch_warnings():
            loss = (model(x) - target).square().sum() * scale
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if step == 2 and rank in (0, None):  # one rank alone evaluates without waiting
            getattr(model, "module", model).eval()(x)
            model.train()
    return getattr(model, "module", model).state_dict()


PARTS = [slice(0, 3), slice(3, 7)]


def trained(rank: int, accumulate: int = 1, reentrant: bool | None = None) -> dict[str, Tensor]:
    net = convert_model(network())
    whole = net
    if reentrant is not None:
        whole = nn.Sequential(net[0], Recomputed(net[1:], reentrant))
    train(DistributedDataParallel(whole), PARTS[rank], rank, accumulate)
    return net.state_dict()


def sharded(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    warnings.simplefilter("ignore")  # of FSDP itself
    net = convert_model(network())
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))  # even beside GPUs
    for module in (net[4], net):
        fully_shard(module, mesh=mesh)
    train(net, PARTS[rank], None, 1, scale=2)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(net, options=options)
    kinds = {type(tensor).__name__ for tensor in net.state_dict().values()}
    # And back: from the sharded and from a full state.
    other = convert_model(network())
    fully_shard(other, mesh=mesh)
    other.load_state_dict(net.state_dict())
    again = get_model_state_dict(other, options=options)
    return full, again, kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "reentrant"), [(1, None), (3, None), (1, False), (1, True)]
)
def test_training_under_ddp_equals_training_in_one_process(accumulate, reentrant):
    """Also with checkpoints, whose recomputation updates no statistics."""
    expected = train(network(), slice(0, 7), None, accumulate)
    for state in run_ranks(2, trained, accumulate, reentrant):
        torch.testing.assert_close(state, expected)
        network().load_state_dict(state)
        nn.SyncBatchNorm.convert_sync_batchnorm(network()).load_state_dict(state)


@pytest.mark.slow
@shards_on_cpus
def test_training_under_fsdp2_equals_training_in_one_process():
    expected = train(network(), slice(0, 7), None, 1)
    for full, again, kinds in run_ranks(2, sharded):
        assert kinds == {"DTensor", "Tensor"}
        if full:  # of rank 0
            torch.testing.assert_close(full, expected)
            torch.testing.assert_close(again, expected)
            network().load_state_dict(full)


def in_half_precision(rank: int, group_size: int | None) -> list[Tensor]:
    """Output, gradients, buffers and output of evaluation, with weights that FSDP2 casts."""
    warnings.simplefilter("ignore")  # of FSDP itself
    layer = layer_like(group_size=group_size)
    net = fully_shard(
        nn.Sequential(layer),
        mesh=init_device_mesh("cpu", (distributed.get_world_size(),)),  # even beside GPUs
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    x = shards_of(2)[rank].float().requires_grad_()
    y = net(x)
    y.backward(shards_of(2, seed=1)[rank].to(y.dtype))
    grads = [layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor()]
    buffers = layer.running_mean.clone(), layer.running_var.clone()
    return [y.detach(), x.grad, *grads, *buffers, net.eval()(x).detach()]


@shards_on_cpus
@pytest.mark.parametrize("group_size", [None, 1], ids=["together", "alone"])
def test_parameters_in_half_precision_beside_buffers_of_float32(group_size):
    """torch's own layers refuse them."""
    ranks = run_ranks(2, in_half_precision, group_size)
    shards, upstream = ([t.bfloat16().double() for t in shards_of(2, seed)] for seed in (0, 1))
    parts = [[0, 1]] if group_size is None else [[0], [1]]
    totals = [torch.zeros(2).double(), torch.zeros(2).double()]
    for part in parts:
        plain = nn.BatchNorm1d(2)
        plain.load_state_dict(layer_like().bfloat16().state_dict())
        plain.double()
        x = torch.cat([shards[rank] for rank in part]).requires_grad_()
        y = plain(x)
        y.backward(torch.cat([upstream[rank] for rank in part]))
        expected = [y.detach(), x.grad, plain.running_mean, plain.running_var, plain.eval()(x)]
        found = [ranks[rank] for rank in part]
        joined = [torch.cat([rank[i] for rank in found]) for i in (0, 1, -1)]
        got = [joined[0], joined[1], *found[0][-3:-1], joined[2]]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)
        for total, parameter in zip(totals, plain.parameters(), strict=True):
            total += parameter.grad / 2  # FSDP2 takes the mean over the ranks
    for rank in ranks:
        assert rank[0].dtype == rank[-1].dtype == torch.bfloat16
        for one, other in zip(rank[2:4], totals, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)
