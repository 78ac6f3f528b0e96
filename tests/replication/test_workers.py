"""The threads of replicas live on, hold nothing between two forwards, and are like new ones."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _force_original_view_tracking, set_multithreading_enabled
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from replication import patch_replication_callback
from replication._torch import nodes_made
from replication.steps import workers
from tests.deadlines import DEADLINE, ends, soon
from tests.layers import HAS_GIL, CustomDataParallel, freed, knows_hooks, together, values
from tests.replication.test_parallel_apply import Call, Token, WorkerError, apply, seen, variable

threads: Any = sys.modules["replication.steps.parallel_apply"]  # the package names the function so


def test_each_replica_has_a_named_daemon_thread_that_lives_on():
    """Guarantee 7: threads named `idle replica-...` wait for later forwards."""

    def thread_and_name() -> tuple[threading.Thread, str]:
        return threading.current_thread(), threading.current_thread().name

    first = seen(thread_and_name, 3)
    for index, (thread, name) in enumerate(first):
        assert (name, thread.daemon) == (f"replica-{index}", True)
        assert thread.name == f"idle replica-{index}"
    assert seen(thread_and_name, 2) == first[:2]
    assert seen(thread_and_name, 3) == first


def test_two_forwards_at_once_and_inside_each_other_use_different_threads():
    barrier = threading.Barrier(4, timeout=DEADLINE)

    def wait() -> int:
        barrier.wait()
        return threading.get_ident()

    both = together(*[lambda: apply(wait, wait)] * 2)
    assert len({ident for outcome in both for ident in outcome.value}) == 4
    nested = apply(*[lambda: [threading.get_ident(), *apply(wait, wait)]] * 2)
    assert len({ident for own in nested for ident in own}) == 6


def test_an_abandoned_thread_comes_back_when_its_code_ends(monkeypatch):
    monkeypatch.setattr(threads, "SHUTDOWN_GRACE", 0.0)
    goes_on, abandoned = threading.Event(), []

    def hang() -> None:
        abandoned.append(threading.current_thread())
        goes_on.wait(DEADLINE)

    def fail_beside() -> None:
        assert soon(lambda: abandoned)
        raise WorkerError

    with pytest.raises(WorkerError):
        apply(hang, fail_beside)
    assert seen(threading.current_thread)[0] is not abandoned[0]
    goes_on.set()
    idle = workers._idle[0, torch.device("cpu")]
    assert soon(lambda: abandoned[0] in [worker.thread for worker in idle])


def test_a_thread_that_must_end_does_so_while_a_traceback_refers_to_the_forward():
    def fail() -> None:
        push(BaseTorchFunctionMode())
        left.append(threading.current_thread())
        raise WorkerError

    left: list[threading.Thread] = []
    with pytest.raises(WorkerError) as caught:
        apply(fail, lambda: None)
    assert caught.tb and ends(left[0])


def test_a_thread_whose_handle_is_lost_ends():
    """As by a Ctrl-C between taking it and giving it a job."""
    thread = workers.Worker((7, torch.device("cpu")), ()).thread
    assert soon(lambda: not thread.is_alive())


def test_idle_threads_end_that_no_recent_forward_has_used(monkeypatch):
    """Of those that run at a time, the last one is kept."""
    monkeypatch.setattr(workers, "_PATIENCE", 0.01)
    barrier = threading.Barrier(6, timeout=DEADLINE)

    def wait() -> threading.Thread:
        barrier.wait()
        return threading.current_thread()

    monkeypatch.setattr(workers, "_idle", {})
    used = [outcome.value for outcome in together(*[lambda: apply(wait, wait)] * 3)]
    for index in range(2):
        kept = workers._idle[index, torch.device("cpu")]
        assert soon(lambda kept=kept: len(kept) == 1)
        ended = {threads[index] for threads in used} - {kept[0].thread}
        assert len(ended) == 2
        assert all(ends(thread) for thread in ended)
    latest = [workers._idle[index, torch.device("cpu")][0].thread for index in range(2)]
    assert seen(threading.current_thread) == latest


@pytest.mark.parametrize("grad", [False, True])
def test_of_several_idle_threads_the_latest_serves_so_that_the_others_end(grad):
    barrier = threading.Barrier(4, timeout=DEADLINE)
    with torch.set_grad_enabled(grad):
        together(*[lambda: apply(barrier.wait, barrier.wait)] * 2)
        served = [seen(threading.current_thread) for _ in range(5)]
    assert served == [served[0]] * 5


#: Keeps what a thread has entered until the test ends: modes end with their objects.
entered: list[Any] = []


def push(mode: Any) -> None:
    entered.append(mode)
    mode.__enter__()


def other_cpus() -> set[int]:
    cpus = os.sched_getaffinity(0)
    return {max(cpus)} if len(cpus) > 1 else cpus


def exclude_a_key() -> None:
    torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView, True)


def hook(*args: Any) -> None: ...


class Kind(NamedTuple):
    """A kind of state: how code changes it, and how a thread reads it."""

    change: Callable[[], Any]
    read: Callable[[], Any]
    #: Whether replicas have the state of their caller, and not of a new thread.
    is_callers: bool = False
    undo: Callable[[], Any] = lambda: None
    #: Whose changes are tested.
    by: str = "caller, replica"


class Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


x = torch.ones(2, requires_grad=True)
autograd = torch._C._autograd
KINDS = {
    "grad mode": Kind(lambda: torch.set_grad_enabled(False), torch.is_grad_enabled, True),
    "inference mode": Kind(
        lambda: push(torch.inference_mode()), torch.is_inference_mode_enabled, True
    ),
    "autocast": Kind(
        lambda: push(torch.autocast("cpu", torch.float16, cache_enabled=False)),
        lambda: (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        True,
    ),
    "autocast's depth": Kind(
        torch.autocast_increment_nesting,
        lambda: torch.autocast_increment_nesting() - 1 - 0 * torch.autocast_decrement_nesting(),
    ),
    "default device": Kind(
        lambda: torch.set_default_device("meta"), lambda: torch.empty(0).device, True
    ),
    "number of threads": Kind(
        lambda: torch.set_num_threads(5),
        torch.get_num_threads,
        undo=lambda: torch.set_num_threads(1),
        by="replica",  # of the caller's threads each gets a share
    ),
    "hooks": Kind(
        lambda: push(saved_tensors_hooks(lambda t: 1 / 0, lambda t: t)), lambda: x.exp().exp().ndim
    ),
    "hooks disabled": Kind(
        lambda: push(disable_saved_tensors_hooks("")), autograd._saved_tensors_hooks_is_enabled
    ),
    "function mode": Kind(
        lambda: push(BaseTorchFunctionMode()), torch._C._len_torch_function_stack
    ),
    "no function modes": Kind(
        lambda: push(torch._C.DisableTorchFunctionSubclass()), torch._C._is_torch_function_enabled
    ),
    "dispatch mode": Kind(lambda: push(Passes()), torch._C._len_torch_dispatch_stack),
    "excluded key": Kind(
        exclude_a_key, lambda: torch._C._dispatch_tls_local_exclude_set().raw_repr()
    ),
    "backward in one thread": Kind(
        lambda: push(set_multithreading_enabled(False)), torch._C._is_multithreading_enabled
    ),
    "view replay": Kind(
        lambda: push(_force_original_view_tracking(True)), torch._C._is_view_replay_enabled
    ),
    "forward AD": Kind(
        lambda: push(forward_ad._set_fwd_grad_enabled(False)), torch._C._is_fwd_grad_enabled
    ),
    "denormals": Kind(
        lambda: torch.set_flush_denormal(True),
        lambda: torch.tensor(1e-36).mul(1e-3).mul(1e4),
        True,
    ),
    "profile function of the thread": Kind(lambda: sys.setprofile(hook), sys.getprofile),
    "trace function of the thread": Kind(lambda: sys.settrace(hook), sys.gettrace),
    "profile function of new threads": Kind(
        lambda: threading.setprofile(hook),
        sys.getprofile,
        undo=lambda: threading.setprofile(None),
        by="caller",  # it is of the process
    ),
    "trace function of new threads": Kind(
        lambda: threading.settrace(hook),
        sys.gettrace,
        undo=lambda: threading.settrace(None),
        by="caller",
    ),
    "context variable": Kind(lambda: variable.set("changed"), variable.get, True),
}
if hasattr(os, "sched_setaffinity"):
    KINDS["CPUs"] = Kind(
        lambda: os.sched_setaffinity(0, other_cpus()), lambda: os.sched_getaffinity(0)
    )
if hasattr(signal, "pthread_sigmask"):
    KINDS["blocked signals"] = Kind(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    )


def kinds(by: str) -> Any:
    """Parametrizes a test by the kinds of state that a caller or a replica changes."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, id=name, marks=[knows_hooks] if name == "hooks" else [])
            for name, kind in KINDS.items()
            if by in kind.by
        ],
    )


