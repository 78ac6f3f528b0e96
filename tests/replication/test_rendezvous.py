"""The rendezvous itself. Which programs of replicas end in values: `tests/test_divergence.py`."""

from __future__ import annotations

import threading

import pytest

from replication import ReplicasDiverged
from replication.sync import rendezvous as module
from replication.sync.lifecycle import CurrentReplica
from replication.sync.rendezvous import Place, Rendezvous, Wait
from tests.layers import DEADLINE, Outcome, outcome_of, soon, together, values


class Waiting:
    """A wait of a replica in a thread of its own, which may be the replica's."""

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
            self.wait.thread = self.thread.ident or 0
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

    rendezvous, first = begun(2), Slow()
    values(together(lambda: rendezvous.fail(1, first), fail_second))
    assert rendezvous.take_failure() is first


# -- a wait that can no longer be met ----------------------------------------------------------


def test_message_says_where_every_replica_is():
    """Guarantee 3: the error says where each replica is.

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
  replica 1: waits at `layer`, call 1, outside the forward (in a recomputation, by another \
method, or through a part of the replica)
  replica 2: has ended
  replica 3: runs
  replica 4: has not begun
  replica 5: does not run"""
    waits.append(Waiting(rendezvous, 3, 0))
    for wait in waits:
        assert type(wait.error) is ReplicasDiverged
        assert str(wait.error) == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_replicas_that_all_wait_have_diverged(size):
    rendezvous = Rendezvous(size)
    waits = []
    for replica in range(size):
        assert rendezvous.aborted is None
        rendezvous.begin(replica)
        wait = Waiting(rendezvous, replica)
        waits.append(wait)
        with rendezvous.lock:
            rendezvous._threads[replica] = wait.wait.thread
            rendezvous.check()
    assert all(type(wait.error) is ReplicasDiverged for wait in waits)


def test_a_wait_that_is_over_is_none_although_its_thread_sleeps():
    rendezvous = begun(2)
    wait = Waiting(rendezvous, 0, 1)
    wait.is_over = True
    rendezvous.end(1)
    assert rendezvous.aborted is None
    wait.end()
    assert wait.error is None


def test_nobody_is_given_up_while_a_thread_merges():
    """Perhaps another thread of a replica that waits elsewhere."""
    rendezvous = begun(2)
    waits = [Waiting(rendezvous, 0), Waiting(rendezvous, 1, 0)]
    with rendezvous.lock:
        rendezvous.merging = 1
        rendezvous._threads = [wait.wait.thread for wait in waits]
        rendezvous.check()
    assert rendezvous.aborted is None
    for wait in waits:
        wait.end()
        assert wait.error is None


# -- what is unknown ---------------------------------------------------------------------------


def test_a_replica_that_does_not_begin_is_given_up(monkeypatch):
    stall_soon(monkeypatch)
    rendezvous = Rendezvous(3)
    rendezvous.begin(0)
    rendezvous.begin(1)
    assert "replica 2 did not begin within 0.05 s" in str(Waiting(rendezvous, 0, 1, 2).error)


def test_other_threads_of_replicas_that_all_wait_are_given_up_later(monkeypatch):
    rendezvous = begun(2)
    waits = [Waiting(rendezvous, 0, 1), Waiting(rendezvous, 1, 0)]
    assert rendezvous.aborted is None  # this thread is the replicas' own, and may yet send
    stall_soon(monkeypatch)
    waits.append(Waiting(rendezvous, 0, 1, place=("other", 1)))
    assert all(type(wait.error) is ReplicasDiverged for wait in waits)


def test_wait_goes_on_when_all_replicas_have_begun(monkeypatch):
    stall_soon(monkeypatch)
    late, check = threading.Event(), Rendezvous.check

    def check_and_tell(self: Rendezvous, *, is_late: bool = False) -> None:
        check(self, is_late=is_late)
        if is_late:
            late.set()

    monkeypatch.setattr(Rendezvous, "check", check_and_tell)
    wait = Waiting(begun(2), 0, 1)
    assert late.wait(DEADLINE)
    wait.end()
    assert wait.error is None


# -- the replica of a thread -------------------------------------------------------------------


def test_a_replica_is_one_of_several_with_others_or_inside_one_of_them():
    inner, outer = Rendezvous(1), Rendezvous(2)
    assert not CurrentReplica(inner, 0, -1).is_one_of_several
    assert CurrentReplica(outer, 0, -1).is_one_of_several
    inner.outer = outer
    assert CurrentReplica(inner, 0, -1).is_one_of_several
