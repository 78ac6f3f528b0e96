"""The threads of replicas live on, hold nothing between two forwards, and are like new ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from replication import patch_replication_callback
from replication.steps import threads
from tests.deadlines import DEADLINE, soon
from tests.layers import Stock, freed, knows_hooks, together, values
from tests.replication.test_parallel_apply import Call, Token, apply, seen, variable


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


def test_a_thread_whose_handle_is_lost_ends():
    """As by a Ctrl-C between taking it and giving it a job."""
    thread = threads.Worker((7, torch.device("cpu"))).thread
    assert soon(lambda: not thread.is_alive())


#: Keeps what a thread has entered until the test ends: modes end with their objects.
entered: list[Any] = []


def push(mode: Any) -> None:
    entered.append(mode)
    mode.__enter__()


class Kind(NamedTuple):
    """A kind of state: how code changes it, and how a thread reads it."""

    change: Callable[[], Any]
    read: Callable[[], Any]
    #: Whether replicas have the state of their caller, and not of a new thread.
    is_callers: bool = False
    undo: Callable[[], Any] = lambda: None
    #: Whose changes are tested.
    by: str = "caller, replica"


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
    "default device": Kind(
        lambda: torch.set_default_device("meta"), lambda: torch.empty(0).device, True
    ),
    "number of threads": Kind(
        lambda: torch.set_num_threads(5),
        torch.get_num_threads,
        undo=lambda: torch.set_num_threads(1),
        by="replica",  # of the caller's threads each gets a share
    ),
    "denormals": Kind(
        lambda: torch.set_flush_denormal(True),
        lambda: torch.tensor(1e-36).mul(1e-3).mul(1e4),
        True,
    ),
    "context variable": Kind(lambda: variable.set("changed"), variable.get, True),
}


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
    monkeypatch.setattr(threads, "_idle", {})

    def call() -> None:
        if when == "after":
            seen(kind.read)
        kind.change()
        expected = kind.read() if kind.is_callers else together(kind.read)[0].value
        assert seen(kind.read) == [expected] * 2

    before = seen(kind.read) if when == "before" else None
    monkeypatch.setattr(threads, "_idle", {})
    try:
        values(together(call))  # in a thread of its own, which ends with its state
    finally:
        kind.undo()
        entered.clear()
    assert before in (None, seen(kind.read))


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
