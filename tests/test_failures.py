"""The first error wins: it arrives unchanged, wakes all who wait, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaFailed
from replication.sync.lifecycle import this_thread
from tests.kit.deadlines import Deadline, soon
from tests.kit.faults import Fault, assert_next_step_is_exact, batch, faulty, twin_of
from tests.kit.layers import Centering, LayerError, Numbered
from tests.kit.properties import pairwise
from tests.kit.wrappers import WRAPS, N, as_a_function, ours

# -- any error, in any place, copy and runner --------------------------------------------------

#: Seconds. A replica that is left waiting takes `replication.sync.rendezvous.STALL_TIMEOUT`.
AT_ONCE = 5.0

#: Where an error strikes, and the synchronized layers that all copies have finished by then.
PLACES = {
    "callback, between": (),
    "before": (),
    "between": ("bn1",),
    "pre-hook": ("bn1",),
    "in": ("bn1",),
    "hook": ("bn1", "bn2"),
    "master": ("bn1", "bn2"),
    "after": ("bn1", "bn2"),
    "tensor hook, between": ("bn1", "bn2"),
    "backward, between": ("bn1", "bn2"),
}
WHERE = [(place, replica) for place in PLACES for replica in range(1 if place == "master" else N)]


class NeedsTwo(Exception):
    """Can't be made again from a text, although torch does so."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("tried to allocate too much")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError("own"),
    "OutOfMemoryError": out_of_memory,
    "NeedsTwo": lambda: NeedsTwo(3, "own"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
}


@pytest.fixture(scope="module")
def frozen_garbage() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py leaves it


@pytest.fixture
def garbage_of_the_test_alone(frozen_garbage: None, monkeypatch) -> Iterator[None]:
    """Objects that are freed in a test are freed by their last reference, so they are in no cycle.
    Freezing hides the objects of earlier tests."""
    # The plain threads of torch die of what is no Exception, and report it to this hook.
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    ours(nn.Identity())(torch.zeros(N))  # the first forward makes objects that stay
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def forgotten(fault: Fault, *, in_cycles: bool) -> bool:
    """Whether no replica is left, soon; ``in_cycles`` they may need the garbage collector."""

    def none_is_left() -> bool:
        if in_cycles:
            gc.collect()
        return not any(copy() is not None for copy in fault.copies)

    return soon(none_is_left)


def fail(run: Callable[[Tensor], Tensor], fault: Fault, x: Tensor, dy: Tensor) -> None:
    """Makes a step that ends in the very error of the fault, and forgets that."""
    at_once = Deadline(AT_ONCE)
    try:
        run(x.clone().requires_grad_()).backward(dy)
    except BaseException as error:
        assert error is fault.error  # the first one, no follow-up, no new one of the same type
        assert not at_once.has_passed()
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert frames[0] == "fail"
        assert frames[-2:] == ["strike", "act"]
    else:
        pytest.fail("the error has not arrived")
    fault.error = None


@pytest.mark.slow
@pytest.mark.accelerator
@pytest.mark.usefixtures("garbage_of_the_test_alone")
@pairwise(where=WHERE, error=ERRORS, wrap=WRAPS)
def test_error_arrives_unchanged_and_leaves_an_exact_model_behind(where, error, wrap):
    """Clause 5a: the first error wins, as it was raised. Clause 3f: the next step starts clean."""
    place, replica = where
    fault = Fault(place, replica, ERRORS[error]())
    net = faulty(fault)
    twin, run = twin_of(net), wrap(net)
    state = copy.deepcopy(net.state_dict())
    x, dy = batch()
    twin(x)
    threads, tensors = threading.active_count(), live_tensors()

    fail(run, fault, x, dy)
    assert fault.copies
    # The code that runs replicas may hold a follow-up in the frame that raised it.
    assert forgotten(fault, in_cycles=wrap not in (ours, as_a_function))
    net.zero_grad()
    # The engine keeps what a failed backward has left to do until the next one.
    torch.ones((), requires_grad=True).backward()
    assert soon(lambda: live_tensors() == tensors)

    # Layers that all copies have finished have the running statistics of the batch, and all
    # others what they were.
    for name, value in net.state_dict().items():
        is_new = name.split(".")[0] in PLACES[place]
        torch.testing.assert_close(value, twin.state_dict()[name] if is_new else state[name])

    fault.active = False
    assert_next_step_is_exact(run, net, twin_of(net))
    assert soon(lambda: threading.active_count() <= threads)


class Interruption(Fault):
    """Interrupts the main thread, which awaits the replicas; till it knows its replica goes on."""

    def __init__(self, place: str, replica: int) -> None:
        super().__init__(place, replica)
        self.main = threading.main_thread().ident or 0

    def act(self) -> None:
        place = this_thread.current
        assert place is not None
        while place.rendezvous.aborted is None:
            signal.pthread_kill(self.main, signal.SIGINT)
            time.sleep(0.01)  # leaves the main thread time to handle the signal


@pytest.mark.slow
@pytest.mark.accelerator
@pytest.mark.usefixtures("one_interrupt", "garbage_of_the_test_alone")
@pairwise(wrap=WRAPS, place=["before", "in", "between", "after"], replica=range(N))
def test_interrupt_of_the_caller_arrives_at_once_and_leaves_an_exact_model(wrap, place, replica):
    """Clause 5c: a Ctrl-C ends the forward."""
    fault = Interruption(place, replica)
    net = faulty(fault)
    run, (x, _) = wrap(net), batch()
    threads = threading.active_count()
    at_once = Deadline(AT_ONCE)
    with pytest.raises(KeyboardInterrupt):
        run(x)
    assert not at_once.has_passed()
    assert forgotten(fault, in_cycles=True)
    fault.active = False
    assert_next_step_is_exact(run, net, twin_of(net))
    assert soon(lambda: threading.active_count() <= threads)


# -- errors in replicas of one's own -----------------------------------------------------------


def test_replica_that_handles_the_failure_of_another_does_not_hide_it():
    class Handles(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Centering()

        def forward(self, x: Tensor) -> Tensor:
            if self.copy_id == 1:
                raise LayerError
            try:
                return self.layer(x)
            except ReplicaFailed:
                return x

    with pytest.raises(LayerError):
        ours(Handles(), 2)(torch.randn(4, 2))


def test_a_forward_ends_when_its_replicas_have_ended():
    """Clause 5e: a forward ends when its replicas have ended."""
    ended = []

    class Exits(nn.Module):
        def forward(self, x):
            if threading.current_thread().name == "replica-0":
                raise SystemExit(3)
            place = this_thread.current
            assert soon(lambda: place.rendezvous.has_ended(0))
            ended.append(x)
            raise KeyError("later")

    model = DataParallel(Exits(), ["cpu"] * 3)
    with pytest.raises(SystemExit) as caught:
        model(torch.zeros(3))
    assert len(ended) == 2
    assert caught.value.__notes__ == ["in replica 0 of 3 on cpu, module `(root)`"]
