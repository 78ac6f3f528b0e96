"""The rendezvous itself. Which programs of replicas end in values: `tests/test_divergence.py`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replication import ReplicaFailed, ReplicasDiverged
from replication.sync import rendezvous as module
from replication.sync.rendezvous import Exchange, Place, Rendezvous, Wait
from tests.kit.deadlines import DEADLINE, soon
from tests.kit.properties import examples
from tests.kit.threads import Outcome, outcome_of, together, values


class Waiting:
    """A wait of a replica, in a new thread."""

    def __init__(
        self, rendezvous: Rendezvous, replica: int, *missing: int, place: Place = ("layer", 1)
    ) -> None:
        self.rendezvous, self.is_over, self.outcome = rendezvous, False, Outcome()
        self.wait = Wait(replica, place, missing, lambda: self.is_over)
        self.thread = threading.Thread(target=self._block)
        begin = len(rendezvous.waits)
        self.thread.start()
        assert soon(lambda: len(rendezvous.waits) > begin or not self.thread.is_alive())

    def _block(self) -> None:
        with self.rendezvous.lock:
            self.outcome = outcome_of(lambda: self.rendezvous.wait(self.wait))

    def end(self) -> None:
        with self.rendezvous.lock:
            self.is_over = True
            self.rendezvous.condition.notify_all()

    @property
    def error(self) -> BaseException | None:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        return self.outcome.error


def stall_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_TIMEOUT", 0.05)
    monkeypatch.setattr(module, "LOOK_AGAIN", 0.01)


def begun(size: int) -> Rendezvous:
    rendezvous = Rendezvous(size)
    for replica in range(size):
        rendezvous.begin(replica)
    return rendezvous


# -- a wait that can no longer be met ----------------------------------------------------------


def test_message_says_where_every_replica_is():
    """Clause 3c: the error says where every replica is.

    Of six replicas one skips the layer before the last ones have begun.
    """
    rendezvous = Rendezvous(6)
    rendezvous.expect_only(range(5))
    for replica in (0, 2, 3):
        rendezvous.begin(replica)
    waits = [Waiting(rendezvous, 0, 2, place=("layer3.bn2", 2)), Waiting(rendezvous, 1, 2)]
    rendezvous.end(2)
    expected = """the replicas have diverged. Every replica must make the same calls in the same \
