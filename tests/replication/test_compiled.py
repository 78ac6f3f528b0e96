"""Losses and collectives between ranks under `torch.compile`: one graph, and the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

from replication import ProcessGroup, ReplicaAware, functional, global_mean
from replication._torch import COMPILES_COLLECTIVES
from tests.kit.programs import needs_cpp_compiler
from tests.kit.ranks import needs_gloo, run_ranks

pytestmark = [
    needs_gloo,
    pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="this torch breaks the graph"),
]


@contextmanager
def strict_compiler() -> Iterator[None]:
    """Raises where code would be compiled again too often."""
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        warnings.simplefilter("ignore")  # the compiler's own
        yield
    torch.compiler.reset()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- training steps ------------------------------------------------------------------------------


class Step(nn.Module):
    """A network and its loss, in one graph."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


def masked(scores: Tensor, classes: Tensor) -> Tensor:
    losses = cross_entropy(scores, classes, reduction="none", ignore_index=-1)
    return global_mean(losses, classes != -1)


def masked_on_one_device(scores: Tensor, classes: Tensor) -> Tensor:
    return cross_entropy(scores, classes, ignore_index=-1)


def contrastive(scores: Tensor, other: Tensor) -> Tensor:
    """Each sample is compared with the samples of all ranks."""
    everyone = torch.cat(functional.all_gather(normalize(other), same_shape=True))
    first = ProcessGroup().rank * len(scores)
    positives = first + torch.arange(len(scores))
    return cross_entropy(normalize(scores) @ everyone.T / 0.1, positives)


def contrastive_on_one_device(scores: Tensor, other: Tensor) -> Tensor:
    return cross_entropy(normalize(scores) @ normalize(other).T / 0.1, torch.arange(len(scores)))


#: A loss on ranks and on one device, and the sizes of the shards of both ranks in each step.
LOSSES: dict[str, tuple[Any, Any, Sequence[tuple[int, int]]]] = {
    "global_mean": (masked, masked_on_one_device, [(4, 3), (5, 2), (3, 3), (1, 6)]),
    "contrastive": (contrastive, contrastive_on_one_device, [(4, 4), (3, 3), (5, 5)]),
}


def batch_of(name: str, sizes: tuple[int, int], step: int) -> list[tuple[Tensor, Tensor]]:
    """The shards of both ranks."""
    total = sum(sizes)
    x = drawn(total, 3, seed=step)
    if name == "contrastive":
        target = drawn(total, 4, seed=step + 100)
    else:
        target = torch.randint(4, (total,), generator=torch.Generator().manual_seed(step))
        target[1::3] = -1
        target[: sizes[0] * (step % 2)] = -1  # in every other step, rank 0 has no class
    return list(zip(x.split(sizes), target.split(sizes), strict=True))


def trained(rank: int, backend: str, name: str) -> tuple[list[Any], int, int]:
    """Values and gradients of all steps, and how many graphs and breaks there were."""
    loss, _, steps = LOSSES[name]
    net = Step(loss)
    with strict_compiler():
        model = DistributedDataParallel(torch.compile(net, fullgraph=True, backend=backend))
        found = []
        for step, sizes in enumerate(steps):
            x, target = batch_of(name, sizes, step)[rank]
            net.zero_grad()
            value = model(x, target)
            value.backward()
            found.append((value.detach(), [p.grad.clone() for p in net.parameters()]))
    return found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_cpp_compiler])],
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_training_step_is_one_graph_with_the_gradients_of_one_device(name, backend):
    ranks = run_ranks(2, trained, backend, name)
    for index, sizes in enumerate(LOSSES[name][2]):
        net = Step(LOSSES[name][1])
        x, target = (torch.cat(parts) for parts in zip(*batch_of(name, sizes, index), strict=True))
        value = net(x, target)
        gradients = list(torch.autograd.grad(value, list(net.parameters())))
        means = sum(found[index][0] for found, _, _ in ranks) / 2
        torch.testing.assert_close(means, value.detach())
        for found, graphs, breaks in ranks:
            torch.testing.assert_close(found[index][1], gradients)
            assert (breaks, graphs <= 3) == (0, True)  # other sizes: not 1, any


# -- each collective -----------------------------------------------------------------------------


class Aware(ReplicaAware, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x.sin(), "mean")


def twice(x: Tensor) -> Tensor:
    """The compiler must not make one collective of two on rank 0, where sizes are equal."""
    rows, columns = (functional.all_reduce(torch.full((2,), float(n))) for n in x.shape)
    return functional.all_reduce(x[:2, :2]) / (rows + 2 * columns)


