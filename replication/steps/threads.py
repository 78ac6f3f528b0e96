"""The pool of threads that run replicas, and what a replica takes over from its caller.

Problem: torch keeps caches per thread. cuDNN's plans of convolutions, for example, are made again
in every new thread, and stay in memory when it ends (pytorch issues 103939 and 169153).

Idea: a thread belongs to the index of a replica and to a device. It runs one job after the other,
of any model, and holds nothing in between. Each job sets what the caller has: modes, streams, and
context variables. What else a replica leaves in its thread stays there, like in every pool. Two
forwards at a time, or inside each other, use different threads.

A forward is a nursery: the caller collects the outcome of every job before it goes on. If a Ctrl-C
interrupts it, the jobs are told to end, and the caller still awaits them. Only a second Ctrl-C
leaves jobs behind.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch

from replication._torch import has_modes, set_grad_modes
from replication.devices import accelerator, current_stream, use_device
from replication.sync.rendezvous import LOOK_AGAIN

#: Seconds that the end of the interpreter waits for replicas that a second Ctrl-C has left.
_LAST_SECONDS = 1.5


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


# -- the pool ----------------------------------------------------------------------------------

#: The index of a replica and its device.
Key = tuple[int, torch.device]

#: A worker, its job, and what its thread calls with the outcome.
Job = tuple["Worker", Callable[[], Any], Callable[[Outcome], object]]

#: The idle workers, the latest last.
_idle: dict[Key, list[Worker]] = {}
#: The workers that run a job.
_running: set[Worker] = set()


class Worker:
    """The handle of a thread: idle, or in use by one job. The thread ends when it is freed."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        # A daemon, because Python waits for other threads, even idle ones, before it ends.
        self.thread = threading.Thread(
            target=_work, args=[self._jobs], name=f"idle replica-{key[0]}", daemon=True
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
        # The queue, and then the thread, hold this handle until the job has ended.
        self._jobs.put((self, partial(contextvars.copy_context().run, job), report))


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (given := jobs.get()) is not None:
        worker, job, report = given
        worker.thread.name = f"replica-{worker.key[0]}"
        _running.add(worker)
        outcome = outcome_of(job)
        del given, job  # the caller, which goes on after the last report, finds them freed
        worker.thread.name = f"idle replica-{worker.key[0]}"
        _running.discard(worker)
        _idle.setdefault(worker.key, []).append(worker)  # where the next forward looks for it
        report(outcome)
        del worker, outcome, report


@atexit.register
def _await_running() -> None:
    """Gives running replicas some time: torch aborts if Python ends while it computes."""
    end = time.monotonic() + _LAST_SECONDS
    while _running and time.monotonic() < end:
        time.sleep(0.01)


if hasattr(os, "register_at_fork"):  # Windows has no forks
    # The child has none of their threads.
    os.register_at_fork(after_in_child=_idle.clear)
    os.register_at_fork(after_in_child=_running.clear)


# -- the jobs of one forward -------------------------------------------------------------------


# The threads write down what they have begun and ended, and the caller only reads it. A queue of
# reports would lose one if a Ctrl-C came right after the caller has taken it from the queue.
class _Nursery:
    """The jobs of one call of `run_all`, and which have begun and ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun: list[int] = []
        self.ended: list[tuple[int, Outcome]] = []
        self.is_cancelled = False
        self._bell: SimpleQueue[None] = SimpleQueue()

    def run(self, index: int, job: Callable[[], Any]) -> Any:
        # In this order: the caller cancels first and then reads, so it misses no job that runs.
        self.begun.append(index)
        return None if self.is_cancelled else job()

    def report(self, index: int, outcome: Outcome) -> None:
        self.ended.append((index, outcome))
        # After the last one only: the caller takes the GIL to look, which slows the others down.
        if self.is_cancelled or len(self.ended) == self.size:
            self._bell.put(None)

    def wait(self) -> None:
        """Waits until all jobs have ended, or all that had begun when they were cancelled."""
        while len(self.ended) < (len(self.begun) if self.is_cancelled else self.size):
            with suppress(Empty):
                self._bell.get(timeout=LOOK_AGAIN)  # an interrupt may lose the ring


def run_all(jobs: Mapping[Key, Callable[[], Any]], abort: Callable[[], object]) -> list[Any]:
    """Runs each job in its thread. When all have ended, returns their values in order.

    A single job runs in the calling thread.

    Raises the first error, by time. If the caller is interrupted, it calls ``abort``, which should
    end the jobs, awaits them and raises the interrupt. A second interrupt is raised at once.
    """
    if len(jobs) == 1:
        return [job() for job in jobs.values()]
    nursery = _Nursery(len(jobs))
    try:
        try:
            for index, (key, job) in enumerate(jobs.items()):
                run, report = partial(nursery.run, index, job), partial(nursery.report, index)
                Worker.take(key).start(run, report)
            nursery.wait()
        except BaseException:
            nursery.is_cancelled = True  # jobs that have not begun do nothing
            abort()
            nursery.wait()
            raise
        values: dict[int, Any] = {}
        for index, outcome in nursery.ended:
            values[index] = outcome.unwrap()
        return [values[index] for index in range(len(jobs))]
    finally:
        # This frame forgets errors (see `Outcome.unwrap`), also the one in the loop's variable.
        nursery.ended.clear()
        outcome = Outcome()


# -- what a job takes over from its caller -----------------------------------------------------


def _flushes_denormals() -> bool:
    return sys.float_info.min * 0.5 == 0.0  # torch can set it, but not tell


def _default_device() -> torch.device:
    return torch.empty(0).device if has_modes() else torch.device("cpu")


def _autocast_state(kind: str) -> tuple[torch.dtype, bool, bool]:
    """The arguments of `torch.autocast` that give the state of this thread."""
    dtype, is_enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return dtype, is_enabled, torch.is_autocast_cache_enabled()


def _let_new_threads_begin_with(torch_threads: int) -> None:
    """Sets the number of intra-op threads of threads that will be made, but not of this one."""
    # They begin with the number that was set last, in any thread.
    other = threading.Thread(target=torch.set_num_threads, args=[torch_threads])
    other.start()
    other.join()


class CallerState:
    """What the caller of a forward has when it is made, for the threads of its replicas."""

    def __init__(self, devices: Sequence[torch.device], torch_threads: int) -> None:
        #: The number of intra-op threads of a replica and of the caller.
        self.torch_threads, self.callers_torch_threads = torch_threads, torch.get_num_threads()
        self.flushes = _flushes_denormals()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = _default_device()
        kinds = {"cpu", accelerator() or "cpu", *[device.type for device in devices]}
        self.autocast = {
            kind: _autocast_state(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }
        self.streams = {device: current_stream(device) for device in dict.fromkeys(devices)}
        # Tensors from other replicas are on their devices, in the caller's streams.
        self.side_streams = {
            d: s for d, s in self.streams.items() if s is not None and s.stream_id
        }

    def enter(self, stack: ExitStack, device: torch.device) -> None:
        """Sets the state of this thread, which runs a replica on ``device``.

        Modes and streams last until ``stack`` is closed, the rest until the next job.
        """
        if torch.get_num_threads() != self.torch_threads:
            torch.set_num_threads(self.torch_threads)
            _let_new_threads_begin_with(self.callers_torch_threads)
        if _flushes_denormals() != self.flushes:
            torch.set_flush_denormal(self.flushes)
        set_grad_modes(stack, grad=self.grad, inference=self.inference)
        if (default := self.default_device) != _default_device():
            # A default of "cuda" means the replica's own device instead of the caller's.
            stack.enter_context(device if default.type == device.type else default)
        for kind, state in self.autocast.items():
            if _autocast_state(kind) != state:
                stack.enter_context(torch.autocast(kind, *state))
        for other, stream in self.side_streams.items():
            if other != device:
                use_device(stack, other, stream)
        use_device(stack, device, self.streams[device])
