"""`SyncMaster`, `SlavePipe` and `FutureResult`, by hand and in forwards."""

from __future__ import annotations

import copy
import gc
import random
import re
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from replication import (
    DataParallel,
    FutureResult,
    ReplicaFailed,
    ReplicasDiverged,
    ReplicationError,
    SyncMaster,
    execute_replication_callbacks,
    replicate,
)
from replication.sync.exchange import Exchange
from replication.sync.rendezvous import Abort, Rendezvous, Wait
from tests.deadlines import ends
from tests.layers import (
    DEADLINE,
    Centering,
    Numbered,
    WithMaster,
    copied_each_way,
    freed,
    join_all,
    no_garbage_collection,
    outcome_of,
    pickled,
    soon,
    together,
    values,
)
from tests.replication.test_rendezvous import InterruptedGate


def echo(messages: Any) -> Any:
    """Everyone gets all messages."""
    return [(identifier, list(messages)) for identifier, _ in messages]


def square(messages: Any) -> Any:
    return [(identifier, message**2) for identifier, message in messages]


def exchange(master: SyncMaster, message: Any, *slaves: tuple[Any, Any]) -> list[Any]:
    """Lets the master and all slaves call once. Returns the replies, the master's first."""
    return values(
        together(
            lambda: master.run_master(message),
            *(lambda pipe=pipe, msg=msg: pipe.run_slave(msg) for pipe, msg in slaves),
        )
    )


# -- messages and replies ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_the_masters_and_then_in_the_order_of_registration(seed):
    master = SyncMaster(echo)
    identifiers = [1, "two", None, ("four", 5), 6]
    calls = [partial(master.register_slave(i).run_slave, i) for i in identifiers]
    # Threads begin, and on most days arrive, in this order.
    random.Random(seed).shuffle(calls)
    threads = [threading.Thread(target=call) for call in calls]
    arrived: list[Any] = []
    threads.append(threading.Thread(target=lambda: arrived.extend(master.run_master(0))))
    join_all(threads)
    assert arrived == [(i, i) for i in [0, *identifiers]]


def test_replies_go_back_by_identifier_in_any_order():
    master = SyncMaster(lambda messages: reversed(square(messages)))
    pipes = [master.register_slave(i) for i in (1, 2, 3)]
    assert exchange(master, 2, *zip(pipes, (3, 4, 5), strict=True)) == [4, 9, 16, 25]


