"""Threads of replicas, which live on: each runs one job after the other.

Problem: torch keeps caches per thread. cuDNN's plans of convolutions, for example, are made again
in every new thread, and stay in memory when it ends (pytorch issues 103939 and 169153).

Idea: a thread belongs to the index of a replica and to a device, and serves the forwards of any
model. While it waits for the next job it holds nothing of the last one. Two forwards at a time, or
inside each other, use different threads, and so does a caller that has made far fewer nodes.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from replication._torch import has_modes, nodes_made


class Outcome(NamedTuple):
    """What a job has returned or raised."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """Returns the value, or raises the error."""
        error = self.error
        if error is None:
            return self.value
        try:
            raise error
        finally:
            # The traceback of the error refers to this frame. Such a cycle would keep the whole
            # forward alive until the next garbage collection.
            del error, self


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Runs a job, in a frame that has ended when others read the traceback of its error."""
    try:
        return Outcome(job())
    except BaseException as error:
        del job  # as above
        return Outcome(error=error)


#: A worker that has done its job, the outcome, and `Worker.nodes`.
Report = tuple["Worker", Outcome, int]
Done = SimpleQueue[Report]

#: The number of idle workers that are kept for each index and device.
_MOST_IDLE = 16

#: Idle workers by index and device, the latest last, and those at work.
_idle: dict[tuple[int, torch.device], list[Worker]] = {}
_busy: set[Worker] = set()


class Worker:
    """The handle of a thread: idle, or in use by one forward. Without a handle the thread ends."""

    def __init__(self, index: int, device: torch.device) -> None:
        self.index, self.device = index, device
        #: The number of autograd nodes that the thread had made when its last job ended.
        self.nodes = 0
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=[self._jobs], name=f"idle replica-{index}", daemon=True
        )
        try:
            self.thread.start()
        except BaseException as error:
            interrupt = error.__context__
            if isinstance(interrupt, KeyboardInterrupt):  # `threading` may fail on its way out
                try:
                    raise interrupt from None
                finally:
                    del interrupt, self  # as in `Outcome.unwrap`
            raise

    def __del__(self) -> None:
        self._jobs.put(None)

    @classmethod
    def take(cls, index: int, device: torch.device, most: float) -> Worker:
        """Returns the idle worker that has made the most nodes up to a number, or a new worker."""
        idle = _idle.setdefault((index, device), [])
        for worker in sorted(idle, key=lambda worker: worker.nodes, reverse=True):
            if worker.nodes <= most and worker.thread.is_alive():
                with suppress(ValueError):  # another forward has taken it
                    idle.remove(worker)
                    return worker
        return cls(index, device)

    def start(self, job: Callable[[], Any], done: Done) -> None:
        """Lets the thread run a job, in a copy of the caller's context variables."""
        work = self, partial(contextvars.copy_context().run, job), done
        try:
            _busy.add(self)
            self._jobs.put(work)
        except BaseException:  # a Ctrl-C: without a job, the thread must end
            _busy.discard(self)
            raise

    def rest(self) -> None:
        """Makes this worker idle. If many are, the first of them ends."""
        idle = _idle.setdefault((self.index, self.device), [])
        idle.append(self)
        del idle[:-_MOST_IDLE]


def _work(jobs: SimpleQueue[Any]) -> None:
    while (work := jobs.get()) is not None:
        worker, job, done = work
        del work
        worker.thread.name = f"replica-{worker.index}"
        outcome = outcome_of(job)
        del job
        worker.thread.name = f"idle replica-{worker.index}"
        worker.nodes = nodes = nodes_made()
        _busy.discard(worker)
        # Before the report, so that the caller's next forward finds it. A thread in which user
        # code has left modes behind ends.
        if not has_modes():
            worker.rest()
        done.put((worker, outcome, nodes))
        del worker, outcome, done


@atexit.register
def _await_abandoned() -> None:
    """Waits a little for replicas that were left: torch aborts if Python ends meanwhile."""
    end = time.monotonic() + 1.5
    while any(worker.thread.is_alive() for worker in list(_busy)) and time.monotonic() < end:
        time.sleep(0.01)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)  # the child has no such threads
    os.register_at_fork(after_in_child=_busy.clear)
