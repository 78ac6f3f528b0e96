"""A time limit or a Ctrl-C ends a forward: the caller goes on, and nothing is written later."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    DataParallel,
    FutureResult,
    ReplicasTimedOut,
    ReplicationError,
    data_parallel,
    execute_replication_callbacks,
    patch_replication_callback,
    replicate,
    wait_report,
    warning,
)
from replication.sync import observation
from replication.sync.current import current_replica
from replication.sync.lifecycle import rendezvous_of
from replication.sync.rendezvous import Rendezvous, Wait
from syncbn import SynchronizedBatchNorm1d, convert_model, patch_sync_batchnorm, ways
from syncbn.joined import Joined
from tests.deadlines import ends
from tests.layers import (
    DEADLINE,
    HAS_GIL,
    AsTorchDoes,
    Centering,
    CustomDataParallel,
    Numbered,
    as_torch_does,
    ours,
    soon,
    together,
    until_others_wait,
    values,
)
from tests.older_toolkit.batchnorm import BatchNorm2dCorrected

#: Seconds.
LIMIT = 0.3

# -- the time limit ----------------------------------------------------------------------------


class Hangs(Numbered):
    """One replica waits for something that no other replica knows of."""

    def __init__(self, replica: int, others: int) -> None:
        super().__init__()
        self.replica, self.others = replica, others
        self.go = threading.Event()
        self.ended = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.copy_id == self.replica:
            until_others_wait(self.others)
            self.go.wait(DEADLINE)
            self.ended.set()
        return x


@pytest.mark.parametrize("last", [nn.Tanh, Centering])
@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_replica_that_hangs_is_named_and_the_caller_goes_on(replica, last):
    """Guarantee 3: a `timeout` limits replicas that hang. The next step starts clean.

    The others end, or wait for it in the last layer.
    """
    hangs = Hangs(replica, others=2 if last is Centering else 0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(hangs), last())
    model = DataParallel(net, ["cpu"] * 3, timeout=LIMIT)
    x = torch.randn(6, 2)
    with pytest.raises(ReplicasTimedOut) as caught:
        model(x)
    assert not hangs.ended.is_set()  # the caller has not waited for it
    hangs.go.set()
    first, *rows = str(caught.value).splitlines()
    assert first == "the replicas must end within 0.3 s, the timeout, which has passed:"
    at = r" in `1\.0`, at .*\.py:\d+" if HAS_GIL else ""
    assert re.fullmatch(f"  replica {replica}: runs{at}", rows[replica])
    state = "waits at `2`, call 1" if last is Centering else "has ended"
    assert all(rows[i] == f"  replica {i}: {state}" for i in {0, 1, 2} - {replica})
    assert hangs.ended.wait(DEADLINE)
    hangs.replica, model.timeout = -1, None
    torch.testing.assert_close(model(x), net(x))


def test_a_forward_that_ends_in_time_does_not_meet_the_limit():
    x = torch.randn(6, 2)
    y = data_parallel(Centering(), x, ["cpu"] * 2, timeout=DEADLINE)
    torch.testing.assert_close(y, x - x.mean(0))


def test_a_replica_that_comes_late_is_a_matter_of_the_limit():
    """Not of the time within which replicas have to begin, which is longer."""
    limit_passed = threading.Event()

    class Late(AsTorchDoes):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            rendezvous_of(replicas).limit_time(LIMIT)

            def run(i: int) -> Any:
                if i == 1:
                    assert limit_passed.wait(DEADLINE)
                try:
                    return replicas[i](*inputs[i], **kwargs[i])
                finally:
                    limit_passed.set()

            return values(together(*(lambda i=i: run(i) for i in range(2))))

    model = Late(Centering(), 2)
    patch_replication_callback(model)
    with pytest.raises(ReplicasTimedOut, match=r"replica 1: has not begun"):
        model(torch.randn(4, 2))


def test_without_the_gil_no_frame_of_another_thread_is_read(monkeypatch):
    monkeypatch.setattr(warning, "_has_gil", lambda: False)
    hangs = Hangs(1, others=1)
    model = DataParallel(nn.Sequential(hangs, Centering()), ["cpu"] * 2, timeout=LIMIT)
    with pytest.raises(ReplicasTimedOut, match=r"replica 1: runs$"):
        model(torch.ones(4, 2))
    hangs.go.set()
    assert hangs.ended.wait(DEADLINE)


def test_by_default_there_is_no_limit():
    assert DataParallel(nn.ReLU(), ["cpu"] * 2).timeout is None


# -- training that is ended --------------------------------------------------------------------

#: Of the delays.
chance = random.Random(0)


class Delay(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(chance.random() / 500)
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


def assert_unchanged(net: nn.Module, state: dict[str, Tensor]) -> None:
    assert soon(all_replicas_have_ended)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name]), f"{name} has changed after the exception"


def assert_step_is_exact(model: nn.Module, net: nn.Module) -> None:
    """The output and the statistics of the next forward."""
    twin = twin_of(net)
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(net.state_dict(), twin.state_dict())


def twin_of(net: nn.Module) -> nn.Sequential:
    """The same on one device, with torch's layers."""
    twin = network()
    twin.load_state_dict(net.state_dict())
    return twin