def started(call: Any, into: list[Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append(outcome_of(call)), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("master_waits", [False, True])
def test_a_slave_that_is_interrupted_takes_its_message_back(master_waits):
    """The master waits for it again, and does not go on without."""
    master, answers, interrupted = SyncMaster(echo), [], []
    pipes = [master.register_slave(i) for i in (1, 2)]
    waits, running = master._outside_forward._waits, []
    if master_waits:
        running.append(started(partial(master.run_master, "m"), answers))
        assert soon(lambda: len(waits) == 1)
    first = started(partial(pipes[0].run_slave, "withdrawn"), interrupted)
    assert soon(lambda: len(waits) == 1 + master_waits)
    interrupt(next(wait for wait in waits if wait.replica == 1))
    assert ends(first)
    assert str(interrupted[0].error).startswith("interrupted")
    if not master_waits:
        running.append(started(partial(master.run_master, "m"), answers))
    running.append(started(partial(pipes[1].run_slave, "b"), answers))
    assert soon(lambda: len(waits) == 2)
    running.append(started(partial(pipes[0].run_slave, "a"), answers))
    assert all(map(ends, running))
    assert values(answers) == [[(0, "m"), (1, "a"), (2, "b")]] * 3


def test_a_slave_that_was_interrupted_after_its_message_was_collected_gets_no_old_reply():
    collected, goes_on = threading.Event(), threading.Event()

    def reply(messages: Any) -> Any:
        collected.set()
        assert goes_on.wait(DEADLINE)
        return echo(messages)

    master, answers, late = SyncMaster(reply), [], []
    pipe = master.register_slave(1)
    waits = master._outside_forward._waits
    running = [started(partial(master.run_master, "m1"), answers)]
    first = started(partial(pipe.run_slave, "first"), [])
    assert collected.wait(DEADLINE) and soon(lambda: [wait.replica for wait in waits] == [1])
    interrupt(waits[0])
    assert ends(first)
    running.append(started(partial(pipe.run_slave, "second"), late))
    assert soon(lambda: bool(waits))
    goes_on.set()
    assert ends(running[0])
    assert waits  # the second call has not been answered
    running.append(started(partial(master.run_master, "m2"), answers))
    assert all(map(ends, running))
    assert values(late) == [[(0, "m2"), (1, "second")]]


def interrupt(wait: Wait) -> None:
    """Ends a wait as if a signal had come."""
    with wait.rendezvous.lock:
        wait.abort = Abort(ReplicationError, "interrupted", None)
        wait.rendezvous.end_waits([wait])


def test_a_master_that_is_interrupted_with_all_messages_leaves_no_slave_waiting(monkeypatch):
    """It has been woken by the last message, which cannot be taken back any more."""
    master, outcomes = SyncMaster(echo), []
    pipe = master.register_slave(1)
    waits, block = master._outside_forward._waits, Wait.block

    def interrupted(wait: Wait) -> None:
        block(wait)
        if wait.replica == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Wait, "block", interrupted)
    first = started(lambda: master.run_master("m"), outcomes)
    assert soon(lambda: bool(waits))
    for thread in (started(lambda: pipe.run_slave("s"), outcomes), first):
        assert ends(thread)
    assert {type(outcome.error) for outcome in outcomes} == {KeyboardInterrupt, ReplicaFailed}


def test_a_master_may_reply_before_the_wait_of_its_last_slave_begins(monkeypatch):
    """The message of that slave wakes it, and it needs no lock to reply."""
    master, outcomes, replied = SyncMaster(echo), [], threading.Event()
    pipe, waits = master.register_slave(1), master._outside_forward._waits
    reply, begin_wait = Exchange._reply, Rendezvous.begin_wait

    def reply_at_once(*arguments: Any) -> None:
        reply(*arguments)
        replied.set()

    def begin_late(rendezvous: Rendezvous, replica: int, *arguments: Any) -> Wait:
        assert replica == 0 or replied.wait(DEADLINE)
        return begin_wait(rendezvous, replica, *arguments)

    monkeypatch.setattr(Exchange, "_reply", reply_at_once)
    monkeypatch.setattr(Rendezvous, "begin_wait", begin_late)
    first = started(lambda: master.run_master("m"), outcomes)
    assert soon(lambda: bool(waits))
    for thread in (started(lambda: pipe.run_slave("s"), outcomes), first):
        assert ends(thread)
    assert values(outcomes) == [[(0, "m"), (1, "s")]] * 2


def test_a_pipe_does_not_keep_the_reply():
    master = SyncMaster(lambda messages: [(identifier, Numbered()) for identifier, _ in messages])
    pipe = master.register_slave(1)
    reply = weakref.ref(exchange(master, None, (pipe, None))[1])
    assert freed(reply)


def test_slaves_that_register_in_another_order_are_sorted_by_replica():
    got: list[Any] = []

    class RegistersInForward(Numbered):
        """Copy 2 first, then copy 1."""

        def __init__(self) -> None:
            super().__init__()
            self.turn = {2: threading.Event(), 1: threading.Event(), 0: threading.Event()}
            self.master = SyncMaster(echo)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.copy_id != 2:
                assert self.turn[self.copy_id].wait(DEADLINE)
            if self.copy_id == 0:
                got.extend(self.master.run_master("0"))
            else:
                pipe = self.master.register_slave(self.copy_id)
                self.turn[self.copy_id - 1].set()
                pipe.run_slave(str(self.copy_id))
            return x

    DataParallel(RegistersInForward(), ["cpu"] * 3)(torch.zeros(3))
    assert got == [(0, "0"), (1, "1"), (2, "2")]


def test_copy_0_cannot_register_a_slave_of_the_same_master():
    class Registers(Numbered):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            SyncMaster(echo).register_slave("mine")

    with pytest.raises(ReplicationError, match="identifier must be new"):
        DataParallel(Registers(), ["cpu"] * 2)(torch.zeros(2))


def test_a_replica_cannot_have_two_slaves_of_one_master():
    class Greedy(nn.Module):
        def __data_parallel_replicate__(self, ctx, copy_id):
            if copy_id == 0:
                ctx.master = SyncMaster(lambda messages: messages)
            else:
                ctx.master.register_slave(copy_id)
                ctx.master.register_slave(copy_id + 10)

    with pytest.raises(
        ReplicationError, match=r"neither the master nor another slave \(got 11 in replica 1"
    ):
        execute_replication_callbacks([Greedy(), Greedy()])


def test_a_callback_that_failed_by_hand_keeps_nothing():
    def fails(messages: Any) -> Any:
        raise ValueError("no reply")

    master, message = SyncMaster(fails), Numbered()
    pipe = master.register_slave(1)
    outcomes = together(partial(master.run_master, message), partial(pipe.run_slave, message))
    assert [type(outcome.error) for outcome in outcomes] == [ValueError, ReplicaFailed]
    gone = weakref.ref(message)
    del outcomes, message
    gc.collect()  # the errors' frames refer to `outcomes`
    assert gone() is None


def test_callback_runs_in_the_masters_thread():
    master = SyncMaster(lambda messages: [(i, threading.get_ident()) for i, _ in messages])
    pipe = master.register_slave(1)
    outcomes = together(
        lambda: (master.run_master(0), threading.get_ident()), lambda: pipe.run_slave(0)
    )
    (seen, own), reply = values(outcomes)
    assert seen == own == reply


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [[(0, 1)], [(0, 1), (1, 1), (9, 1)], [], [(1, 1), (2, 1)], None, 5, [5], [(0, 1, 2)], "ab"],
    ids=str,
)
def test_callback_must_reply_to_every_message(answer):
    master = SyncMaster(lambda messages: answer)
    pipe = master.register_slave(1)
    first, second = together(lambda: master.run_master("a"), lambda: pipe.run_slave("b"))
    assert isinstance(first.error, ReplicationError)
    assert re.search(
        r"must return one \(identifier, reply\) .*expected \[0, 1\]", str(first.error)
    )
    assert isinstance(second.error, ReplicaFailed)


