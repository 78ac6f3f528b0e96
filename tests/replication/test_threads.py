"""The threads of replicas: reused, holding nothing in between, with the state of their caller."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from replication import patch_replication_callback
from replication.steps import threads
from tests.kit.deadlines import DEADLINE, soon
from tests.kit.memory import freed
from tests.kit.threads import together
from tests.kit.wrappers import Stock
from tests.replication.test_parallel_apply import Call, Token, apply, seen


def test_each_replica_has_a_named_daemon_thread_that_is_reused():
    """Clause 7e: threads are daemons, and are reused."""

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


def test_a_thread_whose_handle_is_lost_ends():
    """A Ctrl-C can come between taking it and giving it a job."""
    thread = threads.Worker((7, torch.device("cpu"))).thread
    assert soon(lambda: not thread.is_alive())


def test_the_end_of_python_does_not_wait_for_other_threads_of_similar_names():
    done = threading.Event()
    other = threading.Thread(target=done.wait, args=[DEADLINE], name="replica-lag", daemon=True)
    other.start()
    begin = time.monotonic()
    threads._await_running()
    assert time.monotonic() - begin < threads._LAST_SECONDS
    done.set()
    other.join(DEADLINE)


# -- what replicas take over from their caller -------------------------------------------------


variable: ContextVar[Any] = ContextVar("variable", default="default")


@contextmanager
def flushed_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@contextmanager
def changed_variable() -> Iterator[None]:
    reset = variable.set("changed")
    yield
    variable.reset(reset)


def autocast_state() -> tuple[Any, ...]:
    is_enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return is_enabled, dtype, torch.is_autocast_cache_enabled()


#: How a caller changes its state, and how a thread reads it.
STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (torch.no_grad, torch.is_grad_enabled),
    "inference mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False), autocast_state
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(0).device),
    "denormals": (flushed_denormals, lambda: torch.tensor(1e-36).mul(1e-3).mul(1e4)),
    "context variable": (changed_variable, variable.get),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_replicas_have_the_state_that_their_caller_has_at_the_time(name):
    change, read = STATES[name]
    before = read()
    assert seen(read) == [before] * 2
    with change():
        assert read() != before
        assert seen(read) == [read()] * 2
    assert seen(read) == [before] * 2


def test_a_mode_that_a_replica_leaves_in_its_thread_does_not_reach_the_next_forward():
    apply(*[lambda: torch.set_grad_enabled(False)] * 2)
    assert seen(torch.is_grad_enabled) == [True] * 2


def test_an_idle_thread_keeps_no_value_of_a_context_variable_alive():
    token = Token()
    reference = weakref.ref(token)
    reset = variable.set(token)
    del token
    apply(*[lambda: None] * 2)
    variable.reset(reset)
    del reset
    assert freed(reference)


def test_a_stock_data_parallel_uses_them_if_it_has_the_callback():
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
