"""`torch.compile` between processes: one graph, and the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from benchmarks import activations
from replication._torch import COMPILES_COLLECTIVES
from syncbn import convert_model
from syncbn.statistics import Epsilon
from syncbn.textbook import batch_norm
from tests.kit.layers import Recomputed
from tests.kit.programs import needs_cpp_compiler
from tests.kit.ranks import needs_gloo, run_ranks

one_graph = pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="this torch breaks the graph")
pytestmark = needs_gloo


class Block(nn.Module):
    """Layers with all options, in two branches that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.BatchNorm1d(4)
        self.right = nn.BatchNorm1d(4, momentum=None)
        self.both = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.left(x).relu() * self.right(x.sin()) + x)


def network(blocks: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(blocks))).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0.5)
    return net


Shape = tuple[int, ...]


def shards_of(shapes: Sequence[Shape]) -> list[tuple[Tensor, Tensor]]:
    """A shard and an upstream gradient for each shape, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(shape, generator=generator).double() for _ in range(2))
        for shape in shapes
    ]


def stepped(model: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor, dy: Tensor) -> Any:
    """Output, gradient of x, gradients of parameters, and buffers."""
    x = x.requires_grad_()
    y = model(x)
    dx, *gradients = torch.autograd.grad(y, [x, *net.parameters()], dy)
    return y.detach(), dx, gradients, [buffer.clone() for buffer in net.buffers()]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All values of some shards by channels, as one shard."""
    return torch.cat([tensor.transpose(0, 1).flatten(1) for tensor in tensors], 1).t()


def assert_train_as_one_device(ranks: Any, steps: Sequence[Sequence[Shape]]) -> None:
    net = network()
    for found, shapes in zip(zip(*ranks, strict=True), steps, strict=True):
        xs, dys = zip(*shards_of(shapes), strict=True)
        y, dx, gradients, buffers = stepped(net, net, flat(xs), flat(dys))
        ys, dxs, all_gradients, all_buffers = zip(*found, strict=True)
        totals = [sum(parts) for parts in zip(*all_gradients, strict=True)]
        found = (flat(ys), flat(dxs), totals)
        torch.testing.assert_close(found, (y, dx, gradients), rtol=1e-11, atol=1e-11)
        for rank in all_buffers:
            torch.testing.assert_close(rank, buffers, rtol=1e-11, atol=1e-11)


@contextmanager
def strict_compiler() -> Iterator[None]:
    """Raises where a layer would be compiled again too often."""
    torch.compiler.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        warnings.simplefilter("ignore")  # the compiler's own
        yield
    torch.compiler.reset()


def compiled_steps(rank: int, steps: Any, **options: Any) -> tuple[list[Any], int]:
    """What `stepped` returns, step by step, and the number of graphs."""
    net = convert_model(network())
    model = torch.compile(net, fullgraph=True, **options)
    with strict_compiler():
        found = [stepped(model, net, *shards_of(shapes)[rank]) for shapes in steps]
    return found, counters["stats"]["unique_graphs"]


#: Equal, uneven, one value, none: shapes of the shards of two ranks, step by step.
STEPS = [[(a, 4, 3), (b, 4, 3)] for a, b in [(4, 4), (5, 3), (2, 7), (1, 1), (0, 4)]]


@pytest.mark.slow
@one_graph
def test_a_network_is_one_graph_and_trains_as_one_device():
    results = run_ranks(2, partial(compiled_steps, steps=STEPS, backend="aot_eager"))
    assert_train_as_one_device([found for found, _ in results], STEPS)
    assert max(graphs for _, graphs in results) <= 4  # other sizes: not 0, not 1, any


#: Each rank compiles its own shape, and then one for any size, so that branches may be scheduled
#: in another order. In the end one rank has no data. Kernels take long to compile.
KERNEL_STEPS = [[(4, 4, 3), (2, 4, 70)], [(5, 4, 3), (3, 4, 7)], [(0, 4, 3), (4, 4, 7)]]