@pytest.mark.parametrize("error", [ValueError, SystemExit], ids=["Exception", "BaseException"])
def test_error_in_the_callback_reaches_the_master_and_wakes_the_slaves(error):
    """Guarantee 8: pipes of the older toolkit, with guarantees 3 and 5."""
    raised = error("in the callback")

    def fail(messages: Any) -> Any:
        raise raised

    master = SyncMaster(fail)
    pipes = [master.register_slave(i) for i in (1, 2)]
    outcomes = together(
        lambda: master.run_master(0), *(lambda pipe=pipe: pipe.run_slave(0) for pipe in pipes)
    )
    assert outcomes[0].error is raised
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, ReplicaFailed)
        assert outcome.error.__cause__ is raised


@pytest.mark.parametrize("identifier", [0, 1], ids=["the master's", "another slave's"])
def test_identifier_must_be_free(identifier):
    master = SyncMaster(echo)
    master.register_slave(1)
    with pytest.raises(ReplicationError, match=rf"must be new .*\(got {identifier} in"):
        master.register_slave(identifier)


def test_master_whose_forward_has_ended_says_so():
    layer = Centering()
    DataParallel(layer, ["cpu"] * 2)(torch.zeros(2, 1))
    with pytest.raises(ReplicationError, match="run_master must be called in the same forward"):
        layer._sync_master.run_master(0)


def test_an_interrupt_while_the_master_replies_leaves_no_slave_waiting():
    master, outcomes = SyncMaster(echo), []
    pipes = [master.register_slave(i) for i in (1, 2)]
    waits = master._outside_forward._waits
    slaves = [started(partial(pipe.run_slave, "s"), outcomes) for pipe in pipes]
    assert soon(lambda: len(waits) == 2)
    InterruptedGate(waits[0])
    with pytest.raises(KeyboardInterrupt):
        master.run_master("m")
    for slave in slaves:
        assert ends(slave)
    assert [type(outcome.error) for outcome in outcomes] == [ReplicaFailed] * 2


