"""The rendezvous itself. Most tests need no thread: a wait can be begun without blocking on it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

import replication.sync.rendezvous
from replication import ReplicaFailed, ReplicasDiverged, ReplicationError
from replication.errors import listed
from replication.sync.rendezvous import (
    CurrentReplica,
    Rendezvous,
    Wait,
    current_replica,
    set_current_replica,
)
from tests.layers import DEADLINE, outcome_of, soon, together, values


def begin_wait(
    rendezvous: Rendezvous, replica: int, *needs: int, path: str = "layer", call: int = 1
) -> Wait:
    with rendezvous.lock:
        return rendezvous.begin_wait(replica, needs, path, {replica: call})


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
    assert wait.error is not None, "the wait has not ended"
    with pytest.raises(ReplicasDiverged) as caught:
        wait.block()
    return str(caught.value)


# -- a wait ends in a value --------------------------------------------------------------------


def test_wait_whose_value_has_come_returns():
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    end_wait(rendezvous, wait)
    wait.block()
    assert wait.error is None


def test_value_wakes_the_thread_that_waits():
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    values(together(wait.block, lambda: end_wait(rendezvous, wait)))
    assert wait.error is None


def test_value_that_comes_after_a_failure_does_not_undo_it():
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.fail(1, KeyError("k"))
    end_wait(rendezvous, wait)
    with pytest.raises(ReplicaFailed):
        wait.block()


# -- a replica fails ---------------------------------------------------------------------------


def test_failure_wakes_every_wait():
    rendezvous = entered(4)
    waits = [begin_wait(rendezvous, replica, 0) for replica in (1, 2)]
    rendezvous.fail(3, KeyError("k"))
    outcomes = together(*(wait.block for wait in waits))
    assert [type(outcome.error) for outcome in outcomes] == [ReplicaFailed] * 2


def test_each_waiting_replica_gets_a_new_error_with_the_failure_as_its_cause():
    rendezvous = entered(3)
    waits = [begin_wait(rendezvous, replica, 0) for replica in (1, 2)]
    failure = KeyError("k")
    rendezvous.fail(0, failure)
    first, second = (outcome_of(wait.block).error for wait in waits)
    assert first is not second
    assert first.__cause__ is second.__cause__ is failure


def test_error_of_a_waiting_replica_says_who_failed_and_where_it_waited():
    rendezvous = entered(3)
    wait = begin_wait(rendezvous, 1, 0, path="net.bn", call=4)
    rendezvous.fail(2, ValueError("bad"))
    with pytest.raises(
        ReplicaFailed,
        match=r"^replica 2 of 3 failed with ValueError: bad\. "
        r"Replica 1 waited at `net\.bn`, call 4\.$",
    ):
        wait.block()


def test_failure_without_a_message_is_named_by_its_type():
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.fail(1, KeyboardInterrupt())
    with pytest.raises(ReplicaFailed, match=r"^replica 1 of 2 failed with KeyboardInterrupt\. "):
        wait.block()


def test_no_wait_begins_after_a_failure():
    rendezvous = entered(3)
    rendezvous.fail(2, KeyError("k"))
    with pytest.raises(ReplicaFailed):
        begin_wait(rendezvous, 0, 1)


def test_first_failure_is_the_one_that_is_kept():
    rendezvous = entered(2)
    first = KeyError("first")
    rendezvous.fail(1, first)
    rendezvous.fail(0, ValueError("second"))
    assert rendezvous.close("over")[0].error is first


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
    assert rendezvous.close("over")[0].error is first


def test_follow_up_is_not_kept_as_the_first_failure():
    rendezvous = entered(2)
    rendezvous.fail(0, ReplicaFailed("follow-up"))
    first = KeyError("k")
    rendezvous.fail(1, first)
    assert rendezvous.close("over")[0].error is first


# -- a wait that can no longer be met ----------------------------------------------------------


def test_wait_for_a_replica_that_has_ended_is_given_up_when_it_begins():
    rendezvous = entered(2)
    rendezvous.leave(1)
    diverged(begin_wait(rendezvous, 0, 1))


def test_wait_is_given_up_when_the_replica_that_it_needs_ends():
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    assert wait.error is None
    rendezvous.leave(1)
    diverged(wait)


def test_wait_is_not_given_up_when_a_replica_that_it_does_not_need_ends():
    rendezvous = entered(3)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.leave(2)
    assert wait.error is None


def test_one_wait_that_cannot_be_met_ends_all_others():
    rendezvous = entered(4)
    bystander = begin_wait(rendezvous, 3, 0)
    begin_wait(rendezvous, 1, 2)
    rendezvous.leave(2)
    diverged(bystander)


def test_waits_are_given_up_when_all_replicas_wait():
    rendezvous = entered(2)
    first = begin_wait(rendezvous, 0, 1, path="a")
    assert first.error is None
    second = begin_wait(rendezvous, 1, 0, path="b")
    assert diverged(first) == diverged(second)


def test_wait_for_any_replica_ends_when_no_other_replica_runs():
    rendezvous = entered(3)
    wait = begin_wait(rendezvous, 0)
    rendezvous.leave(1)
    assert wait.error is None
    rendezvous.leave(2)
    diverged(wait)


def test_replica_that_has_not_begun_is_waited_for():
    rendezvous = Rendezvous(2)
    rendezvous.enter(0)
    wait = begin_wait(rendezvous, 0, 1)
    assert wait.error is None
    end_wait(rendezvous, wait)


def test_wait_for_a_replica_that_will_not_run_is_given_up():
    rendezvous = Rendezvous(3)
    rendezvous.enter(0)
    wait = begin_wait(rendezvous, 0, 2)
    rendezvous.expect_only({0, 1})
    assert "replica 2 does not run" in diverged(wait)


def test_replica_that_runs_after_all_is_waited_for():
    rendezvous = Rendezvous(2)
    rendezvous.expect_only({0})
    for replica in (0, 1):
        rendezvous.enter(replica)
        rendezvous.leave(replica)
    rendezvous.enter(0)  # its second micro-batch
    assert begin_wait(rendezvous, 0, 1).error is None


def test_nested_call_of_a_replica_does_not_end_it():
    rendezvous = entered(2)
    assert not rendezvous.enter(1)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.leave(1)
    assert wait.error is None
    rendezvous.leave(1)
    diverged(wait)


def test_nested_call_is_no_further_micro_batch():
    rendezvous = entered(2)
    rendezvous.enter(0)
    rendezvous.leave(1)
    diverged(begin_wait(rendezvous, 0, 1))


def test_enter_tells_the_outermost_call():
    rendezvous = Rendezvous(1)
    assert rendezvous.enter(0)
    assert not rendezvous.enter(0)
    rendezvous.leave(0)
    rendezvous.leave(0)
    assert rendezvous.enter(0)


def test_replica_that_is_one_micro_batch_behind_is_waited_for():
    rendezvous = entered(2)
    rendezvous.leave(0)
    rendezvous.leave(1)
    rendezvous.enter(0)  # its second micro-batch; replica 1 is between its first and its second
    wait = begin_wait(rendezvous, 0, 1)
    assert wait.error is None
    rendezvous.enter(1)
    rendezvous.leave(1)
    diverged(wait)


def test_replica_that_has_ended_the_same_micro_batch_is_not_waited_for():
    rendezvous = entered(2)
    rendezvous.leave(1)
    diverged(begin_wait(rendezvous, 0, 1))


def test_message_says_who_is_where():
    rendezvous = Rendezvous(5)
    for replica in (0, 1, 2, 3):
        rendezvous.enter(replica)
    calls = {0: 2, 1: 2, 2: 1}
    with rendezvous.lock:
        wait = rendezvous.begin_wait(0, {2, 3, 4}, "layer3.bn2", calls)
        rendezvous.begin_wait(1, (0,), "layer3.bn2", calls)
    rendezvous.leave(2)
    assert diverged(wait).startswith(
        "the replicas have diverged: `layer3.bn2`, call 2: replicas 0, 1 wait; "
        "replica 2 ended after call 1. "
    )


def test_message_names_no_replica_that_may_still_come():
    """Of four replicas one skips the layer before the last one has begun."""
    rendezvous = Rendezvous(4)
    for replica in (0, 1, 2):
        rendezvous.enter(replica)
    wait = begin_wait(rendezvous, 0, 1, 2, 3)
    rendezvous.leave(1)
    expected = (
        "the replicas have diverged: `layer`, call 1: replica 0 waits; replica 1 ended without "
        "that call. Every replica must make the same calls"
    )
    message = diverged(wait)
    assert message.startswith(expected)
    rendezvous.enter(3)
    with pytest.raises(ReplicasDiverged) as caught:
        begin_wait(rendezvous, 3, 0)
    assert str(caught.value) == message


def test_message_says_who_has_not_called_the_layer_at_all():
    rendezvous = entered(2)
    rendezvous.leave(1)
    message = diverged(begin_wait(rendezvous, 0, 1))
    assert "`layer`, call 1: replica 0 waits; replica 1 ended without that call." in message


def test_message_names_each_layer_that_replicas_wait_at():
    rendezvous = entered(3)
    rendezvous.leave(2)
    wait = begin_wait(rendezvous, 0, 1, path="a", call=3)
    begin_wait(rendezvous, 1, 0, path="b", call=1)
    assert diverged(wait).startswith(
        "the replicas have diverged: `a`, call 3: replica 0 waits; `b`, call 1: replica 1 waits; "
        "replica 2 has ended. "
    )


def test_message_says_who_waits_outside_the_forward():
    rendezvous = entered(2)
    rendezvous.leave(0)
    rendezvous.leave(1)
    message = diverged(begin_wait(rendezvous, 0, 1))
    assert "replica 0 called it outside the forward (in a recomputation, " in message


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [([0], "replica 0"), ([0, 2], "replicas 0, 2"), (range(3), "replicas 0, 1, 2")],
    ids=["one", "two", "range"],
)
def test_listed(replicas, expected):
    assert listed(replicas) == expected


# -- pipes used by hand ------------------------------------------------------------------------


def test_without_a_size_no_participant_counts_as_ended():
    rendezvous = Rendezvous(None)
    first, second = begin_wait(rendezvous, 0, 1), begin_wait(rendezvous, 1, 0)
    assert first.error is None
    assert second.error is None


def test_without_a_size_a_failure_wakes_all_the_same():
    rendezvous = Rendezvous(None)
    wait = begin_wait(rendezvous, 1, 0)
    rendezvous.fail(0, KeyError("k"))
    with pytest.raises(ReplicaFailed, match=r"^replica 0 failed with KeyError"):
        wait.block()


# -- closing -----------------------------------------------------------------------------------


def test_close_wakes_every_wait_and_forbids_later_ones():
    rendezvous = entered(3)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.close("it is over.")
    with pytest.raises(ReplicationError, match=r"^it is over\.$"):
        wait.block()
    with pytest.raises(
        ReplicationError, match=r"^it is over\. Replica 1 reached `layer`, call 1 after that\.$"
    ):
        begin_wait(rendezvous, 1, 0)


class InterruptedGate:
    """The gate of a wait whose first release is interrupted, right before it or right after it."""

    def __init__(self, wait: Wait, is_released: bool) -> None:
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
    monkeypatch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.01)
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

    monkeypatch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.01)
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "_abort_waits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rendezvous.close("it is over.")
    (outcome,) = together(wait.block)
    assert str(outcome.error) == "it is over."


def test_close_may_be_called_again():
    rendezvous = entered(2)
    failure = KeyError("k")
    rendezvous.fail(0, failure)
    assert rendezvous.close("over") == [(0, failure)]
    assert rendezvous.close("over") == []


def test_close_forgets_the_failure():
    class Failure(Exception):
        pass

    rendezvous = entered(2)
    failure = Failure()
    gone = weakref.ref(failure)
    rendezvous.fail(0, failure)
    rendezvous.close("over")
    gc.disable()
    try:
        del failure
        assert gone() is None
    finally:
        gc.enable()


# -- writing -----------------------------------------------------------------------------------


def test_a_closed_forward_writes_nothing():
    rendezvous, written = entered(2), []
    rendezvous.commit(lambda: written.append("before"))
    rendezvous.close("over")
    with pytest.raises(ReplicationError, match="ended by its caller"):
        rendezvous.commit(lambda: written.append("after"))
    assert written == ["before"]


def test_close_waits_for_a_write_in_progress(monkeypatch):
    monkeypatch.setattr(replication.sync.rendezvous, "LONGEST_WRITE", DEADLINE)
    rendezvous, written = entered(2), []
    writing, closing = threading.Event(), threading.Event()

    def write() -> None:
        writing.set()
        assert closing.wait(DEADLINE)
        assert soon(lambda: rendezvous._closed is not None)
        time.sleep(0.05)  # for a close that does not wait
        written.append("whole")

    def close() -> list[str]:
        assert writing.wait(DEADLINE)
        closing.set()
        rendezvous.close("over")
        return written[:]

    _, seen = values(together(lambda: rendezvous.commit(write), close))
    assert seen == ["whole"]


def test_close_does_not_wait_for_a_write_that_takes_long(monkeypatch):
    monkeypatch.setattr(replication.sync.rendezvous, "LONGEST_WRITE", 0.01, raising=False)
    rendezvous, writing, closed = entered(2), threading.Event(), threading.Event()

    def write() -> None:
        writing.set()
        assert soon(closed.is_set), "the caller waits for the write"

    def close() -> None:
        assert writing.wait(DEADLINE)
        rendezvous.close("over")
        monkeypatch.setattr(replication.sync.rendezvous, "LONGEST_WRITE", DEADLINE, raising=False)
        rendezvous.close("over")  # two functions of a forward close it, one inside the other
        closed.set()

    values(together(lambda: rendezvous.commit(write), close))


# -- replicas that do not begin ----------------------------------------------------------------


def test_wait_gives_up_on_replicas_that_do_not_begin(monkeypatch):
    monkeypatch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.01)
    rendezvous = Rendezvous(3)
    rendezvous.enter(0)
    with pytest.raises(
        ReplicasDiverged,
        match=r"^`layer`, call 1: replica 0 waits, and replicas 1, 2 did not begin within "
        r"0\.01 s\. .* must run at the same time, each in a thread",
    ):
        begin_wait(rendezvous, 0, 1, 2).block()


def test_wait_goes_on_when_only_a_replica_that_it_does_not_need_has_not_begun():
    rendezvous = Rendezvous(3)
    rendezvous.enter(0)
    rendezvous.enter(1)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.expect_progress(wait)
    assert wait.error is None


def test_wait_goes_on_when_the_other_replica_is_busy_with_an_earlier_micro_batch():
    rendezvous = entered(2)
    rendezvous.leave(0)
    rendezvous.enter(0)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.expect_progress(wait)
    assert wait.error is None


def test_wait_goes_on_when_all_replicas_have_begun(monkeypatch):
    monkeypatch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.01)
    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    asked = threading.Event()
    expect_progress = rendezvous.expect_progress

    def expect_and_tell(wait: Wait) -> None:
        expect_progress(wait)
        asked.set()

    monkeypatch.setattr(rendezvous, "expect_progress", expect_and_tell)

    def send() -> None:
        assert asked.wait(DEADLINE)
        end_wait(rendezvous, wait)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    wait.block()
    sender.join(DEADLINE)


def test_wait_of_a_pipe_used_by_hand_goes_on(monkeypatch):
    monkeypatch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.01)
    rendezvous = Rendezvous(None)
    wait = begin_wait(rendezvous, 0, 1)
    rendezvous.expect_progress(wait)
    assert wait.error is None


def test_interrupted_wait_is_forgotten(monkeypatch):
    class Interrupted:
        def acquire(self, timeout: float = -1) -> bool:
            raise KeyboardInterrupt

    rendezvous = entered(2)
    wait = begin_wait(rendezvous, 0, 1)
    monkeypatch.setattr(wait, "gate", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        wait.block()
    # Replica 0 does not wait any more, so that not all replicas do.
    assert begin_wait(rendezvous, 1, 0).error is None


# -- where a thread stands ---------------------------------------------------------------------


def test_standing_at_is_undone_at_the_end_of_the_block():
    outer, inner = (CurrentReplica(Rendezvous(1), 0, -1, path) for path in ("outer", "inner"))
    with set_current_replica(outer):
        with pytest.raises(KeyError), set_current_replica(inner):
            assert current_replica() is inner
            raise KeyError
        assert current_replica() is outer
    assert current_replica() is None


def test_standing_at_concerns_one_thread():
    with set_current_replica(CurrentReplica(Rendezvous(1), 0, -1)):
        assert values(together(current_replica)) == [None]
