"""`SyncMaster`, `SlavePipe` and `FutureResult`."""

from __future__ import annotations

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
    parallel_apply,
    replicate,
)
from replication.sync.lifecycle import this_thread
from tests.kit.deadlines import DEADLINE
from tests.kit.layers import Centering, Numbered, WithMaster
from tests.kit.memory import freed, no_garbage_collection
from tests.kit.threads import outcome_of, together, values


def echo(messages: Any) -> Any:
    """Everyone gets all messages."""
    return [(identifier, list(messages)) for identifier, _ in messages]


def square(messages: Any) -> Any:
    return [(identifier, message**2) for identifier, message in messages]


class Sends(nn.Module):
    """Sends a message by the pipes of an older toolkit. Returns the outcome."""

    def __init__(self, callback: Any, identifiers: Any) -> None:
        super().__init__()
        self.callback, self.identifiers = callback, identifiers

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.master = SyncMaster(self.callback)
            self.send = ctx.master.run_master
        else:
            self.send = ctx.master.register_slave(self.identifiers[copy_id - 1]).run_slave

    def forward(self, message: Any) -> Any:
        return outcome_of(partial(self.send, message))


def exchange(callback: Any, *messages: Any, identifiers: Any = (1, 2, 3)) -> list[Any]:
    """Lets the master and all slaves call once. Returns the outcomes, the master's first."""
    replicas = replicate(Sends(callback, identifiers), ["cpu"] * len(messages))
    execute_replication_callbacks(replicas)
    return parallel_apply(replicas, [(message,) for message in messages])


# -- messages and replies ----------------------------------------------------------------------


def test_messages_are_the_masters_and_then_in_the_order_of_registration():
    identifiers = ["two", None, ("four", 5), 6]
    replies = values(exchange(echo, 0, *identifiers, identifiers=identifiers))
    assert replies == [[(i, i) for i in [0, *identifiers]]] * 5


def test_replies_go_back_by_identifier_in_any_order():
    replies = exchange(lambda messages: reversed(square(messages)), 2, 3, 4, 5)
    assert values(replies) == [4, 9, 16, 25]


def test_copy_0_cannot_register_a_slave_of_the_same_master():
    class Registers(Numbered):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            SyncMaster(echo).register_slave("mine")

    with pytest.raises(ReplicationError, match="identifier must be new"):
        DataParallel(Registers(), ["cpu"] * 2)(torch.zeros(2))


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [[(0, 1)], [(0, 1), (1, 1), (9, 1)], [], [(1, 1), (2, 1)], None, 5, [5], [(0, 1, 2)], "ab"],
    ids=str,
)
def test_callback_must_reply_to_every_message(answer):
    errors = [outcome.error for outcome in exchange(lambda messages: answer, "a", "b")]
    assert {type(error) for error in errors} == {ReplicationError, ReplicaFailed}
    (error,) = (error for error in errors if type(error) is ReplicationError)
    assert re.search(r"must return one \(identifier, reply\) .*expected \[0, 1\]", str(error))


@pytest.mark.parametrize("error", [ValueError, SystemExit], ids=["Exception", "BaseException"])
def test_error_in_the_callback_reaches_one_replica_and_wakes_the_others(error):
    """Clause 8b: guarantees 3 and 5 hold for pipes."""
    raised = error("in the callback")

    def fail(messages: Any) -> Any:
        raise raised

    errors: list[Any] = [outcome.error for outcome in exchange(fail, 0, 1, 2)]
    errors.remove(raised)
    assert [type(error) for error in errors] == [ReplicaFailed] * 2
    assert all(error.__cause__ is raised for error in errors)


@pytest.mark.parametrize("identifier", [0, 1], ids=["the master's", "another slave's"])
def test_identifier_must_be_free(identifier):
    with pytest.raises(ReplicationError, match=rf"must be new .*\(got {identifier} in"):
        exchange(echo, 0, 1, 2, identifiers=[1, identifier])


def test_master_whose_forward_has_ended_says_so():
    layer = Centering()
    DataParallel(layer, ["cpu"] * 2)(torch.zeros(2, 1))
    with pytest.raises(ReplicationError, match="run_master connects the replicas of one forward"):
        layer._sync_master.run_master(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SyncMaster(echo).register_slave(1),
        lambda: SyncMaster(echo).nr_slaves,
        lambda: FutureResult().put(1),
        lambda: FutureResult().get(),
    ],
)
def test_outside_a_forward_pipes_say_where_they_work(call):
    with pytest.raises(ReplicationError, match="connects the replicas of one forward"):
        call()


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


def test_forward_leaves_nothing_in_the_instance():
    layer = Centering()
    before = dict(vars(layer._sync_master))
    rendezvous = []

    class Spy(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rendezvous.append(weakref.ref(this_thread.current.rendezvous))
            return x

    with no_garbage_collection():
        DataParallel(nn.Sequential(Spy(), layer), ["cpu"] * 2)(torch.ones(4, 1))
        assert len(rendezvous) == 2
        assert freed(*rendezvous)
    assert vars(layer._sync_master) == {**before, "_has_slaves": True}


# -- FutureResult ------------------------------------------------------------------------------


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
    """Clause 8b: guarantees 3 and 5 hold for pipes."""
    with pytest.raises(ReplicasDiverged, match=r"replica 1: waits at `FutureResult`, call 1"):
        DataParallel(Hands(puts=False), ["cpu"] * 2)(torch.zeros(2))


def test_get_in_a_replica_is_given_up_when_the_other_fails():
    with pytest.raises(KeyError):
        DataParallel(Hands(puts=True, error=KeyError), ["cpu"] * 2)(torch.zeros(2))


def test_future_refuses_a_second_result_before_the_first_is_fetched():
    class PutsTwice(Hands):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.copy_id == 0:
                self.future.put(None)
                self.future.put(1)
            return x

    with pytest.raises(ReplicationError, match="put was called before the previous result was"):
        DataParallel(PutsTwice(puts=True), ["cpu"] * 2)(torch.zeros(2))