order: look for branches that depend on data, and for layers in eval() in one replica only.
  replica 0: waits at `layer3.bn2`, call 2
  replica 1: waits at `layer`, call 1
  replica 2: has ended
  replica 3: runs
  replica 4: has not begun
  replica 5: does not run"""
    waits.append(Waiting(rendezvous, 3, 0))
    for wait in waits:
        assert type(wait.error) is ReplicasDiverged
        assert str(wait.error) == expected


def test_a_wait_that_is_over_is_none_although_its_thread_sleeps():
    rendezvous = begun(2)
    wait = Waiting(rendezvous, 0, 1)
    wait.is_over = True
    rendezvous.end(1)
    assert rendezvous.aborted is None
    wait.end()
    assert wait.error is None


def test_a_wait_ends_even_if_its_notification_is_lost(monkeypatch):
    """As by a Ctrl-C between the lines of `threading.Condition.notify_all`."""
    monkeypatch.setattr(module, "LOOK_AGAIN", 0.01)
    rendezvous, exchange = begun(2), Exchange("layer", [0, 1])
    exchange.merge = lambda sent: [sum(sent)] * 2
    rendezvous.wake = lambda: None
    calls = [lambda i=i: exchange(rendezvous, i, i) for i in (0, 1)]
    assert values(together(*calls)) == [1, 1]


def test_a_message_of_an_aborted_wait_is_left_to_a_thread_that_merges_it():
    rendezvous, exchange, got = begun(2), Exchange("layer", [0, 1]), []

    def merge(messages: list[str]) -> list[str]:
        rendezvous.abort("the caller has ended the forward.")
        assert soon(lambda: not rendezvous.waits)  # the other replica has raised
        got.extend(messages)
        return messages

    def first() -> Any:
        return exchange(rendezvous, 0, "from 0")

    def second() -> Any:
        assert soon(lambda: rendezvous.waits)
        return exchange(rendezvous, 1, "from 1")

    exchange.merge = merge
    waiting, merging = together(first, second)
    assert type(waiting.error) is ReplicaFailed
    assert (merging.value, got) == ("from 1", ["from 0", "from 1"])


# -- what is unknown ---------------------------------------------------------------------------


def test_a_replica_that_does_not_begin_is_given_up(monkeypatch):
    stall_soon(monkeypatch)
    for missing in ((1, 2), ()):  # an exchange, and a wait that any replica can end
        rendezvous = Rendezvous(3)
        rendezvous.begin(0)
        rendezvous.begin(1)
        waits = [Waiting(rendezvous, 1, 2), Waiting(rendezvous, 0, *missing)]
        assert all("replica 2 did not begin within 0.05 s" in str(w.error) for w in waits)


# -- any order of events -----------------------------------------------------------------------

SIZE = 3


@dataclass
class Modelled:
    """What an open wait is about."""

    replica: int
    #: Empty if any replica can end it.
    missing: set[int]
    is_over: bool = False


class Events(RuleBasedStateMachine):
    """Replicas begin, wait, get their values, end and fail in any order.

    The rule is compared with all futures of the moment. In them each replica that does not wait
    can send what others wait for, and goes on after its wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rendezvous = Rendezvous(SIZE)
        self.new, self.running, self.gone = set(range(SIZE)), set(), set()
        self.waits: list[tuple[Wait, Modelled]] = []
        self.failure: Exception | None = None
        self.is_settled = False
        #: Whether the last event was a look after `STALL_TIMEOUT`.
        self.is_late = False

    @initialize(absent=st.sets(st.integers(0, SIZE - 1), max_size=1))
    def expect(self, absent: set[int]) -> None:
        self.rendezvous.expect_only(self.new - absent)
        self.new -= absent
        self.gone |= absent

    def open(self) -> list[Modelled]:
        return [modelled for _, modelled in self.waits if not modelled.is_over]

    def is_blocked(self, replica: int) -> bool:
        return any(wait.replica == replica for wait in self.open())

    @rule()
    def look(self) -> None:
        """What each waiting thread does when it is woken."""
        for _ in self.open():
            self.rendezvous.check()

    @precondition(lambda self: self.new and self.rendezvous.aborted is None)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.new)))
        self.rendezvous.begin(replica)
        self.new.remove(replica)
        self.running.add(replica)

    @precondition(lambda self: self.running and self.rendezvous.aborted is None)
    @rule(data=st.data(), missing=st.sets(st.integers(0, SIZE - 1)))
    def wait(self, data: st.DataObject, missing: set[int]) -> None:
        replica = data.draw(st.sampled_from(sorted(self.running)))
        if self.is_blocked(replica):
            return  # a replica is in one wait at a time
        modelled = Modelled(replica, missing - {replica})
        needed: Any = modelled.missing or ()
        wait = Wait(replica, ("layer", 1), needed, lambda: modelled.is_over)
        self.rendezvous.waits.append(wait)
        self.waits.append((wait, modelled))
        self.rendezvous.check()

    @precondition(lambda self: self.open() and self.rendezvous.aborted is None)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        """A replica that can sends what one wait misses."""
        wait = data.draw(st.sampled_from(range(len(self.open()))))
        modelled = self.open()[wait]
        senders = [r for r in sorted(self.running - {modelled.replica}) if not self.is_blocked(r)]
        if needed := modelled.missing:
            senders = [replica for replica in senders if replica in needed]
        if senders:
            needed.discard(data.draw(st.sampled_from(senders)))
            modelled.is_over = not needed
            self.look()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        able = [r for r in sorted(self.running) if not self.is_blocked(r)]
        if not able:
            return
        replica = data.draw(st.sampled_from(able))
        if fails:
            error = KeyError(replica)
            self.failure = self.failure or error
            self.rendezvous.fail(replica, error)
        self.running.remove(replica)
        self.gone.add(replica)
        self.rendezvous.end(replica)

    @precondition(lambda self: self.open() and self.rendezvous.aborted is None)
    @rule()
    def wait_too_long(self) -> None:
        self.is_late = True
        self.rendezvous.check(is_late=True)

    def hopeless(self) -> list[Modelled]:
        """The waits that end in no future."""
        able = self.running if self.is_late else self.running | self.new
        left, ended = self.open(), True
        while ended:
            blocked = {wait.replica for wait in left}
            free = able - blocked
            ended = [w for w in left if (w.missing <= free if w.missing else free - {w.replica})]
            left = [w for w in left if w not in ended]
        return left

    @invariant()
    def agrees_with_all_futures(self) -> None:
        aborted, gone = self.rendezvous.aborted, set(self.gone)
        if self.failure is not None:
            assert aborted is not None and self.rendezvous._failure is self.failure
        elif aborted is not None and not self.is_settled:
            self.is_settled = True
            assert aborted.kind is ReplicasDiverged and self.hopeless()
        elif aborted is None:
            able = set(self.running)
            gone, able = (gone | self.new, able) if self.is_late else (gone, able | self.new)
            assert not any(w.missing & gone for w in self.open())
            assert not self.open() or any(not self.is_blocked(r) for r in able)
        self.is_late = False


def test_waits_are_given_up_if_and_only_if_no_future_ends_them():
    """Clause 3b: as soon as it is certain, and no sooner."""
    run_state_machine_as_test(Events, settings=examples(2))