@kinds("replica")
def test_what_a_replica_leaves_in_its_thread_does_not_reach_the_next_forward(kind):
    expected = seen(kind.read)
    try:
        apply(kind.change, lambda: None)
        assert seen(kind.read) == expected
    finally:
        kind.undo()


@kinds("caller")
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_caller_sets_before_or_after_the_first_forward_reaches_the_replicas(
    kind, when, monkeypatch
):
    """As in new threads: what these do not take over from the caller is as it was."""
    monkeypatch.setattr(workers, "_idle", {})

    def call() -> None:
        if when == "after":
            seen(kind.read)
        kind.change()
        expected = kind.read() if kind.is_callers else together(kind.read)[0].value
        assert seen(kind.read) == [expected] * 2

    before = seen(kind.read) if when == "before" else None
    monkeypatch.setattr(workers, "_idle", {})
    try:
        values(together(call))  # in a thread of its own, which ends with its state
    finally:
        kind.undo()
        entered.clear()
    assert before in (None, seen(kind.read))


def test_stack_size_of_new_threads_is_asked_and_kept():
    """A thread that lives on has the stack that it began with."""
    before = seen(threading.current_thread)
    size = threading.stack_size(16 << 20)
    try:
        larger = seen(threading.current_thread)
        assert not {*before} & {*larger}
        assert seen(threading.current_thread) == larger
        assert threading.stack_size(16 << 20) == 16 << 20
    finally:
        threading.stack_size(size)


