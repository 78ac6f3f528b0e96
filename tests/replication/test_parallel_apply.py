"""The replicas' threads: what runs where, in which state of torch, and how it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    DataParallel,
    ReplicationError,
    execute_replication_callbacks,
    parallel_apply,
    replicate,
)
from tests.kit.deadlines import DEADLINE
from tests.kit.layers import Centering
from tests.kit.memory import freed, no_garbage_collection
from tests.kit.programs import program, run_pythons
from tests.kit.shards import BATCH, norm
from tests.kit.threads import together


class Call(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def apply(*functions: Callable[[], Any]) -> list[Any]:
    """Runs each function as if it were a replica."""
    return parallel_apply([Call(function) for function in functions], [()] * len(functions))


def seen(state: Callable[[], Any], n: int = 2) -> list[Any]:
    """What ``state()`` returns in each of ``n`` replicas, checked to run in threads."""
    caller = threading.get_ident()
    idents_and_states = apply(*[lambda: (threading.get_ident(), state())] * n)
    assert caller not in [ident for ident, _ in idents_and_states]
    return [value for _, value in idents_and_states]


# -- calls and outputs -------------------------------------------------------------------------


def test_outputs_are_in_the_order_of_the_replicas():
    assert apply(*(lambda i=i: i for i in range(6))) == list(range(6))


def test_arguments_are_passed():
    replica, alone = Call(lambda *args, **kwargs: (args, kwargs)), object()
    outputs = parallel_apply([replica] * 3, [(1, 2), [3], alone], [{"a": 1}, {}, {}])
    assert outputs == [((1, 2), {"a": 1}), ((3,), {}), ((alone,), {})]


@pytest.mark.parametrize("name", ["inputs", "kwargs_tup", "devices"])
def test_lists_must_be_of_one_length(name):
    arguments = {"inputs": [()] * 2, "kwargs_tup": [{}] * 2, "devices": ["cpu"] * 2}
    arguments[name] = arguments[name][:1]
    with pytest.raises(ValueError, match=rf"one of {name} for each of 2 replicas \(got 1\)"):
        parallel_apply([nn.ReLU()] * 2, **arguments)


def test_no_replicas_have_no_outputs():
    assert parallel_apply([], []) == []


def test_replicas_run_at_the_same_time():
    barrier = threading.Barrier(4, timeout=DEADLINE)
    assert sorted(apply(*[barrier.wait] * 4)) == [0, 1, 2, 3]


# -- threads -----------------------------------------------------------------------------------


def test_single_replica_runs_in_the_calling_thread():
    assert apply(threading.get_ident) == [threading.get_ident()]


class Token:
    """Something that can be referred to weakly."""


def test_ended_call_keeps_nothing_alive():
    references = []

    def make() -> Token:
        token = Token()
        references.append(weakref.ref(token))
        return token

    replicas = [Call(make), Call(make)]
    references += [weakref.ref(replica) for replica in replicas]
    with no_garbage_collection():
        outputs = parallel_apply(replicas, [()] * 2)
        del outputs, replicas
        assert len(references) == 4
        assert freed(*references)


# -- errors ------------------------------------------------------------------------------------


class WorkerError(Exception):
    """An error that only this file raises."""


def fail() -> None:
    raise WorkerError("own")


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_error_is_noted_with_its_replica_and_device(replica):
    functions: list[Callable[[], Any]] = [lambda: None] * 3
    functions[replica] = fail
    with pytest.raises(WorkerError) as caught:
        apply(*functions)
    assert caught.value.__notes__ == [f"in replica {replica} of 3 on cpu"]


def test_an_error_that_is_raised_again_has_each_note_once():
    error = WorkerError()

    def fail_again() -> None:
        raise error

    for _ in range(3):
        with pytest.raises(WorkerError):
            apply(fail_again, fail_again)
    assert len(error.__notes__) == len({*error.__notes__}) == 2


def test_frames_in_the_traceback_of_an_error_have_ended():
    """Others, such as pytest, read them while the thread runs."""
    with pytest.raises(WorkerError) as caught:
        apply(fail, lambda: None)
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert "_work" not in names and names[-2:] == ["forward", "fail"]


def test_error_is_freed_with_its_last_reference():
    references = []

    def fail_with_a_token() -> None:
        token = Token()
        references.append(weakref.ref(token))
        raise WorkerError(token)

    with no_garbage_collection():
        with contextlib.suppress(WorkerError):
            apply(fail_with_a_token, lambda: None)
        assert freed(*references)


@pytest.mark.parametrize("replica", [0, 1])
def test_replica_that_cannot_be_called_wakes_the_others(replica):
    replicas = replicate(Centering(), ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    kwargs: list[Any] = [{}, {}]
    kwargs[replica] = None
    x = torch.ones(1, 1)
    (outcome,) = together(lambda: parallel_apply(replicas, [x, x], kwargs))
    assert isinstance(outcome.error, TypeError)


# -- processes ---------------------------------------------------------------------------------

#: What the programs print. Torch aborts if the interpreter ends in the middle of an operation.
PRINTED = {"forks_beside_a_forward": "done\n", "exits_with_a_busy_replica": "interrupted\n"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs Unix")
def test_programs_run_to_their_end():
    ended = run_pythons(*([program(name)] for name in PRINTED))
    found = [(done.stdout, done.stderr, done.returncode) for done in ended]
    assert found == [(text, "", 0) for text in PRINTED.values()]


# -- threads of replicas -----------------------------------------------------------------------


def test_layers_in_threads_that_a_replica_has_started_are_refused():
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = norm(), norm()

        def forward(self, x):
            return torch.stack(parallel_apply([self.a, self.b], [(x,), (2 * x,)]), 1)

    with pytest.raises(ReplicationError, match="call it in the replica's own thread"):
        DataParallel(Parallel(), ["cpu"] * 3)(BATCH)


class Threads(nn.Module):
    """Adds the number of intra-op threads of its replica. Its layer is there to be seen."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.get_num_threads()


def test_replicas_share_the_threads_that_the_caller_has_now():
    model = DataParallel(Threads(nn.Identity()), ["cpu"] * 2)
    try:
        for count, share in ((1, 1), (4, 2), (3, 1), (6, 3)):
            torch.set_num_threads(count)
            assert model(torch.zeros(2)).tolist() == [share] * 2
            assert torch.get_num_threads() == count
            # What a thread begins with is not the share.
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result(timeout=DEADLINE) == count
            # Replicas that are called from there have other threads.
            with ThreadPoolExecutor(1) as pool:
                assert (
                    pool.submit(model, torch.zeros(2)).result(timeout=DEADLINE).tolist()
                    == [share] * 2
                )
    finally:
        torch.set_num_threads(1)
