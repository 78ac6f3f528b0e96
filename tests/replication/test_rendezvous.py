"""The rendezvous itself. Most tests need no thread: a wait can be begun without blocking on it."""

from __future__ import annotations

import math
import threading
import time
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replication import ReplicaFailed, ReplicasDiverged, ReplicasTimedOut, ReplicationError
from replication.sync import rendezvous as module
from replication.sync import writes
from replication.sync.current import CurrentReplica
from replication.sync.rendezvous import Failure, Rendezvous, Wait
from tests.layers import (
    DEADLINE,
    LayerError,
    no_garbage_collection,
    outcome_of,
    soon,
    together,
    values,
)
from tests.properties import examples


def begin_wait(
    rendezvous: Rendezvous, replica: int, *needs: int, path: str = "layer", call: int = 1
) -> Wait:
    with rendezvous.lock:
        return rendezvous.begin_wait(replica, needs, path, call)


def end_wait(rendezvous: Rendezvous, wait: Wait) -> None:
    with rendezvous.lock:
        rendezvous.end_waits([wait])


def entered(size: int) -> Rendezvous:
    """A rendezvous whose replicas have all begun."""
    rendezvous = Rendezvous(size)
    for replica in range(size):
        rendezvous.enter(replica)
    return rendezvous


def diverged(wait: Wait) -> str:
    """The message of the `ReplicasDiverged` that a wait ends in."""
    assert wait.abort is not None, "the wait has not ended"
    with pytest.raises(ReplicasDiverged) as caught:
        wait.block()
    return str(caught.value)


# -- any story ---------------------------------------------------------------------------------


class Pending(NamedTuple):
    """A wait that has not ended: of a replica, for others, in its main thread or in another."""

    wait: Wait
    replica: int
    needs: frozenset[int]
    is_main: bool


class Interrupted:
    """A gate at which a thread is interrupted while it waits."""

    def acquire(self, timeout: float = -1) -> bool:
        raise KeyboardInterrupt

    def locked(self) -> bool:
        return False


WAITING = {
    "which": st.integers(0, 3),
    "needs": st.sets(st.integers(0, 3)),
    "is_hopeful": st.integers(0, 9),
}


