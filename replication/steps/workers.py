"""Threads of replicas, which live on: each runs one job after the other.

Problem: torch keeps caches per thread. cuDNN's plans of convolutions, for example, are made again
in every new thread, and stay in memory when it ends (pytorch issues 103939 and 169153).

Idea: a thread belongs to the index of a replica and to a device, and serves the forwards of any
model. While it waits for the next job it holds nothing of the last one. Two forwards at a time, or
inside each other, use different threads, and so does a caller that has made far fewer nodes, or
whose new threads would begin otherwise. Idle threads that no recent forward has used end.
"""

from __future__ import annotations

import atexit
import contextvars
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from replication._torch import nodes_made
from replication.steps.thread_state import state_of_this_thread


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


#: A worker that has done its job, the outcome, and `Worker.nodes`.
Report = tuple["Worker", Outcome, int]
Done = SimpleQueue[Report]

#: Seconds without a job after which a thread ends, unless it is the last that has had one.
_PATIENCE = 60.0

#: Seconds after which a thread that waits for a job runs for a moment. In builds that can do
#: without the GIL, an object that its thread has made and another one drops is freed when its
#: thread runs. So an idle thread would keep outputs and errors of its last forward.
_POLL = 1.0 if sysconfig.get_config_var("Py_GIL_DISABLED") else math.inf

#: The index of a replica and its device.
Key = tuple[int, torch.device]

#: Idle workers, the latest last, and those at work.
_idle: dict[Key, list[Worker]] = {}
_busy: set[Worker] = set()


class Worker:
    """The handle of a thread: idle, or in use by one forward. Without a handle the thread ends."""

    def __init__(self, key: Key, begins: object) -> None:
        self.key = key
        #: The caller's `state_of_new_threads` when the thread was made.
        self.begins = begins
        #: The number of autograd nodes that the thread had made when its last job ended.
        self.nodes = 0
        #: The job that the thread has not begun, and the queue for its report.
        self.work: list[tuple[Callable[[], Any], Done]] = []
        self._jobs: SimpleQueue[Worker | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_work, args=[self._jobs, key], name=f"idle replica-{key[0]}", daemon=True
        )
        try:
            self.thread.start()
        except BaseException as error:
            interrupt = error.__context__
            if isinstance(interrupt, KeyboardInterrupt):  # `threading` may fail on its way out
                try:
                    raise interrupt from None
                finally:
                    del interrupt, self
            raise

    def __del__(self) -> None:
        self._jobs.put(None)

    @classmethod
    def take(cls, key: Key, most: float, begins: object) -> Worker:
        """An idle worker like a new thread, with the most nodes up to a number, or a new one."""
        idle = _idle.setdefault(key, [])
        # Of several, the one that has served last, so that the others are found to be idle.
        latest_first = idle[::-1]
        latest_first.sort(key=lambda worker: worker.nodes, reverse=True)
        for worker in latest_first:
            if worker.nodes <= most and worker.begins == begins:
                with suppress(ValueError):  # another forward has taken it
                    idle.remove(worker)
                    if worker.thread.is_alive():
                        return worker
        return cls(key, begins)

    def start(self, job: Callable[[], Any], done: Done) -> None:
        """Lets the thread run a job, in a copy of the caller's context variables."""
        self.work.append((partial(contextvars.copy_context().run, job), done))
        try:
            _busy.add(self)
            self._jobs.put(self)
        except BaseException:  # a Ctrl-C: without a job, the thread must end
            _busy.discard(self)
            raise

    def successor(self) -> Worker | None:
        """A new worker that runs the job, if the thread has ended before it has begun it."""
        if not self.work:
            return None
        _busy.discard(self)
        successor = Worker(self.key, self.begins)
        successor.start(*self.work.pop())
        return successor


def _work(jobs: SimpleQueue[Worker | None], key: Key) -> None:
    begun, is_as_new = state_of_this_thread(), True
    while is_as_new and (worker := _next_worker(jobs, key)) is not None:
        job, done = worker.work.pop()
        hooks = sys.gettrace(), sys.getprofile()  # debuggers change those of idle threads as well
        worker.thread.name = f"replica-{key[0]}"
        outcome = outcome_of(job)
        del job
        worker.thread.name = f"idle replica-{key[0]}"
        worker.nodes = nodes = nodes_made()
        _busy.discard(worker)
        is_as_new = state_of_this_thread() == begun and (sys.gettrace(), sys.getprofile()) == hooks
        if is_as_new:  # before the report, so that the caller's next forward finds it
            _idle.setdefault(key, []).append(worker)
        done.put((worker, outcome, nodes))
        del worker, outcome, done, hooks


def _next_worker(jobs: SimpleQueue[Worker | None], key: Key) -> Worker | None:
    """Waits for a job. Returns the handle of this thread, or None if it must end."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return jobs.get(timeout=min(_POLL, _PATIENCE))
        except Empty:
            if time.monotonic() >= end and _retires(jobs, key):
                return None


def _retires(jobs: SimpleQueue[Worker | None], key: Key) -> bool:
    """Takes a thread that has waited long out of the idle ones, unless it is the last."""
    idle = _idle.get(key, [])
    own = [worker for worker in idle[:-1] if worker._jobs is jobs]
    with suppress(IndexError, ValueError):  # it is the last, or a forward has just taken it
        idle.remove(own.pop())
        return True
    return False


_ending = threading.Event()


def stop_if_ending() -> None:
    """Stops a daemon thread for good once the interpreter ends, which would stop it later on."""
    if _ending.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


@atexit.register
def _await_last() -> None:
    """Waits a little for forwards under way: torch aborts if Python ends while it computes."""
    _ending.set()
    end = time.monotonic() + 1.5
    is_over = not _idle  # nothing has run
    while not is_over and time.monotonic() < end:
        time.sleep(0.01)  # at least once, for what callers do after their replicas
        is_over = not any(worker.thread.is_alive() for worker in list(_busy))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)  # the child has no such threads
    os.register_at_fork(after_in_child=_busy.clear)
