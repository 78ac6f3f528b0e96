"""What holds for every test: one seed, one torch thread, and no thread left waiting behind it."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from replication.devices import default_devices
from syncbn import replicas
from tests import accelerator
from tests.kit import (
    properties,  # noqa: F401  # loads the profile of Hypothesis
)
from tests.kit import stand_in_kernels as stand_ins
from tests.kit.deadlines import TEST_STALLED, Deadline, is_idle, soon

collect_ignore = ["programs"]  # they would run when doctests are looked for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated-accelerator",
        action="store_true",
        help="run the tests marked `accelerator`, on simulated devices (see tests/accelerator)",
    )
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests in each, in random order"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets background programs ignore SIGINT, which some tests send.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--simulated-accelerator"):  # before a test module asks what there is
        accelerator.register()
    # With more, the threads of several replicas compete for the cores.
    torch.set_num_threads(1)
    if hasattr(signal, "SIGUSR1"):  # not on Windows
        signal.signal(signal.SIGUSR1, _fail_running_test)
    threading.Thread(target=_end_hangs, args=(config,), name="watchdog", daemon=True).start()


#: The test that runs.
_running: list[pytest.Item] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.remove(item)


def _end_hangs(config: pytest.Config) -> None:
    """Fails a test that makes no progress, with the stack of every thread in its report.

    If that does not end the test, because it hangs outside of Python or catches the failure, ends
    the run after a report of the tests so far. ``faulthandler_timeout`` in ``setup.cfg`` is the
    last resort: it knows wall-clock time only.
    """
    item, deadline, has_failed = None, Deadline(), False
    while True:
        time.sleep(1)  # between two looks at the running test
        running = next(iter(_running), None)
        if running is not item:
            item, deadline, has_failed = running, Deadline(TEST_STALLED), False
        elif item is not None and deadline.has_passed():
            ends_run = has_failed or not hasattr(signal, "SIGUSR1")
            if ends_run:
                config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
            print(f"\n{item.nodeid} hangs", file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__)
            if ends_run:
                reporter = config.pluginmanager.getplugin("terminalreporter")
                reporter.summary_failures()
                reporter.summary_stats()
                sys.__stdout__.flush()
                os._exit(1)
            deadline, has_failed = Deadline(TEST_STALLED), True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)


def _fail_running_test(signum: int, frame: Any) -> None:
    if _running:  # otherwise it has ended meanwhile
        pytest.fail("the test makes no progress")


@pytest.hookimpl(tryfirst=True)  # then pytest joins the tests that share a fixture
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles, and leaves out the tests that suppose a machine without an accelerator."""
    if (seed := config.getoption("--shuffle")) is not None:
        chance = random.Random(seed)
        places = {item.path: chance.random() for item in items}
        items.sort(key=lambda item: (places[item.path], chance.random()))
    if config.getoption("--simulated-accelerator"):
        chosen = list(filter(_is_for_accelerators, items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names shapes, dtypes, lists and the like as they are printed, if that is short."""
    if getattr(val, "__name__", "") == "<lambda>":
        return argname  # beside other values that tell the cases apart
    if not isinstance(val, (list, tuple, dict, torch.dtype)):
        return None
    text = str(val).removeprefix("torch.")
    if isinstance(val, tuple):
        text = ", ".join(getattr(item, "__name__", str(item)) for item in val)
    return text if 0 < len(text) <= 60 and " at 0x" not in text else None


def pytest_collection_finish() -> None:
    """Lets collections of garbage, which many tests make, pass over what torch and pytest hold."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch: {torch.__version__}"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    # Code that torch 2.4 compiles switches it on, and then 0 has no next float for Hypothesis.
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def default_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Makes modules and batches of tests for accelerators on the first one, if there is any.

    All other tests, but those of GPUs, run as on a machine without accelerators.
    """
    with ExitStack() as stack:
        devices = default_devices()
        if devices and _is_for_accelerators(request.node):
            stack.enter_context(devices[0])
        elif devices and not request.node.get_closest_marker("gpu"):
            module = torch.get_device_module(devices[0])
            stack.enter_context(mock.patch.object(module, "is_available", return_value=False))
            stack.enter_context(mock.patch.object(module, "device_count", return_value=0))
            stack.enter_context(mock.patch.object(module, "synchronize"))
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of processes that the test starts
        yield


def _is_for_accelerators(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("accelerator")) and not item.get_closest_marker("cpu")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fails a test that leaves a thread behind, such as a replica whose message never comes."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        assert soon(partial(_is_at_rest, thread)), f"the test has left {thread} running"


@pytest.fixture
def not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes small shards on the CPU as large ones, and as on accelerators."""
    monkeypatch.setattr(replicas, "LARGEST_JOINED", -1)


@pytest.fixture(params=["textbook", "kernels"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU compute as devices without kernels do, or as accelerators do."""
    found = stand_ins.AS_ON_ACCELERATORS if request.param == "kernels" else None
    monkeypatch.setattr("syncbn.batchnorm.kernels_for", lambda kind: found)


@pytest.fixture(params=["joined", "not joined"])
def joined_or_not(request: pytest.FixtureRequest) -> None:
    """Runs a test on both fast paths of small shards on the CPU."""
    if request.param == "not joined":
        request.getfixturevalue("not_joined")
    elif _is_for_accelerators(request.node) and default_devices():
        pytest.skip("shards on accelerators are never joined")


@pytest.fixture
def one_interrupt() -> Iterator[None]:
    """Of several SIGINTs the first alone interrupts: one that comes right before the main thread
    goes to sleep is noticed only when it wakes up, so that it takes several."""

    def interrupt(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def _is_at_rest(thread: threading.Thread) -> bool:
    # Made by torch's autograd engine, or by a progress bar of what torch uses, to stay.
    if isinstance(thread, threading._DummyThread) or type(thread).__module__.startswith("tqdm."):
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    if not thread.is_alive() or frame is None:
        return True
    if is_idle(thread):
        return True
    if thread.name.endswith("(_read_thread)"):  # of the compiler of torch 2.4
        return True
    # A thread of a pool, which the compiler has, waits for its next call.
    return thread.name.startswith("ThreadPoolExecutor-") and frame.f_code.co_name == "_worker"