# -- Ctrl-C at any time ------------------------------------------------------------------------


def interrupted(call: Callable[[], Any], after: float, interval: float = 0.005) -> bool:
    """Whether a `KeyboardInterrupt`, so many seconds later and then again, ended ``call``."""
    is_armed = True

    def interrupt(signum: int, frame: Any) -> None:
        if is_armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # An interrupt in a finalizer or a weakref callback is dropped by Python. The next one counts.
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        signal.setitimer(signal.ITIMER_REAL, after, interval)
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
@pytest.mark.parametrize("interval", [0.0003, 0.003])
def test_interrupted_steps_leave_the_statistics_of_the_layers_that_they_came_to(
    interval, monkeypatch
):
    """One device would have updated the first few layers, and no other, by then.

    The interrupts repeat, so that one strikes while another is handled. No replica waits on.
    """

    def slow_replies(*args: Any) -> Any:
        outputs = merge(*args)
        time.sleep(chance.random() / 500)
        return outputs

    merge, stalled = Joined.merge, []
    monkeypatch.setattr(Joined, "merge", slow_replies)
    monkeypatch.setattr(Rendezvous, "fail_if_stalled", lambda *args: stalled.append(args))
    net = convert_model(network())
    model = ours(net)
    model(torch.randn(7, 3, dtype=torch.float64))
    norms = [name for name, layer in net.named_modules() if hasattr(layer, "running_mean")]
    count = 0
    for _ in range(200):
        x = torch.randn(7, 3, dtype=torch.float64)
        before, twin = state_of(net), twin_of(net)
        count += interrupted(lambda x=x: model(x), chance.random() / 100, interval)
        state = state_of(net)
        assert_unchanged(net, state)
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
    assert count > 100 and not stalled
    monkeypatch.undo()
    assert_step_is_exact(model, net)


# -- at a time when the first replica is about to write ----------------------------------------


