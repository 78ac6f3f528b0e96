"""A Ctrl-C ends a forward: the caller goes on when its replicas have ended."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import execute_replication_callbacks, replicate
from replication.sync.lifecycle import this_thread
from replication.sync.rendezvous import Rendezvous
from syncbn import SynchronizedBatchNorm1d, convert_model, replicas
from tests.kit.deadlines import soon
from tests.kit.threads import together, values
from tests.kit.wrappers import CustomDataParallel, ours
from tests.older_toolkit.batchnorm import BatchNorm2dCorrected

# -- training that is ended --------------------------------------------------------------------

#: Of the delays.
chance = random.Random(0)


class Delay(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(chance.random() / 500)  # so that interrupts meet replicas at other places
        return x


def network() -> nn.Sequential:
    layers = [
        *(nn.Linear(3, 4), Delay(), nn.BatchNorm1d(4), Delay(), nn.Tanh()),
        *(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4), Delay(), nn.BatchNorm1d(4)),
    ]
    return nn.Sequential(*layers).double()


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def all_replicas_have_ended() -> bool:
    # Those that torch's way runs have names of another kind, and wait for the first.
    # Python never removes a thread from its list whose start was interrupted.
    return not any(t.name.startswith("replica-") and t.is_alive() for t in threading.enumerate())


def twin_of(net: nn.Module) -> nn.Sequential:
    """The same on one device, with torch's layers."""
    twin = network()
    twin.load_state_dict(net.state_dict())
    return twin


# -- Ctrl-C at any time ------------------------------------------------------------------------


def interrupted(call: Callable[[], Any], after: float) -> bool:
    """Whether a `KeyboardInterrupt`, so many seconds later, ended ``call``."""
    is_armed = True

    def interrupt(signum: int, frame: Any) -> None:
        if is_armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # An interrupt in a finalizer or a weakref callback is dropped by Python.
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        call()
        is_armed = False
        return False
    except KeyboardInterrupt:
        is_armed = False
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer's signal")
def test_interrupted_steps_leave_the_statistics_of_the_layers_that_they_came_to(monkeypatch):
    """One device would have updated the first few layers, and no other, by then.

    No replica waits on.
    """

    def slow_replies(*args: Any) -> Any:
        outputs = merge(*args)
        time.sleep(chance.random() / 500)  # so that some interrupts come before the replies
        return outputs

    def checked(self: Rendezvous, *, is_late: bool = False) -> None:
        assert not is_late
        check(self)

    merge, check = replicas.joined, Rendezvous.check
    monkeypatch.setattr(replicas, "joined", slow_replies)
    monkeypatch.setattr(Rendezvous, "check", checked)
    net = convert_model(network())
    model = ours(net)
    model(torch.randn(7, 3, dtype=torch.float64))
    norms = [name for name, layer in net.named_modules() if hasattr(layer, "running_mean")]
    count = 0
    for _ in range(200):
        x = torch.randn(7, 3, dtype=torch.float64)
        before, twin = state_of(net), twin_of(net)
        count += interrupted(lambda x=x: model(x), chance.random() / 100)
        state = state_of(net)
        # The thread of a replica that has not begun may still take back its name.
        assert soon(all_replicas_have_ended)
        twin(x)
        has_come = [
            state[f"{name}.num_batches_tracked"] > before[f"{name}.num_batches_tracked"]
            for name in norms
        ]
        assert has_come == sorted(has_come, reverse=True)
        expected = dict(before)
        for name, is_updated in zip(norms, has_come, strict=True):
            if is_updated:
                expected.update(
                    {k: v for k, v in twin.state_dict().items() if k.startswith(f"{name}.")}
                )
        torch.testing.assert_close(state, expected)
    assert count > 100
    monkeypatch.undo()
    twin, x = twin_of(net), torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(net.state_dict(), twin.state_dict())


# -- at every place where Python lets an interrupt in ------------------------------------------


#: The modules that change the state of the caller's thread, and of a model that is patched.
RUNNING = ("replication.callbacks", "replication.steps.parallel_apply")
RUNNING += ("replication._torch", "replication.sync")


def interrupted_at(
    place: int, call: Callable[[], Any], modules: tuple[str, ...] = RUNNING
) -> bool:
    """Raises `KeyboardInterrupt` at a place in these modules, by number, if ``call`` reaches it.

    Returns whether it does. Python looks for signals when a function begins and after a call of a
    built-in function. A profiler is called at the same places.
    """
    left = place

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_globals["__name__"].startswith(modules):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    # An interrupt in a finalizer or a weakref callback is dropped by Python.
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        sys.setprofile(profile)
        with contextlib.suppress(KeyboardInterrupt):
            call()
    finally:
        sys.setprofile(None)
        sys.unraisablehook = hook
    return left < 0


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 4])
def test_an_interrupt_anywhere_in_a_forward_leaves_the_thread_as_it_was(samples):
    """A thread that counts as a replica's cannot train; one with too few threads is slow."""
    threads = torch.get_num_threads()
    net = nn.Sequential(SynchronizedBatchNorm1d(3).double())
    model, x, place = ours(net, 2), torch.randn(samples, 3, dtype=torch.float64), 0
    if samples == 1:
        net.append(nn.Identity()).eval()
    model(x)
    try:
        torch.set_num_threads(4)
        while interrupted_at(place, lambda: model(x)):
            assert this_thread.current is None
            assert soon(all_replicas_have_ended)
            assert values(together(torch.get_num_threads)) == [4]
            place += 1
    finally:
        torch.set_num_threads(threads)
    assert place > 50


def test_an_interrupt_of_a_replica_that_is_called_by_hand_leaves_the_thread_as_it_was():
    replicas, place = replicate(nn.Identity(), ["cpu"] * 2), 0
    execute_replication_callbacks(replicas)
    while interrupted_at(place, lambda: replicas[0](torch.ones(1))):
        assert this_thread.current is None
        place += 1
    assert place > 3


def unconverted() -> nn.Module:
    layers = nn.BatchNorm1d(3), BatchNorm2dCorrected(3), nn.Sequential(nn.SyncBatchNorm(3))
    return CustomDataParallel(nn.Sequential(*layers, nn.ReLU()), 2)


def state_of_modules(net: nn.Module) -> list[Any]:
    return [(type(m), dict(vars(m)), list(m._buffers)) for m in net.modules()]


def test_an_error_in_the_middle_of_a_conversion_changes_nothing():
    net = nn.Sequential(nn.BatchNorm1d(3), unconverted())
    net[1].replicate = print  # the patch of an older toolkit
    before = state_of_modules(net)
    with pytest.raises(TypeError, match="replicate must be a method of the class"):
        convert_model(net)
    assert state_of_modules(net) == before