class Story(RuleBasedStateMachine):
    """Guarantee 3: a wait ends when it can no longer be met, and not before.

    Replicas begin, wait, send, end and fail in any order, and one thread plays all of them.

    A wait is pending if and only if each replica that it needs may still come, and one that is
    not blocked can change anything. The model keeps what is needed to tell that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.now = 0, 0.0
        self.patch = pytest.MonkeyPatch()
        threads = SimpleNamespace(**{**vars(threading), "get_ident": lambda: self.thread})
        self.patch.setattr(module, "threading", threads)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        self.patch.setattr(module, "time", clock)
        self.patch.setattr(writes, "time", clock)
        self.pending: list[Pending] = []
        self.failures: list[tuple[int, BaseException]] = []
        #: The kind and the cause of the errors of all waits from now on.
        self.end: tuple[type[BaseException], BaseException | None] | None = None
        self.is_closed = False
        self.steps = 0

    def teardown(self) -> None:
        self.patch.undo()

    def sleep(self, seconds: float) -> None:
        assert seconds < 0.01, "a write that ends soon delays the caller"
        self.now += seconds

    @initialize(
        size=st.sampled_from((3, 4, 2, 1)),
        absent=st.sets(st.integers(0, 3), max_size=1),
        runs=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        late=st.sets(st.integers(0, 3), max_size=2),
        limit=st.sampled_from((math.inf, 1.0, 21.0)),
    )
    def begin(
        self, size: int, absent: set[int], runs: list[int], late: set[int], limit: float
    ) -> None:
        """After some runs: else few stories have waits of replicas in different ones."""
        self.size, self.rendezvous = size, Rendezvous(size)
        self.depth, self.runs, self.is_absent = [0] * size, [0] * size, [False] * size
        self.expect_only(set(range(4)) - absent)
        for replica in range(size):
            for _ in range(runs[replica]):
                self.replica_enters(replica)
                self.replica_leaves(replica)
            if replica not in late:
                self.replica_enters(replica)
        self.rendezvous.limit_time(limit)
        self.deadline = limit

    # -- the model

    def may_come(self, replica: int, run: int) -> bool:
        has_not_begun = self.runs[replica] < run and not self.is_absent[replica]
        return self.depth[replica] > 0 or has_not_begun

    def waits(self, replica: int, is_main: bool) -> bool:
        return any(p.replica == replica and p.is_main >= is_main for p in self.pending)

    def can_go_on(self, blocked: set[int]) -> bool:
        latest = max(self.runs[p.replica] for p in self.pending)
        return any(r not in blocked and self.may_come(r, latest) for r in range(self.size))

    def is_hopeless(self) -> bool:
        blocked = {p.replica for p in self.pending if p.is_main}
        needed = [(replica, self.runs[p.replica]) for p in self.pending for replica in p.needs]
        return not self.can_go_on(blocked) or not all(self.may_come(*of) for of in needed)

    def ends(self, kind: type[BaseException], cause: BaseException | None = None) -> None:
        self.end = self.end or (kind, cause)

    # -- what may happen

    def which_can_enter(self) -> list[int]:
        return [
            replica
            for replica, depth in enumerate(self.depth)
            if depth < 2 and not self.waits(replica, is_main=depth > 0)
        ]

    def which_can_leave(self) -> list[int]:
        return [r for r, depth in enumerate(self.depth) if depth and not self.waits(r, True)]

    @precondition(lambda self: self.which_can_enter())
    @rule(which=st.integers(0, 3))
    def enter(self, which: int) -> None:
        which_can = self.which_can_enter()
        self.replica_enters(which_can[which % len(which_can)])

    def replica_enters(self, replica: int) -> None:
        self.thread = replica
        self.depth[replica] += 1
        is_outermost = self.depth[replica] == 1
        assert self.rendezvous.enter(replica) is is_outermost
        if is_outermost:
            self.runs[replica] += 1
            self.is_absent[replica] = False

    @precondition(lambda self: self.which_can_leave())
    @rule(which=st.integers(0, 3), is_hopeful=st.integers(0, 4))
    def leave(self, which: int, is_hopeful: int) -> None:
        """Mostly a replica that no wait needs: else few stories get far before they end."""
        which_can = self.which_can_leave()
        needed = {replica for pending in self.pending for replica in pending.needs}
        if is_hopeful:
            which_can = [r for r in which_can if r not in needed or self.depth[r] > 1] or which_can
        self.replica_leaves(which_can[which % len(which_can)])

    def replica_leaves(self, replica: int) -> None:
        self.depth[replica] -= 1
        self.rendezvous.leave(replica)

    @precondition(lambda self: self.steps > 10)
    @rule(replicas=st.sets(st.integers(0, 3), min_size=1))
    def expect_only(self, replicas: set[int]) -> None:
        self.is_absent = [replica not in replicas for replica in range(self.size)]
        self.rendezvous.expect_only(replicas)

    @precondition(lambda self: any(self.runs))
    @rule(**WAITING)
    def main_thread_waits(self, which: int, needs: set[int], is_hopeful: int) -> None:
        self.begin_wait(which, needs, is_hopeful, is_main=True)

    @precondition(lambda self: any(self.runs))
    @rule(**WAITING)
    def other_thread_waits(self, which: int, needs: set[int], is_hopeful: int) -> None:
        self.begin_wait(which, needs, is_hopeful, is_main=False)

    def begin_wait(self, which: int, needs: set[int], is_hopeful: int, is_main: bool) -> None:
        """Most are for replicas that may come, with one that runs: else stories end soon."""
        have_begun = [replica for replica, runs in enumerate(self.runs) if runs]
        replica = have_begun[which % len(have_begun)]
        is_main = is_main and not self.waits(replica, is_main=True)
        blocked = {replica, *(p.replica for p in self.pending if p.is_main)}
        if is_hopeful and not any(depth for r, depth in enumerate(self.depth) if r not in blocked):
            is_main = False
        needed = frozenset(needs & set(range(self.size)) - {replica})
        if is_hopeful:
            needed = frozenset(r for r in needed if self.may_come(r, self.runs[replica]))
        self.thread = replica if is_main else -1 - replica
        if self.end is None:
            wait = begin_wait(self.rendezvous, replica, *needed)
            self.pending.append(Pending(wait, replica, needed, is_main))
            return
        kind, cause = self.end
        error = outcome_of(begin_wait(self.rendezvous, replica, *needed).block).error
        assert type(error) is kind
        assert error.__cause__ is (None if self.is_closed else cause)
        says_where = str(error).endswith(f" Replica {replica} was at `layer`, call 1.")
        assert says_where is (kind in (ReplicaFailed, ReplicationError))

    @precondition(lambda self: any(self.depth[p.replica] for p in self.pending))
    @rule(which=st.integers(0, 3), is_interrupted=st.booleans())
    def wait_ends(self, which: int, is_interrupted: bool) -> None:
        """A message arrives or the thread is interrupted. The replica runs on."""
        pending = [p for p in self.pending if self.depth[p.replica]]
        ended = pending[which % len(pending)]
        self.pending.remove(ended)
        if not is_interrupted:
            end_wait(self.rendezvous, ended.wait)
            ended.wait.block()
            return
        ended.wait.gate = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            ended.wait.block()

    @precondition(lambda self: self.pending and self.steps > 15)
    @rule(which=st.integers(0, 3), seconds=st.sampled_from((0.0, 1.0, 20.0)))
    def wait_takes_long(self, which: int, seconds: float) -> None:
        pending = self.pending[which % len(self.pending)]
        self.now += seconds
        if self.now >= self.deadline:
            self.rendezvous.time_out()
        self.rendezvous.fail_if_stalled(pending.wait)
        if self.now >= self.deadline:
            self.ends(ReplicasTimedOut)
        run = self.runs[pending.replica]
        are_late = any(not self.depth[r] and self.may_come(r, run) for r in pending.needs)
        if are_late or not self.can_go_on({p.replica for p in self.pending}):
            self.ends(ReplicasDiverged)

    @precondition(lambda self: self.steps > 20)
    @rule(replica=st.integers(0, 3), kind=st.sampled_from((KeyError, ReplicaFailed)))
    def fail(self, replica: int, kind: type[Exception]) -> None:
        error = kind("k")
        for _ in range(2):  # an inner call and an outer one report it
            self.rendezvous.fail(replica % self.size, error)
        if not self.is_closed:
            self.ends(ReplicaFailed, error)
            self.failures += [(replica % self.size, error)] if kind is KeyError else []

    @precondition(lambda self: self.steps > 25)
    @rule()
    def time_out(self) -> None:
        error = self.rendezvous.time_out()
        self.ends(ReplicasTimedOut)
        assert type(error) is self.end[0]

    @precondition(lambda self: self.steps > 20)
    @rule(is_writing=st.booleans())
    def close(self, is_writing: bool) -> None:
        """Perhaps while a write is under way, for which only the first close waits a while."""

        def close_twice() -> list[Failure]:
            self.rendezvous.close("it is over.")
            self.rendezvous.close("again")
            return self.rendezvous.take_failures() + self.rendezvous.take_failures()

        begun, is_writing = self.now, is_writing and not self.is_closed
        failures = self.rendezvous.commit(close_twice) if is_writing else close_twice()
        assert failures == self.failures
        assert self.now - begun == pytest.approx(1.0 if is_writing else 0.0, abs=0.01)
        self.ends(ReplicationError)
        self.failures, self.is_closed = [], True

    # -- what holds

    @invariant()
    def waits_are_pending_if_and_only_if_they_may_end(self) -> None:
        self.steps += 1
        if self.pending and self.end is None and self.is_hopeless():
            self.ends(ReplicasDiverged)
        if self.end is None:
            assert all(p.wait.gate.locked() and p.wait.abort is None for p in self.pending)
            assert self.rendezvous._waits == [p.wait for p in self.pending]
            return
        assert not any(p.wait.gate.locked() for p in self.pending)
        errors = [outcome_of(p.wait.block).error for p in self.pending]
        assert [(type(error), error.__cause__) for error in errors] == [self.end] * len(errors)
        assert len(set(map(id, errors))) == len(errors)
        assert not self.rendezvous._waits
        self.pending.clear()

    @invariant()
    def replicas_that_have_ended_are_known(self) -> None:
        for replica in range(self.size):
            has_left = self.runs[replica] > 0 and not self.depth[replica]
            assert self.rendezvous.has_left(replica) is has_left

    @invariant()
    def a_forward_writes_until_it_is_closed(self) -> None:
        outcome = outcome_of(lambda: self.rendezvous.commit(lambda: "written"))
        if self.is_closed:
            assert "the caller has ended" in str(outcome.error)
        else:
            assert outcome.value == "written"


TestStory = Story.TestCase
TestStory.settings = examples(2, stateful_step_count=30)


# -- how waits fail ----------------------------------------------------------------------------


def test_failure_whose_text_takes_long_is_the_first_all_the_same():
    is_read, second_failed = threading.Event(), threading.Event()

    class Slow(Exception):
        def __str__(self) -> str:
            is_read.set()
            assert soon(second_failed.is_set)
            return "slow"

    def fail_second() -> None:
        assert is_read.wait(DEADLINE)
        rendezvous.fail(0, KeyError("second"))
        second_failed.set()

    rendezvous, first = entered(2), Slow()
    values(together(lambda: rendezvous.fail(1, first), fail_second))
    assert rendezvous.take_failures()[0].error is first


def test_a_wait_that_ends_while_another_thread_fails_it_keeps_no_error():
    rendezvous, error = entered(2), LayerError()
    gone, wait = weakref.ref(error), begin_wait(rendezvous, 0, 1)
    rendezvous.fail(1, error)
    assert isinstance(outcome_of(wait.block).error, ReplicaFailed)
    rendezvous._waits.append(wait)  # as in the list that the other thread has copied before
    rendezvous.fail(1, error)
    rendezvous.take_failures()
    with no_garbage_collection():
        del error
        assert gone() is None


# -- a wait that can no longer be met ----------------------------------------------------------


def test_message_says_where_every_replica_is():
    """Guarantee 3: the error says where each replica is.

    Of six replicas one skips the layer before the last ones have begun.
    """
    rendezvous = Rendezvous(6)
    rendezvous.expect_only(range(5))
    for replica in range(4):
        rendezvous.enter(replica)
    waits = [begin_wait(rendezvous, 0, 2, path="layer3.bn2", call=2)]
    rendezvous.leave(1)
    waits.append(begin_wait(rendezvous, 1, 2))
    rendezvous.leave(2)
    assert rendezvous.abort is not None
    expected = """the replicas have diverged. Every replica must make the same calls in the same \