@one_graph
@needs_cpp_compiler
@pytest.mark.slow
def test_compiled_kernels_keep_numbers_and_the_order_of_collectives():
    results = run_ranks(2, partial(compiled_steps, steps=KERNEL_STEPS))
    assert_train_as_one_device([found for found, _ in results], KERNEL_STEPS)


def in_all_uses(rank: int) -> dict[str, tuple[Any, Any]]:
    """What one step gives, uncompiled and compiled."""
    x, dy = shards_of([(4, 4, 3), (2, 4, 3)])[rank]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    uses: dict[str, Callable[[nn.Module], nn.Module]] = {
        "checkpoint": Recomputed,
        "data parallel": DistributedDataParallel,
        "mesh": lambda net: convert_model(net, process_group=mesh["dp"]),
        "sharded": partial(fully_shard, mesh=mesh["dp"]),  # of CPUs, even beside GPUs
    }
    found = {}
    for name, use in uses.items():
        pair = []
        for compiles in (False, True):
            torch.manual_seed(0)
            net = use(convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(4)).double()))
            model = torch.compile(net, backend="aot_eager") if compiles else net
            with strict_compiler():
                y = model(x)
                y.backward(dy)
            gradients = [as_local(p.grad) for p in net.parameters()]
            pair.append([y.detach(), *gradients, *(b.clone() for b in net.buffers())])
        found[name] = tuple(pair)
    return found


def as_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@one_graph
@pytest.mark.slow
def test_compiled_steps_equal_uncompiled_ones_in_all_uses():
    for found in run_ranks(2, in_all_uses):
        for name, (expected, actual) in found.items():
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


def in_half_precision(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients of x, uncompiled and compiled."""
    x, dy = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(rank))
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        layer = convert_model(nn.BatchNorm1d(8))
        with strict_compiler():
            uncompiled = stepped(layer, layer, x.to(dtype), dy.to(dtype))
            compiled = torch.compile(layer, backend="aot_eager")
            found += zip(
                uncompiled[:2],
                stepped(compiled, layer, x.to(dtype), dy.to(dtype))[:2],
                strict=True,
            )
    return found


@pytest.mark.slow
@one_graph
def test_half_precision_is_rounded_once_at_the_end():
    for found in run_ranks(2, in_half_precision):
        for expected, actual in found:
            assert actual.dtype == expected.dtype
            # Before that they differ by a few units of float32.
            assert (actual != expected).double().mean() < 0.01


#: Fewer than the benchmark has, to compile sooner.
BUDGETED_LAYERS = 5


def with_a_memory_budget(rank: int) -> list[tuple[float, tuple[int, int], list[Tensor]]]:
    """Activations kept, collectives, and gradients: uncompiled, compiled, and with a budget."""
    activations.LAYERS = BUDGETED_LAYERS
    x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(rank)).double()
    found = []
    for backend, budget in [(None, 1.0), ("aot_eager", 1.0), ("aot_eager", activations.BUDGET)]:
        torch.manual_seed(0)
        net = convert_model(activations.network(8)).double()
        model = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
        with strict_compiler(), functorch_config.patch(activation_memory_budget=budget):
            model(x).sum().backward()  # compiles
            net.zero_grad()
            with profile() as forward:
                y = model(x)
            kept = activations.kept(y, net) / x.nbytes
            with profile() as backward:
                y.square().sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        found.append((kept, (collectives(forward), collectives(backward)), gradients))
    return found


def collectives(profile: Any) -> int:
    """The number of collectives that a backend has run."""
    return sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::"))


@one_graph
@pytest.mark.slow
def test_a_memory_budget_halves_the_activations_and_keeps_collectives_and_numbers():
    layers = BUDGETED_LAYERS
    for found in run_ranks(2, with_a_memory_budget):
        kept, counts, gradients = zip(*found, strict=True)
        assert counts == ((layers, layers),) * 3
        # The inputs of convolutions and of layers, and the last output. With the budget, the
        # inputs of layers. Vectors of the size of a channel are a little more.
        uncompiled, compiled, with_budget = kept
        assert 2 * layers + 1 <= uncompiled <= compiled < 2 * layers + 2
        assert layers <= with_budget < layers + 2
        for other in gradients[1:]:
            torch.testing.assert_close(other, gradients[0], rtol=1e-12, atol=1e-12)


class Missing(nn.Module):
    """Three inputs, each normalized. Those that are missing are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(3))

    def forward(self, *inputs: Tensor) -> Tensor:
        inputs += (torch.zeros(4, 3, dtype=torch.float64),) * (3 - len(inputs))
        first, second, third = (layer(x) for layer, x in zip(self.layers, inputs, strict=True))
        return first.sin() + second.cos() + third