def test_threads_live_on_while_a_profiler_watches_them(monkeypatch):
    """It sets a function in each thread that there is, which a new thread would not have."""
    if not hasattr(threading, "setprofile_all_threads"):
        pytest.skip("needs Python 3.12")
    before = seen(threading.get_ident)
    threading.setprofile_all_threads(hook)
    threading.setprofile(None)
    try:
        assert seen(sys.getprofile) == [hook] * 2
        assert seen(threading.get_ident) == before
    finally:
        threading.setprofile_all_threads(None)


@pytest.mark.skipif(not HAS_GIL, reason="the exception may come at another place")
def test_a_thread_that_dies_before_it_begins_its_job_is_replaced(monkeypatch):
    """Another thread may send an exception into an idle one, which gets it when it wakes up."""
    monkeypatch.setattr(threads, "_POLL", 0.01)
    before = seen(threading.current_thread)
    send, ident = ctypes.pythonapi.PyThreadState_SetAsyncExc, before[0].ident or 0
    assert send(ctypes.c_ulong(ident), ctypes.py_object(WorkerError)) == 1
    with monkeypatch.context() as quiet:
        quiet.setattr(threading, "excepthook", lambda args: None)
        after = seen(threading.current_thread)
    assert not before[0].is_alive()
    assert after[0] is not before[0] and after[1] is before[1]


def test_an_idle_thread_keeps_no_value_of_a_context_variable_alive():
    token = Token()
    reference = weakref.ref(token)
    reset = variable.set(token)
    del token
    apply(*[lambda: None] * 2)
    variable.reset(reset)
    del reset
    assert freed(reference)


def test_all_threads_count_nodes_from_the_same_number():
    x = torch.ones(1, requires_grad=True)

    def make_nodes(number: int) -> tuple[int, int]:
        begun = nodes_made()
        for _ in range(number):
            x.exp()
        return begun, nodes_made()

    for numbers in ([3, 500, 7], [100, 2, 1], [1, 1, 50]):
        before = nodes_made()
        made = apply(*[partial(make_nodes, number) for number in numbers])
        assert len({begun for begun, _ in made}) == 1
        assert made[0][0] >= before
        assert nodes_made() == max(ended for _, ended in made)
        x.exp()


def test_replicas_of_a_caller_that_is_far_behind_have_new_threads(monkeypatch):
    """It would count for seconds, where millions of nodes have been made."""
    monkeypatch.setattr(threads, "_NEAR", 50)
    monkeypatch.setattr(workers, "_idle", {})  # threads of other tests may have made a few nodes
    x = torch.ones(1, requires_grad=True)

    def make_nodes() -> tuple[int, threading.Thread]:
        for _ in range(100):
            x.exp()
        return nodes_made(), threading.current_thread()

    def call(grad: bool) -> tuple[int, threading.Thread]:
        with torch.set_grad_enabled(grad):
            return seen(make_nodes)[0]

    nodes, usual = call(True)
    assert nodes >= 100
    ((made, new), _) = together(partial(call, True))[0]
    assert made == 100
    assert new is not usual
    assert together(partial(call, False))[0].value[1] is usual
    assert call(True) == (nodes + 100, usual)


def test_a_stock_data_parallel_uses_them_if_it_has_the_callback():
    class Stock(nn.DataParallel):
        """torch's own but for the steps that refuse the CPU."""

        __init__, replicate = CustomDataParallel.__init__, CustomDataParallel.replicate
        scatter, gather = CustomDataParallel.scatter, CustomDataParallel.gather

    class Own(Stock):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            return [replica(*args) for replica, args in zip(replicas, inputs, strict=True)]

    expected = seen(threading.get_ident)
    for kind, idents in ((Stock, expected), (Own, [threading.get_ident()] * 2)):
        used: list[int] = []
        model = kind(Call(lambda x, used=used: (used.append(threading.get_ident()), x)[1]), 2)
        patch_replication_callback(model)
        model(torch.ones(2, 1))
        assert set(used) == set(idents)