order: look for branches that depend on data, and for layers in eval() in one replica only.
  replica 0: waits at `layer3.bn2`, call 2
  replica 1: waits at `layer`, call 1, outside the forward (in a recomputation, by another \
method, or through a part of the replica)
  replica 2: has ended
  replica 3: runs
  replica 4: has not begun
  replica 5: does not run"""
    assert [diverged(wait) for wait in waits] == [expected] * 2
    assert diverged(begin_wait(rendezvous, 3, 0)) == expected


def test_without_a_size_only_a_failure_ends_waits():
    rendezvous = Rendezvous(None)
    waits = [begin_wait(rendezvous, replica, 1 - replica) for replica in range(2)]
    rendezvous.fail_if_stalled(waits[0])
    assert [wait.abort for wait in waits] == [None, None]
    rendezvous.fail(0, KeyError("k"))
    for wait in waits:
        with pytest.raises(ReplicaFailed, match=r"^replica 0 failed with KeyError"):
            wait.block()


# -- closing -----------------------------------------------------------------------------------


class InterruptedGate:
    """The gate of a wait whose first release is interrupted, right before it or right after it."""

    def __init__(self, wait: Wait, is_released: bool = False) -> None:
        self.gate, self.is_released, self.is_first = wait.gate, is_released, True
        self.acquire, self.locked = self.gate.acquire, self.gate.locked
        wait.gate = self

    def release(self) -> None:
        is_first, self.is_first = self.is_first, False
        if self.is_released or not is_first:
            self.gate.release()
        if is_first:
            raise KeyboardInterrupt


released_or_not = pytest.mark.parametrize("is_released", [False, True])


@released_or_not
def test_waits_that_an_interrupt_leaves_unreleased_end_with_the_forward(is_released):
    rendezvous = entered(4)
    waits = [begin_wait(rendezvous, replica, 0) for replica in (1, 2)]
    InterruptedGate(waits[0], is_released)
    with pytest.raises(KeyboardInterrupt):
        rendezvous.fail(3, KeyError("k"))
    rendezvous.close("over")
    outcomes = together(*(wait.block for wait in waits))
    assert [type(outcome.error) for outcome in outcomes] == [ReplicaFailed] * 2


@released_or_not
def test_wait_whose_end_is_interrupted_ends_with_the_forward(is_released):
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    InterruptedGate(wait, is_released)
    with pytest.raises(KeyboardInterrupt):
        end_wait(rendezvous, wait)
    rendezvous.close("over")
    (outcome,) = together(wait.block)
    assert type(outcome.error) is ReplicationError
    assert not rendezvous._waits


@pytest.mark.parametrize("size", [2, None])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_polled_wait_ends_when_the_failure_of_all_waits_was_interrupted(
    monkeypatch, size, is_late
):
    """Past the deadline as well, where waits once polled for ever, without a pause."""
    monkeypatch.setattr(module, "_POLL", 0.01)
    rendezvous = entered(2) if size else Rendezvous(None)
    wait = begin_wait(rendezvous, 0, 1)
    InterruptedGate(wait, is_released=False)
    with pytest.raises(KeyboardInterrupt):
        rendezvous.fail(1, KeyError("k"))
    if is_late:
        rendezvous.limit_time(0.0)
    (outcome,) = together(wait.block)
    assert type(outcome.error) is ReplicaFailed


def test_a_polled_wait_ends_when_the_close_of_its_forward_was_interrupted(monkeypatch):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_POLL", 0.01)
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "end_waits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rendezvous.close("it is over.")
    (outcome,) = together(wait.block)
    assert str(outcome.error) == "it is over. Replica 0 was at `layer`, call 1."


# -- writing -----------------------------------------------------------------------------------


def test_close_waits_for_a_write_in_progress(monkeypatch):
    monkeypatch.setattr(writes, "LONGEST_WRITE", DEADLINE)
    rendezvous, written = entered(2), []
    writing, closing = threading.Event(), threading.Event()

    def write() -> None:
        writing.set()
        assert closing.wait(DEADLINE)
        assert soon(lambda: rendezvous._writes.are_closed)
        time.sleep(0.05)  # for a close that does not wait
        written.append("whole")

    def close() -> list[str]:
        assert writing.wait(DEADLINE)
        closing.set()
        rendezvous.close("over")
        return written[:]

    _, seen = values(together(lambda: rendezvous.commit(write), close))
    assert seen == ["whole"]


def test_close_waits_for_a_write_however_often_it_is_interrupted(monkeypatch):
    rendezvous, may_end, left = entered(2), threading.Event(), [KeyboardInterrupt()] * 9

    def interrupted(seconds: float) -> None:
        if not left:
            may_end.set()
            time.sleep(seconds)
            return
        raise left.pop()

    def close() -> list[str]:
        assert soon(lambda: bool(rendezvous._writes._entries))
        with pytest.raises(KeyboardInterrupt):
            rendezvous.close("over")
        return written[:]

    def write() -> None:
        assert may_end.wait(DEADLINE)
        written.append("whole")

    written: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=interrupted)
    monkeypatch.setattr(writes, "time", clock)
    _, seen = values(together(lambda: rendezvous.commit(write), close))
    assert seen == ["whole"]


def test_caller_needs_no_lock_to_end_a_forward_or_to_write():
    """A finalizer that runs under the lock, for as long as it likes, may train another model."""
    rendezvous, inner = entered(2), Rendezvous(1)
    inner.outer = rendezvous
    wait, ended = begin_wait(rendezvous, 0, 1), threading.Event()

    def hold() -> None:
        with rendezvous.lock:
            assert ended.wait(DEADLINE)

    def end() -> None:
        assert soon(lambda: not rendezvous.lock.acquire(blocking=False))
        try:
            inner.commit(lambda: None)
            rendezvous.fail(1, KeyError("k"))
            rendezvous.time_out()
            rendezvous.close("over")
            with pytest.raises(ReplicaFailed):
                wait.block()
        finally:
            ended.set()

    values(together(hold, end))


def test_a_write_does_not_wait_for_another():
    """Foreign code that interrupts a write, such as a finalizer, may train another model."""
    rendezvous, inner = entered(1), Rendezvous(1)
    inner.outer = rendezvous

    def write() -> list[str]:
        return values(together(lambda: inner.commit(lambda: "inner")))

    assert rendezvous.commit(write) == ["inner"]
    rendezvous.close("over")
    with pytest.raises(ReplicationError, match="the caller has ended the forward"):
        inner.commit(write)


# -- replicas that do not begin ----------------------------------------------------------------


def test_wait_ends_at_the_deadline():
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.limit_time(0.01)
    rendezvous.locate = lambda replica, thread: f"at line {replica}"
    with pytest.raises(
        ReplicasTimedOut,
        match=r"^the replicas must end within 0\.01 s, the timeout, which has passed:\n"
        r"  replica 0: waits at `layer`, call 1\n  replica 1: runs at line 1$",
    ):
        wait.block()
    assert time.monotonic() < rendezvous.deadline + module.STALL_TIMEOUT / 2


def test_wait_goes_on_when_all_replicas_have_begun(monkeypatch):
    monkeypatch.setattr(module, "STALL_TIMEOUT", 0.01)
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    asked = threading.Event()
    fail_if_stalled = rendezvous.fail_if_stalled

    def expect_and_tell(wait: Wait) -> None:
        fail_if_stalled(wait)
        asked.set()

    monkeypatch.setattr(rendezvous, "fail_if_stalled", expect_and_tell)

    def send() -> None:
        assert asked.wait(DEADLINE)
        end_wait(rendezvous, wait)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    wait.block()
    sender.join(DEADLINE)


# -- the replica of a thread -------------------------------------------------------------------


def test_a_replica_is_one_of_several_with_others_or_inside_one_of_them():
    inner, outer = Rendezvous(1), Rendezvous(2)
    assert not CurrentReplica(inner, 0, -1).is_one_of_several
    assert CurrentReplica(outer, 0, -1).is_one_of_several
    inner.outer = outer
    assert CurrentReplica(inner, 0, -1).is_one_of_several
