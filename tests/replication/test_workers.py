"""The threads of replicas live on, hold nothing between two forwards, and are like new ones."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from replication import patch_replication_callback
from replication._torch import nodes_made
from replication.steps import workers
from tests.deadlines import DEADLINE, soon
from tests.layers import CustomDataParallel, freed, knows_hooks, together
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


def test_a_thread_whose_handle_is_lost_ends():
    """As by a Ctrl-C between taking it and giving it a job."""
    thread = workers.Worker(7, torch.device("cpu")).thread
    assert soon(lambda: not thread.is_alive())


def test_few_idle_threads_are_kept(monkeypatch):
    monkeypatch.setattr(workers, "_MOST_IDLE", 2)
    device = torch.device("cpu")
    made = [workers.Worker(9, device) for _ in range(3)]
    for worker in made:
        worker.rest()
    first, second, third = [worker.thread for worker in made]
    del made, worker
    assert soon(lambda: not first.is_alive())
    assert [w.thread for w in workers._idle.pop((9, device))] == [second, third]


def push(mode: Any) -> None:
    mode.__enter__()


#: What a careless replica leaves behind in its thread.
CHANGES: dict[str, Callable[[], Any]] = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: push(torch.inference_mode()),
    "autocast": lambda: push(torch.autocast("cpu", torch.float16, cache_enabled=False)),
    "default device": lambda: torch.set_default_device("meta"),
    "number of threads": lambda: torch.set_num_threads(5),
    "hooks": lambda: push(saved_tensors_hooks(lambda t: 1 / 0, lambda t: t)),
    "function mode": lambda: push(torch.device("meta")),
    "dispatch mode": lambda: push(TorchDispatchMode()),
    "context variable": lambda: variable.set("changed"),
}


def state_of_thread() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.empty(0).device,
        torch.get_num_threads(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        variable.get(),
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(c, id=n, marks=[knows_hooks] if n == "hooks" else [])
        for n, c in CHANGES.items()
    ],
)
def test_what_a_replica_changes_in_its_thread_does_not_reach_the_next_forward(change):
    expected = seen(state_of_thread)
    apply(change, lambda: None)
    assert seen(state_of_thread) == expected
    x = torch.ones(2, requires_grad=True)
    apply(*[lambda: x.exp().exp()] * 2)  # the hooks would raise


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
