"""What holds for every test: one seed, one torch thread, and no thread left waiting behind it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from syncbn import joining

# The time of an example varies. The examples are the same in every run, so that a failure can be
# run again.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")

#: Seconds that a thread has to come to rest after a test.
DEADLINE = 10.0


def pytest_configure(config: pytest.Config) -> None:
    # With more, the threads of several replicas compete for the cores.
    torch.set_num_threads(1)
    # For the tests of the benchmarks, which are not installed. Installed packages come first.
    sys.path.append(str(Path(__file__).parent.parent))


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch: {torch.__version__}"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fails a test that leaves a thread behind, other than a worker that waits for its next call.

    A replica that waits for a message that never comes is such a thread.
    """
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + DEADLINE
    for thread in set(threading.enumerate()) - before:
        while not _is_at_rest(thread):
            assert time.monotonic() < end, f"the test has left {thread} running"
            thread.join(0.01)


@pytest.fixture(params=["joined", "apart"], scope="module")
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small shards as they are normalized, and as if they were large; see `syncbn.joining`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "apart":
            patch.setattr(joining, "SMALL", -1)
        yield


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shards as if they were large."""
    monkeypatch.setattr(joining, "SMALL", -1)


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
    # Of a pool of threads, which the compiler has, likewise.
    waits = {"replica-": "_serve", "ThreadPoolExecutor-": "_worker"}
    place = frame.f_code.co_name
    return any(thread.name.startswith(kind) and place == where for kind, where in waits.items())
