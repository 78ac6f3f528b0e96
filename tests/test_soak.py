"""Whatever happens in whatever order: no hang, exact steps, nothing left (T1.9, T10.2).

The long version is ``python -m tests.soak --steps 10000``.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.soak import MOST, PLACES, Soak

nets = st.integers(0, 1)
replicas = st.integers(1, MOST)
samples = st.integers(2, 2 * MOST)
flags = st.booleans()


class Anything(RuleBasedStateMachine):
    """Finds a short program for what goes wrong."""

    soak: Soak

    def __init__(self) -> None:
        super().__init__()
        self.soak = SOAKS[0]

    @rule(net=nets, replicas=replicas, samples=samples, ours=flags)
    def step(self, net, replicas, samples, ours):
        self.soak.step(net, replicas, samples, ours)

    @rule(
        net=nets,
        replicas=replicas,
        samples=samples,
        ours=flags,
        place=st.sampled_from(PLACES),
        replica=st.integers(0, MOST - 1),
    )
    def strike(self, net, replicas, samples, ours, place, replica):
        self.soak.strike(net, replicas, samples, ours, place, replica)

    @rule(
        replicas=replicas,
        samples=samples,
        calls=st.lists(st.integers(0, 2), min_size=MOST, max_size=MOST),
    )
    def diverge(self, replicas, samples, calls):
        self.soak.diverge(replicas, samples, calls)

    @rule(net=nets, callers=st.integers(2, 3), samples=samples)
    def threads(self, net, callers, samples):
        self.soak.threads(net, callers, samples)

    @rule(net=nets, replicas=replicas, samples=samples)
    def drop(self, net, replicas, samples):
        self.soak.drop(net, replicas, samples)

    def teardown(self):
        self.soak.assert_nothing_is_left()


SOAKS: list[Soak] = []


@pytest.fixture(scope="module", autouse=True)
def soak():
    SOAKS.append(Soak(models=2))
    yield SOAKS[0]
    SOAKS.clear()


class TestAnything(Anything.TestCase):
    settings = settings(max_examples=6, stateful_step_count=12, deadline=None)


def test_a_hundred_steps_among_faults_and_delays_leave_nothing(soak):
    for _ in range(100):
        soak.at_random()
    soak.assert_nothing_is_left()
    assert min(soak.counts.values()) > 0