MADE: list[ProcessGroup] = []
CALLS: dict[str, Callable[[Tensor], Any]] = {
    **{
        op: lambda x, op=op: functional.all_reduce(x.sin(), op)
        for op in ("sum", "mean", "max", "min", "product")
    },
    "broadcast": lambda x: functional.broadcast(x.sin(), 1),
    "all_gather": lambda x: torch.cat(functional.all_gather(x.sin(), same_shape=True)),
    "scalars": lambda x: torch.stack(functional.all_gather(x.sum(), same_shape=True)),
    "nothing": lambda x: functional.all_reduce(x[:0]).sum() + x.sum(),
    "half": lambda x: functional.all_reduce(x.half() * 1e4, "mean").double(),
    "integers": lambda x: functional.all_reduce((x * 10).long()) * x,
    "same input": lambda x: functional.all_reduce(x) * functional.all_reduce(x),
    "unused": lambda x: functional.broadcast(x.sin(), 1) * x.detach(),
    "layer": Aware(),
    "made outside": lambda x: MADE[0].all_reduce(x.cos()),
    "mean": lambda x: global_mean(x.square()),
    "weighted": lambda x: global_mean(x.square(), x > 0, count=7, averages=False),
}
SQUARE = (3, 3)


def compared(rank: int, backend: str, names: list[str]) -> dict[str, list[Tensor]]:
    """For each call, uncompiled and compiled results and gradients, twice."""
    MADE.append(ProcessGroup())
    found = {}
    for name in names:
        call = CALLS[name]
        with strict_compiler():
            compiled = torch.compile(call, fullgraph=True, backend=backend)
            x = drawn(*SQUARE, seed=rank).requires_grad_()
            results = []
            for run in (call, compiled, compiled):
                y = run(x)
                (dx,) = torch.autograd.grad(y, x, drawn(*y.shape, seed=7 + rank))
                results.append([y.detach(), dx])
            found[name] = results
            assert counters["stats"]["unique_graphs"] == 1
    return found


@pytest.fixture(scope="module")
def calls() -> list[dict[str, list[Any]]]:
    return run_ranks(2, compared, "aot_eager", [*CALLS])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_has_the_results_and_gradients_of_an_uncompiled_one(calls, name):
    for found in calls:
        uncompiled, *compiled = found[name]
        for each in compiled:
            torch.testing.assert_close(each, uncompiled)


def of_equal_sizes_on_one_rank(rank: int, backend: str) -> list[Any]:
    x, found = drawn(3, 3 + rank, seed=rank).requires_grad_(), []
    with strict_compiler():
        for run in (twice, torch.compile(twice, fullgraph=True, backend=backend)):
            y = run(x)
            found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
    return found


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_cpp_compiler])],
)
def test_ranks_make_the_same_collectives_where_expressions_are_equal_on_one(backend):
    for uncompiled, compiled in run_ranks(2, of_equal_sizes_on_one_rank, backend):
        torch.testing.assert_close(compiled, uncompiled)


@pytest.mark.slow
@needs_cpp_compiler
def test_compiled_kernels_have_the_results_and_gradients_of_uncompiled_ones():
    # Few, because Inductor takes seconds for each. It can merge what it sees of collectives.
    for found in run_ranks(2, compared, "inductor", ["sum", "same input", "weighted"]):
        for uncompiled, *compiled in found.values():
            for each in compiled:
                torch.testing.assert_close(each, uncompiled)


# -- what breaks the graph -----------------------------------------------------------------------


def uneven(x: Tensor) -> Tensor:
    y = torch.cat(functional.all_gather(x)).sum(0)
    functional.barrier()
    return y + functional.all_gather_object(1)[0]


def broken(rank: int) -> tuple[list[str], Tensor, Tensor]:
    torch.compiler.reset()
    x = drawn(2 + rank, 3, seed=rank)
    compiled = torch.compile(uneven, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [compiled(x) for _ in range(2)]
    texts = [str(w.message) for w in caught if "breaks the graph" in str(w.message)]
    return texts, uneven(x), found[1]


def test_what_breaks_the_graph_is_right_and_says_so_once():
    for texts, expected, found in run_ranks(2, broken):
        torch.testing.assert_close(found, expected)
        assert len(texts) == 3
        for text, name in zip(texts, ("all_gather", "barrier", "all_gather_object"), strict=True):
            assert text.startswith(f"{name} between processes breaks the graph of torch.compile.")
