"""Models train among faults, delays and divergence in any order: no hang, and nothing is left.

``pytest tests/test_soak.py --hypothesis-profile explore`` goes on for long.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import Tensor, nn

from replication import DataParallel, ReplicasDiverged
from replication.steps import threads
from replication.sync.rendezvous import Rendezvous
from syncbn import SynchronizedBatchNorm1d, channels
from tests.kit.deadlines import soon
from tests.kit.faults import Fault, assert_next_step_is_exact, batch, faulty, twin_of
from tests.kit.layers import Repeat
from tests.kit.properties import examples
from tests.kit.threads import outcome_of, together, values
from tests.kit.wrappers import as_torch_does, ours

pytestmark = pytest.mark.slow

#: At most so many replicas.
MOST = 8

#: Where an error may strike; see `faults.faulty`.
PLACES = [
    *("before", "pre-hook", "in", "hook", "between", "after", "master"),
    *(f"{when}, {where}" for when in ("callback", "backward") for where in ("before", "after")),
]

#: Of the delays.
chance = random.Random(0)

nets = st.integers(0, 1)
replica_counts = st.integers(1, MOST)
sample_counts = st.integers(2, 2 * MOST)
wraps = st.sampled_from((ours, as_torch_does))


def delay(*args: Any) -> None:
    if chance.random() < 0.05:
        time.sleep(chance.random() / 5000)  # so that the replicas arrive in another order


def delayed(net: nn.Module) -> nn.Module:
    for layer in net.modules():
        layer.register_forward_pre_hook(delay)
    return net


def census() -> Counter[str]:
    """How many there are of what could be left over."""
    # The engine keeps what a failed backward has left to do until the next one.
    torch.ones((), requires_grad=True).backward()
    channels._constants.clear()  # a cache, one tensor for each division of a batch
    threads._idle.clear()  # as many as ran at a time; they end, because nothing refers to them
    gc.collect()
    found: Counter[str] = Counter(threads=threading.active_count())
    for thing in gc.get_objects():
        for kind in (Rendezvous, SimpleQueue, Tensor):
            if issubclass(type(thing), kind):
                found[kind.__name__] += 1
    return found


class Soak(RuleBasedStateMachine):
    """Each step takes 1 to 8 replicas and a batch of any size.

    A step that nothing has struck gives the numbers of torch's layers on one device. What has
    struck is the error that arrives. Threads, tensors, queues and rendezvous do not grow in
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nets = [delayed(faulty(Fault("nowhere", 0))) for _ in range(2)]
        for net in range(2):  # what the first use makes, once and for all
            self.threads(net, 2, 4)
            self.step(net, MOST, MOST, ours)
        self.least = census()

    def teardown(self) -> None:
        """Waits, because threads let go of a job right after it has ended."""
        assert soon(lambda: not census() - self.least), f"left: {dict(census() - self.least)}"

    @rule(net=nets, replicas=replica_counts, samples=sample_counts, wrap=wraps)
    def step(self, net: int, replicas: int, samples: int, wrap: Any) -> None:
        """A forward and a backward."""
        model = self.nets[net]
        run = wrap(model, replicas)
        assert_next_step_is_exact(run, model, twin_of(model), batch(samples=samples))

    @rule(
        net=nets,
        replicas=replica_counts,
        samples=sample_counts,
        wrap=wraps,
        place=st.sampled_from(PLACES),
        replica=st.integers(0, MOST - 1),
    )
    def strike(
        self, net: int, replicas: int, samples: int, wrap: Any, place: str, replica: int
    ) -> None:
        """The same with an error somewhere, if that replica runs."""
        model, fault = self.nets[net], Fault(place, replica % replicas, KeyError(place))
        for layer in model.modules():
            if hasattr(layer, "fault"):
                layer.fault = fault
        run, twin, step = wrap(model, replicas), twin_of(model), batch(samples=samples)
        error = outcome_of(lambda: assert_next_step_is_exact(run, model, twin, step)).error
        assert error is (fault.error if fault.has_struck else None)
        fault.active = False
        del error, fault.error

    @rule(
        samples=sample_counts,
        calls=st.lists(st.sampled_from((1, 1, 1, 2, 0)), min_size=1, max_size=MOST),
    )
    def diverge(self, samples: int, calls: list[int]) -> None:
        """Replicas call a layer so many times each; that is an error unless all agree."""
        net = nn.Sequential(nn.Linear(3, 3), Repeat(SynchronizedBatchNorm1d(3), calls)).double()
        x, _ = batch(samples=samples)
        outcome = outcome_of(lambda: DataParallel(net, ["cpu"] * len(calls))(x))
        running = len(x.chunk(len(calls)))
        if running > 1 and len({*calls[:running]}) > 1:
            assert isinstance(outcome.error, ReplicasDiverged), outcome
        else:
            values([outcome])

    @rule(net=nets, callers=st.integers(2, 4), samples=sample_counts)
    def threads(self, net: int, callers: int, samples: int) -> None:
        """Several threads share one model; each gets its own numbers."""
        model = self.nets[net]
        shared, twin = ours(model), twin_of(model)
        batches = [batch(samples=samples) for _ in range(callers)]

        def numbers(run: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            x = x.clone().requires_grad_()
            y = run(x)
            return y.detach(), *torch.autograd.grad(y, x, dy)

        found = values(together(*(lambda b=b: numbers(shared, *b) for b in batches)))
        expected = [numbers(twin, *one) for one in batches]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    @rule(net=nets, replicas=replica_counts, samples=sample_counts)
    def drop(self, net: int, replicas: int, samples: int) -> None:
        """A graph is dropped without a backward."""
        x, _ = batch(samples=samples)
        ours(self.nets[net], replicas)(x.requires_grad_())


TestSoak = Soak.TestCase
TestSoak.settings = examples(0.08, stateful_step_count=15)