def test_error_names_the_number_of_the_call():
    master = SyncMaster(echo)
    pipe = master.register_slave(1)
    exchange(master, "a", (pipe, "b"))
    master._outside_forward.fail(1, KeyError("elsewhere"))
    for replica, run in enumerate((master.run_master, pipe.run_slave)):
        with pytest.raises(ReplicaFailed, match=rf"{replica} was at `SyncMaster`, call 2"):
            run("c")


# -- one instance, many sets of slaves ---------------------------------------------------------


def test_reset_drops_slaves_of_a_program_that_was_interrupted_before_run_master():
    master, interrupted = SyncMaster(echo), []
    master.reset()  # nothing to drop
    old = master.register_slave(1)
    slave = started(lambda: old.run_slave("b"), interrupted)
    assert soon(lambda: bool(master._outside_forward._waits))
    master.reset()
    assert ends(slave)
    assert str(interrupted[0].error).startswith("reset, or a new set of slaves")
    assert exchange(master, "c", (master.register_slave(1), "d")) == [[(0, "c"), (1, "d")]] * 2


def test_pipe_of_an_older_set_raises():
    master = SyncMaster(echo)
    old = master.register_slave(1)
    exchange(master, "a", (old, "b"))
    master.register_slave(1)
    with pytest.raises(ReplicationError, match="a new set of slaves"):
        old.run_slave("late")


def test_set_that_follows_a_failed_one_is_clean():
    replies = [lambda messages: [], echo]
    master = SyncMaster(lambda messages: replies.pop(0)(messages))
    pipe = master.register_slave(1)
    together(lambda: master.run_master("a"), lambda: pipe.run_slave("b"))
    assert exchange(master, "c", (master.register_slave(1), "d")) == [[(0, "c"), (1, "d")]] * 2


def test_nr_slaves_counts_the_current_set():
    master = SyncMaster(echo)
    assert master.nr_slaves == 0
    pipes = [master.register_slave(i) for i in (1, 2)]
    assert master.nr_slaves == 2
    exchange(master, "a", *((pipe, "b") for pipe in pipes))
    master.register_slave(1)
    assert master.nr_slaves == 1


