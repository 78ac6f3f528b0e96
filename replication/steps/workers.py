"""Threads of replicas, which live on: each runs one job after the other.

Problem: torch keeps caches per thread. cuDNN's plans of convolutions, for example, are made again
in every new thread, and stay in memory when it ends (pytorch issues 103939 and 169153).

Idea: a thread belongs to the index of a replica and to a device, and serves the forwards of any
model. While it waits for the next job it holds nothing of the last one. Two forwards at a time, or
inside each other, use different threads. What a replica leaves in its thread stays there, unless
`ThreadState` sets it.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import time
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch


class Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        error = self.error
        if error is None:
            return self.value
        try:
            raise error
        finally:
            # The traceback of an error refers to each frame that it has passed. A frame that keeps
            # the error closes a cycle, which would keep the whole forward alive until the next
            # garbage collection. So each frame here that raises or catches an error forgets it.
            del error, self


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Runs a job, in a frame that has ended when others read the traceback of its error."""
    try:
        return Outcome(job())
    except BaseException as error:
        del job
        return Outcome(error=error)


#: What a thread runs, and what it calls with the outcome.
Job = tuple["Worker", Callable[[], Any], Callable[[Outcome], object]]

#: The index of a replica and its device.
Key = tuple[int, torch.device]

#: Idle workers, the latest last, and those at work.
_idle: dict[Key, list[Worker]] = {}
_busy: set[Worker] = set()


class Worker:
    """The handle of a thread: idle, or in use by one forward. Without a handle the thread ends."""

    def __init__(self, key: Key) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=[self._jobs, key], name=f"idle replica-{key[0]}", daemon=True
        )
        self.thread.start()

    def __del__(self) -> None:
        self._jobs.put(None)

    @classmethod
    def take(cls, key: Key) -> Worker:
        """An idle worker, or a new one."""
        with suppress(IndexError):
            return _idle.setdefault(key, []).pop()
        return cls(key)

    def start(self, job: Callable[[], Any], report: Callable[[Outcome], object]) -> None:
        """Lets the thread run a job, in a copy of the caller's context variables."""
        _busy.add(self)
        self._jobs.put((self, partial(contextvars.copy_context().run, job), report))


def _work(jobs: SimpleQueue[Job | None], key: Key) -> None:
    while (given := jobs.get()) is not None:
        worker, job, report = given
        worker.thread.name = f"replica-{key[0]}"
        outcome = outcome_of(job)
        del given, job
        worker.thread.name = f"idle replica-{key[0]}"
        _busy.discard(worker)
        _idle.setdefault(key, []).append(worker)  # so that the caller's next forward finds it
        report(outcome)
        del worker, outcome, report


# The threads write down what they have begun and ended, and the caller only reads it. An interrupt
# of the caller therefore loses nothing, at most a ring of the bell, so it looks once a second.
class _Nursery:
    """The jobs of one call of `run_all`."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[tuple[int, Outcome]] = []
        self.is_cancelled = False
        self._bell: SimpleQueue[None] = SimpleQueue()

    def run(self, index: int, job: Callable[[], Any]) -> Any:
        self.begun.append(index)
        return None if self.is_cancelled else job()

    def report(self, index: int, outcome: Outcome) -> None:
        self.ended.append((index, outcome))
        self._bell.put(None)

    def wait_for(self, indices: Sized) -> None:
        while len(self.ended) < len(indices):
            with suppress(Empty):
                self._bell.get(timeout=1.0)


def run_all(jobs: Mapping[Key, Callable[[], Any]], interrupted: Callable[[], object]) -> list[Any]:
    """Runs each job in its thread. When all have ended, returns their values in order.

    Raises the first error, by time. If the caller is interrupted, it calls ``interrupted``, which
    should end the jobs, and still awaits them. A second interrupt is raised at once.
    """
    nursery = _Nursery()
    try:
        try:
            for index, (key, job) in enumerate(jobs.items()):
                run, report = partial(nursery.run, index, job), partial(nursery.report, index)
                Worker.take(key).start(run, report)
            nursery.wait_for(jobs)
        except BaseException:
            nursery.is_cancelled = True  # those that have not begun do nothing
            interrupted()
            nursery.wait_for(nursery.begun)
            raise
        values: dict[int, Any] = {}
        for index, outcome in nursery.ended:
            values[index] = outcome.unwrap()
        return [values[index] for index in range(len(jobs))]
    finally:
        nursery.ended.clear()  # this frame forgets errors (see `Outcome.unwrap`)
        outcome = Outcome()


@atexit.register
def _await_busy() -> None:
    """Waits a little for replicas that run: torch aborts if Python ends while it computes."""
    end = time.monotonic() + 1.5
    while _busy and time.monotonic() < end:
        time.sleep(0.01)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)  # the child has no such threads
    os.register_at_fork(after_in_child=_busy.clear)
