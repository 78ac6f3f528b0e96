"""A copy that does something else is named at once, and the next step is exact."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from replication import DataParallel, Group, ReplicaAware, ReplicasDiverged
from replication.sync import rendezvous
from syncbn import SynchronizedBatchNorm1d
from tests.kit.deadlines import Deadline
from tests.kit.devices import several
from tests.kit.faults import assert_next_step_is_exact, batch
from tests.kit.layers import Centering, LayerError, Numbered
from tests.kit.properties import pairwise
from tests.kit.threads import outcome_of, until_others_wait
from tests.kit.wrappers import N, as_torch_does, ours

pytestmark = pytest.mark.accelerator

#: Seconds; a wait that were given up late would take `replication.sync.rendezvous.STALL_TIMEOUT`.
AT_ONCE = 5.0

WRAPS = [ours, as_torch_does]


class TwoLayers(Numbered):
    """Two layers between linear ones; one copy may do something other with them."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.a, self.b = make(3, dtype=torch.float64), make(3, dtype=torch.float64)
        self.last = nn.Linear(3, 2, dtype=torch.float64)
        self.odd_one: int | None = None
        self.other: Callable[[Any, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.other is not None and self.copy_id == self.odd_one:
            x = self.other(self, x)
        else:
            x = self.b(self.a(x))
        return self.last(x)


def nets() -> tuple[TwoLayers, TwoLayers]:
    """A network with synchronized layers, and its twin of one device."""
    net, twin = TwoLayers(SynchronizedBatchNorm1d), TwoLayers(nn.BatchNorm1d)
    twin.load_state_dict(net.state_dict())
    return net, twin


def failure(net: nn.Module, wrap: Any, x: Tensor) -> BaseException:
    at_once = Deadline(AT_ONCE)
    outcome = outcome_of(lambda: wrap(net)(x))
    assert not at_once.has_passed()
    assert outcome.error is not None, "no error"
    return outcome.error


def assert_recovers(net: TwoLayers, twin: TwoLayers, wrap: Any) -> None:
    net.other = None
    assert net.training and net.b.training
    twin.load_state_dict(net.state_dict())
    assert_next_step_is_exact(wrap(net), net, twin)


def in_eval(net: TwoLayers, x: Tensor) -> Tensor:
    net.eval()
    return net.b(net.a(x))


def second_in_eval(net: TwoLayers, x: Tensor) -> Tensor:
    net.b.eval()
    return net.b(net.a(x))


#: What the odd one does, where the message says that it is, and where one of the others waits.
DETOURS: dict[str, tuple[Callable[[TwoLayers, Tensor], Tensor], str, str]] = {
    "skips both": (lambda net, x: x, "has ended", "waits at `a`, call 1"),
    "skips the first": (lambda net, x: net.b(x), "waits at `b`, call 1", "waits at `a`, call 1"),
    "skips the last": (lambda net, x: net.a(x), "has ended", "waits at `b`, call 1"),
    "calls the first twice": (
        lambda net, x: net.b(net.a(net.a(x))), "waits at `a`, call 2", "waits at `b`, call 1"
    ),
    "calls the last twice": (
        lambda net, x: net.b(net.b(net.a(x))), "waits at `b`, call 2", "has ended"
    ),
    "calls in another order": (
        lambda net, x: net.a(net.b(x)), "waits at `b`, call 1", "waits at `a`, call 1"
    ),
    "is in eval": (in_eval, "has ended", "waits at `a`, call 1"),
    "has a layer in eval": (second_in_eval, "has ended", "waits at `b`, call 1"),
}  # fmt: skip


@pairwise(wrap=WRAPS, replica=range(N), detour=DETOURS)
def test_replica_that_skips_a_layer_is_named(wrap, replica, detour):
    """Clause 3b: as soon as it is certain, and no sooner."""
    net, twin = nets()
    net.odd_one, (net.other, of_odd, of_others) = replica, DETOURS[detour]
    error = failure(net, wrap, batch()[0])

    assert type(error) is ReplicasDiverged
    first, second = (i for i in range(N) if i != replica)
    text = str(error)
    assert f"\n  replica {replica}: {of_odd}" in text
    # The last replica arrives after the odd one has ended, and may not be waiting yet.
    assert re.search(f"\n  replica ({first}|{second}): {of_others}", text), text
    assert_recovers(net, twin, wrap)


# -- calls that do not match -------------------------------------------------------------------


class Talks(ReplicaAware, nn.Module):
    """Adds nothing, but talks first: one copy in another way than the others."""

    def __init__(self, odd_one: int, usual: Any, other: Any) -> None:
        super().__init__()
        self.odd_one = odd_one
        self.usual, self.other = usual, other

    def forward(self, x: Tensor) -> Tensor:
        self.group.barrier()
        call = self.other if self.group.rank == self.odd_one else self.usual
        call(self.group, x[0])
        return x


def all_reduce(group: Group, x: Tensor) -> Any:
    return group.all_reduce(x)


CALLS: dict[str, tuple[Any, Any, str, str]] = {
    "collective": (all_reduce, lambda g, x: g.all_gather(x), "all_reduce", "all_gather"),
    "op": (all_reduce, lambda g, x: g.all_reduce(x, "max"), "op='sum'", "op='max'"),
    "src": (lambda g, x: g.broadcast(x, 1), lambda g, x: g.broadcast(x, 2), "src=1", "src=2"),
    "shape": (all_reduce, lambda g, x: g.all_reduce(x[:2]), r"float64 \[3\]", r"float64 \[2\]"),
    "dtype": (all_reduce, lambda g, x: g.all_reduce(x.float()), "float64", "float32"),
    "width": (
        lambda g, x: g.all_gather(x[None]), lambda g, x: g.all_gather(x[None, :2]),
        r"float64 \[\*, 3\]", r"float64 \[\*, 2\]",
    ),
    "scalar": (
        lambda g, x: g.all_gather(x), lambda g, x: g.all_gather(x.sum()),
        r"float64 \[\*\]", r"float64 \[\]",
    ),
    "dtype in all_gather": (
        lambda g, x: g.all_gather(x), lambda g, x: g.all_gather(x.float()), "float64", "float32"
    ),
    "one of several": (
        lambda g, x: g.reduce_scatter([x] * N), lambda g, x: g.reduce_scatter([x, x, x[:1]]),
        r"float64 \[3\], float64 \[3\], float64 \[3\]", r"float64 \[1\]",
    ),
    "barrier": (all_reduce, lambda g, x: g.barrier(), "all_reduce", "barrier"),
    "objects": (
        lambda g, x: g.all_gather_object(x), lambda g, x: g.all_gather(x),
        "all_gather_object", r"all_gather(?!_object)",
    ),
    "own exchange": (
        all_reduce, lambda g, x: g.exchange("mine", x, lambda xs: xs), "all_reduce", "mine"
    ),
}  # fmt: skip


def around(norm: Callable[..., nn.Module], talks: nn.Module) -> nn.Sequential:
    linear = nn.Linear(3, 3, dtype=torch.float64)
    return nn.Sequential(linear, norm(3, dtype=torch.float64), nn.Sequential(talks))


@pairwise(wrap=WRAPS, replica=range(N), what=CALLS)
def test_a_replica_that_calls_something_else_is_named(wrap, replica, what):
    usual, other, of_others, of_odd = CALLS[what]
    talks = Talks(replica, usual, other)
    net = around(SynchronizedBatchNorm1d, talks)
    text = str(failure(net, wrap, batch()[0]))
    first, second = (i for i in range(N) if i != replica)
    assert text.startswith("`2.0`, call 2: the calls do not match: ")
    assert re.search(f"replicas {first}, {second}: [^;]*{of_others}", text), text
    assert re.search(f"replica {replica}: [^;]*{of_odd}", text), text

    talks.other = usual
    twin = around(nn.BatchNorm1d, nn.Identity())
    twin.load_state_dict(net.state_dict())
    assert_next_step_is_exact(wrap(net), net, twin, batch(3))


# -- any program -------------------------------------------------------------------------------


class Program(Numbered):
    """Replica i does what ``programs[i]`` says: calls of the layers a and b, and "!" to fail."""

    def __init__(self, programs: Sequence[str]) -> None:
        super().__init__()
        self.programs = programs
        self.a, self.b = Centering(), Centering()

    def forward(self, x: Tensor) -> Tensor:
        for step in self.programs[self.copy_id or 0]:
            if step == "!":
                raise LayerError(self.copy_id)
            x = getattr(self, step)(x)
        return x


programs = st.lists(st.text("ab", max_size=3), min_size=2, max_size=4)


@given(programs=programs)
def test_replicas_get_values_if_and_only_if_their_calls_match(programs):
    """Clause 3a: a wait ends with a result or an error."""
    x = torch.randn(len(programs), 2)
    outcome = outcome_of(lambda: DataParallel(Program(programs), several(len(programs)))(x))
    if len(set(programs)) > 1:
        assert isinstance(outcome.error, ReplicasDiverged)
    else:
        torch.testing.assert_close(outcome.value, x - x.mean(0) if programs[0] else x)


class ComputesForLong(Numbered):
    """Takes longer in one replica than a replica may take to begin."""

    def forward(self, x: Tensor) -> Tensor:
        if self.copy_id == 1:
            until_others_wait(2)
            time.sleep(20 * rendezvous.STALL_TIMEOUT)
        return x


def test_the_others_wait_for_a_replica_that_computes(monkeypatch):
    """Clause 3e: the others keep waiting for a replica that computes."""
    monkeypatch.setattr(rendezvous, "STALL_TIMEOUT", 0.01)
    monkeypatch.setattr(rendezvous, "LOOK_AGAIN", 0.005)
    x = torch.randn(7, 3, dtype=torch.float64)
    net = nn.Sequential(ComputesForLong(), Centering())
    torch.testing.assert_close(DataParallel(net, several(3))(x), x - x.mean(0))


@given(programs=programs, replica=st.integers(0, 3), after=st.integers(0, 3))
def test_failing_replica_wins_where_the_others_would_have_gone_on(programs, replica, after):
    # All do the same as far as the failing one goes, and more: only it can end anything.
    """Clause 5a: the first error wins, as it was raised."""
    n, common = len(programs), programs[0][:after]
    programs = [common + "ab" + rest for rest in programs]
    programs[replica % n] = common + "!"
    outcome = outcome_of(lambda: DataParallel(Program(programs), several(n))(torch.randn(n, 2)))
    assert isinstance(outcome.error, LayerError)
    assert outcome.error.args == (replica % n,)