class CountsSlaves(WithMaster):
    """Returns how many slaves the master has, as the copy that is asked sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.master.nr_slaves])


def test_nr_slaves_in_a_forward_counts_its_replicas():
    model = DataParallel(CountsSlaves(echo), ["cpu"] * 4)
    assert [model(torch.zeros(n, 1)).tolist() for n in (4, 2, 1, 4)] == [
        [3] * 4,
        [1] * 2,
        [0],
        [3] * 4,
    ]
    assert model.module.master.nr_slaves == 0


def test_two_forwards_at_once_share_an_instance_and_no_message():
    model = DataParallel(Centering(), ["cpu"] * 3)
    xs = torch.randn(2, 30, 6, 2)
    barrier = threading.Barrier(2, timeout=DEADLINE)

    def run(batches: torch.Tensor) -> list[torch.Tensor]:
        barrier.wait()
        return [model(x) for x in batches]

    outputs = values(together(lambda: run(xs[0]), lambda: run(xs[1])))
    for batches, centered in zip(xs, outputs, strict=True):
        torch.testing.assert_close(torch.stack(centered), batches - batches.mean(1, keepdim=True))


def test_two_layers_do_not_mix_their_messages():
    model = DataParallel(nn.Sequential(Centering(), nn.Softmax(1), Centering()), ["cpu"] * 3)
    x = torch.randn(9, 4)
    middle = (x - x.mean(0)).softmax(1)
    torch.testing.assert_close(model(x), middle - middle.mean(0))


def test_forward_leaves_nothing_in_the_instance():
    layer = Centering()
    before = dict(vars(layer._sync_master))
    rendezvous = []

    class Spy(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rendezvous.append(weakref.ref(layer._sync_master._channel()[0]))
            return x

    with no_garbage_collection():
        DataParallel(nn.Sequential(Spy(), layer), ["cpu"] * 2)(torch.ones(4, 1))
        assert len(rendezvous) == 2
        assert freed(*rendezvous)
    assert vars(layer._sync_master) == {**before, "_serves_forward": True}


# -- copies ------------------------------------------------------------------------------------


@copied_each_way
def test_copy_of_a_master_has_its_callback_and_no_slaves(copied):
    master = SyncMaster(square)
    master.note = ["of a derived class"]
    master.register_slave(1)
    twin = copied(master)
    assert twin.note == master.note
    assert twin.nr_slaves == 0
    assert twin.run_master(3) == 9
    assert exchange(twin, 2, (twin.register_slave(1), 3)) == [4, 9]
    assert master.nr_slaves == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_replica_with_a_pipe_can_be_copied(copied):
    replicas = replicate(Centering(), ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    twin = copied(replicas[1])
    with pytest.raises(ReplicationError, match="the pipe of slave 1 is a copy"):
        twin(torch.randn(6, 2))


# -- FutureResult ------------------------------------------------------------------------------


def test_future_refuses_a_second_result_before_the_first_is_fetched():
    future = FutureResult()
    future.put(None)
    with pytest.raises(ReplicationError, match="put was called before the previous result was"):
        future.put(None)
    assert future.get() is None


def test_get_waits_for_the_result():
    there, back = FutureResult(), FutureResult()
    numbers = range(100)

    def ask() -> list[int]:
        return [(there.put(number), back.get())[1] for number in numbers]

    def answer() -> None:
        for _ in numbers:
            back.put(there.get() ** 2)

    assert values(together(ask, answer))[0] == [number**2 for number in numbers]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copy_of_a_future_is_empty(copied):
    future = FutureResult()
    future.put("original")
    twin = copied(future)
    twin.put("twin")
    assert (future.get(), twin.get()) == ("original", "twin")


class Hands(Numbered):
    """Copy 1 gets what copy 0 puts, if it does."""

    def __init__(self, puts: bool, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.puts = puts
        self.error = error

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        if copy_id == 0:
            ctx.future = FutureResult()
        self.future = ctx.future

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.copy_id == 1:
            return x + self.future.get()
        if self.error is not None:
            raise self.error
        if self.puts:
            self.future.put(1)
        return x


def test_future_serves_two_replicas():
    assert DataParallel(Hands(puts=True), ["cpu"] * 2)(torch.zeros(2)).tolist() == [0, 1]


def test_get_in_a_replica_fails_when_no_replica_can_put():
    """Guarantee 8: waits for a `FutureResult` end."""
    with pytest.raises(ReplicasDiverged, match=r"replica 1: waits at `FutureResult`, call 1"):
        DataParallel(Hands(puts=False), ["cpu"] * 2)(torch.zeros(2))


def test_get_in_a_replica_is_given_up_when_the_other_fails():
    with pytest.raises(KeyError):
        DataParallel(Hands(puts=True, error=KeyError), ["cpu"] * 2)(torch.zeros(2))


def test_each_result_goes_to_one_of_two_getters():
    future, got = FutureResult(), []
    getters = [started(future.get, got) for _ in range(2)]
    assert soon(lambda: len(future._waits) == 2)
    rendezvous = [weakref.ref(wait.rendezvous) for wait in future._waits]
    future.put("first")
    assert soon(lambda: bool(got) and len(future._waits) == 1)
    future.put("second")
    assert all(map(ends, getters))
    assert sorted(values(got)) == ["first", "second"]
    assert all(map(freed, rendezvous))  # the getters have left nothing behind


def test_put_between_the_two_looks_of_get_is_not_missed(monkeypatch):
    """The result comes right after the getter found none, before its wait can be seen."""
    future, begin_wait = FutureResult(), Rendezvous.begin_wait

    def put_first(*arguments: Any) -> Any:
        wait = begin_wait(*arguments)
        future.put("between")
        return wait

    monkeypatch.setattr(Rendezvous, "begin_wait", put_first)
    assert values(together(future.get)) == ["between"]


def test_get_that_was_interrupted_leaves_the_result_for_the_next():
    future = FutureResult()
    outcomes: list[Any] = []
    getter = started(future.get, outcomes)
    assert soon(lambda: bool(future._waits))
    interrupt(future._waits[0])
    assert ends(getter)
    assert str(outcomes[0].error).startswith("interrupted")
    future.put("kept")
    assert future.get() == "kept"