class Merging:
    """Holds up the replica that is about to merge the moments and to write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        self.goes_on, self.is_active = threading.Event(), True
        merge = ways._merge

        def late_replies(*args: Any) -> Any:
            if self.is_active:
                act()
                assert self.goes_on.wait(DEADLINE)
            return merge(*args)

        monkeypatch.setattr(ways, "_merge", late_replies)

    def end(self) -> None:
        self.is_active = False
        self.goes_on.set()


@pytest.mark.usefixtures("one_interrupt")
@pytest.mark.parametrize("wrap", [ours, as_torch_does])
def test_nothing_is_written_after_an_interrupt(wrap, monkeypatch):
    main = threading.get_ident()

    def interrupt() -> None:
        while not merging.goes_on.wait(0.01):
            signal.pthread_kill(main, signal.SIGINT)

    merging = Merging(monkeypatch, interrupt)
    net = convert_model(network())
    model = wrap(net)
    before, threads = state_of(net), set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(7, 3, dtype=torch.float64))
    merging.end()
    for thread in set(threading.enumerate()) - threads:
        thread.join(DEADLINE)
    assert_unchanged(net, before)
    assert_step_is_exact(model, net)


def test_nothing_is_written_after_a_timeout(monkeypatch):
    merging = Merging(monkeypatch, lambda: None)
    net = convert_model(network())
    model = ours(net, timeout=0.3)
    before = state_of(net)
    with pytest.raises(ReplicasTimedOut, match="waits at `2`, call 1"):
        model(torch.randn(7, 3, dtype=torch.float64))
    merging.end()
    assert_unchanged(net, before)
    model.timeout = None
    assert_step_is_exact(model, net)


def test_a_finalizer_in_a_replica_may_train_another_model_whatever_it_interrupts(monkeypatch):
    """It strikes while the replica holds the lock of its forward."""
    x = torch.randn(4, 3, dtype=torch.float64)
    inner, outer = (ours(SynchronizedBatchNorm1d(3).double(), 2) for _ in range(2))
    begin, left = Wait.__init__, [lambda: inner(x)]

    def interrupted(*args: Any) -> None:
        while left:
            left.pop()()
        begin(*args)

    monkeypatch.setattr(Wait, "__init__", interrupted)
    values(together(lambda: outer(x)))
    assert inner.module.num_batches_tracked == outer.module.num_batches_tracked == 1


class Late(nn.Module):
    """Ends in replica 0 when it may."""

    def __init__(self, may_end: threading.Event) -> None:
        super().__init__()
        self.may_end = [may_end]

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread().name == "replica-0":
            assert self.may_end[0].wait(DEADLINE)
        return x


@pytest.mark.parametrize("inside", ["a group of one", "replicas of a replica"])
def test_layers_without_copies_in_the_abandoned_forward_write_nothing(inside):
    """They write by torch's own batch norm, or in a forward that begins after the exception."""
    may_end = threading.Event()
    layer: nn.Module = SynchronizedBatchNorm1d(3, group_size=1).double()
    if inside == "replicas of a replica":
        layer = ours(SynchronizedBatchNorm1d(3).double(), 2)
    net = nn.Sequential(Late(may_end), layer)
    before = state_of(net)
    with pytest.raises(ReplicasTimedOut):
        ours(net, 2, timeout=0.05)(torch.randn(8, 3, dtype=torch.float64))
    may_end.set()
    assert_unchanged(net, before)


# -- at every place where Python lets an interrupt in ------------------------------------------


#: The modules that change the state of the caller's thread, and of a model that is patched.
RUNNING = ("replication.callbacks", "replication.patch", "replication.steps.parallel_apply")
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
            assert current_replica() is None
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
        assert current_replica() is None
        place += 1
    assert place > 10


def test_an_interrupt_of_a_put_leaves_no_getter_waiting():
    future, place, is_reached = FutureResult(), 0, True
    while is_reached:
        getter = threading.Thread(target=future.get, daemon=True)
        getter.start()
        assert soon(lambda: bool(future._waits))
        is_reached = interrupted_at(place, lambda: future.put("first"))
        with contextlib.suppress(ReplicationError):  # if the first is there already
            future.put("again")
        assert ends(getter)
        with contextlib.suppress(ReplicationError):  # if it was put after the getter had the first
            future.put(None)
        future.get()
        place += 1
    assert place > 3


def test_an_interrupt_of_a_get_leaves_the_mailbox_to_the_next_getter():
    future, place, is_reached = FutureResult(), 0, True
    while is_reached:
        with contextlib.suppress(ReplicationError):  # if the result is there still
            future.put(place)
        is_reached = interrupted_at(place, future.get)
        with contextlib.suppress(ReplicationError):
            future.put(place)
        assert future.get() == place
        place += 1
    assert place > 2


def test_an_interrupt_of_a_patch_or_of_its_removal_leaves_a_model_patched_or_not():
    model = AsTorchDoes(convert_model(network()), 2)
    before = dict(vars(model))
    place, patched = 0, set()
    while interrupted_at(place, lambda: patch_replication_callback(model).remove()):
        assert vars(model) == before
        patched.add(type(model) is not AsTorchDoes)
        handle = patch_replication_callback(model)
        assert_step_is_exact(model, model.module)
        handle.remove()
        assert type(model) is AsTorchDoes
        place += 1
    assert patched == {False, True}


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


@pytest.mark.parametrize("block", [partial(wait_report, quiet=True), patch_sync_batchnorm])
def test_an_interrupt_of_a_block_ends_it(block):
    names = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    modules = ("replication.diagnosis.waits", "syncbn.compat")

    def enter() -> None:
        with block():
            pass

    place = 0
    while interrupted_at(place, enter, modules):
        assert not observation.open_reports
        assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == names
        place += 1
    assert place > 3