def with_equal_inputs(rank: int) -> list[list[Tensor]]:
    """Buffers and gradients, uncompiled and compiled, where layers on rank 0 have equal inputs."""
    inputs = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(rank)).double().unbind()
    found = []
    for backend in (None, "aot_eager"):
        net = convert_model(Missing().double())
        model = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
        with strict_compiler():
            for given in (inputs[: 1 + 2 * rank], inputs):
                model(*given).square().sum().backward()
        found.append([*net.buffers(), *(p.grad for p in net.parameters())])
    return found


@one_graph
def test_no_rank_makes_one_collective_of_several():
    """The compiler computes once what is computed twice."""
    for found in run_ranks(2, with_equal_inputs):
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def before_and_after(rank: int, store: str) -> tuple[Tensor, Tensor]:
    """Outputs of one compiled layer, without a process group and with one."""
    distributed.barrier()  # until both are connected
    distributed.destroy_process_group()
    x = torch.arange(8.0).view(2, 4, 1)[rank]
    compiled = torch.compile(convert_model(nn.BatchNorm1d(1)), backend="eager")
    with strict_compiler():
        alone = compiled(x)
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2
        )
        return alone, compiled(x)


@one_graph
def test_a_layer_that_is_compiled_before_the_process_group_exists_is_compiled_again(tmp_path):
    results = run_ranks(2, before_and_after, str(tmp_path / "store"))
    alone, together = (torch.stack(outputs) for outputs in zip(*results, strict=True))
    x, plain = torch.arange(8.0).view(2, 4, 1), nn.BatchNorm1d(1)
    torch.testing.assert_close(alone, torch.stack([plain(shard) for shard in x]))
    torch.testing.assert_close(together, plain(x.flatten(0, 1)).view(x.shape))


def with_many_layers(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Outputs of uncompiled and compiled networks, in one graph and in one for each layer."""
    x, found = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)), []
    for size, tracks in ((None, True), (2, True), (None, False)):  # one graph, or many
        layers = (nn.BatchNorm1d(3, track_running_stats=tracks) for _ in range(10))
        net = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))
        net = convert_model(net, group_size=size)
        with torch.no_grad(), strict_compiler():
            found.append((torch.compile(net, backend="eager")(x), net(x)))
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"), reason="torch is too old"
)
def test_no_layer_is_compiled_again_for_its_name():
    """torch allows 8 versions of a function."""
    for found in [*run_ranks(2, with_many_layers), with_many_layers(0)]:
        for actual, expected in found:
            torch.testing.assert_close(actual, expected)


# -- the digits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2**-22), (torch.float64, 5e-8)])
def test_sums_leave_eight_digits_at_a_large_mean(dtype, rtol):
    x = torch.randn(64, 4, 50).to(dtype) + 1e4
    _, (n, mean, var) = batch_norm(x, None, None, Epsilon(1e-5), lambda sums: sums)
    expected = x.double().var((0, 2), unbiased=False)
    assert n == 3200
    torch.testing.assert_close(mean, x.double().mean((0, 2)), rtol=1e-12, atol=0)
    torch.testing.assert_close(var, expected, rtol=rtol, atol=0)
