"""The worker threads: each replica runs in one, in the caller's thread state; first error wins."""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import nn

from replication.checks import check_list
from replication.devices import (
    DeviceLike,
    accelerator,
    current_stream,
    device_of,
    parse_devices,
    use_device,
)
from replication.errors import ReplicasTimedOut, ReplicationError
from replication.notes import add_note, has_origin, origin
from replication.observation import named_range
from replication.torch_internals import in_functorch_transform, make_nodes, nodes_made
from replication.watch import Attendance, first_failure_wins, watched_call

__all__ = ["parallel_apply"]


def parallel_apply(
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Calls ``replicas[i](*inputs[i], **kwargs_tup[i])`` for all i at once, each in a thread.

    The threads are named ``replica-0``, ``replica-1``, ...; they serve the calling thread from
    call to call and never keep the interpreter alive. They see its grad mode, inference mode,
    autocast state and dtype for each type of device, default device (of a default on the type of
    device that the replica is on, the replica's own), streams, and context variables. A single
    replica runs in the calling thread.

    Args:
        replicas: The modules to call.
        inputs: One tuple (or list) of positional arguments for each, or one that is no tuple.
        kwargs_tup: One dict of keyword arguments for each.
        devices: The device that is current while each runs; by default that of its first tensor.

    Returns:
        The outputs, in the order of ``replicas``.

    Raises:
        ValueError: The lists differ in length.
        TypeError: ``inputs`` or ``kwargs_tup`` is no list.
        RuntimeError: It is called in a transform of `torch.func`, or while the interpreter ends.
        BaseException: The first error, by time, of any replica, after all have ended; a note names
            the replica and its device. `KeyboardInterrupt` in the caller, what is no `Exception`
            in a replica, such as `SystemExit`, and `ReplicasTimedOut` are raised at once.
    """
    n = len(replicas)
    kwargs_tup = [{}] * n if kwargs_tup is None else kwargs_tup
    if devices is None:
        targets = [device_of(replica) or torch.device("cpu") for replica in replicas]
    else:
        targets = parse_devices(devices)
    for name, items in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", targets)):
        check_list(name, items)
        if len(items) != n:
            raise ValueError(f"expected one of {name} for each of {n} replicas (got {len(items)})")
    if n > 1 and in_functorch_transform():
        raise RuntimeError(
            "torch.func transforms do not reach the threads that replicas run in, so that their "
            "derivatives would be lost; transform a function that calls the module itself"
        )
    state = ThreadState(targets)
    calls = []
    for index, replica in enumerate(replicas):
        args = inputs[index]
        args = args if isinstance(args, (list, tuple)) else (args,)
        calls.append(partial(state.run, index, replica, args, kwargs_tup[index]))
    # The caller's torch threads are shared by the replicas on the CPU: with as many in each they
    # would wait for each other.
    on_cpu = sum(device.type == "cpu" for device in targets)
    threads = max(1, torch.get_num_threads() // max(1, on_cpu))
    return first_failure_wins(_run_all, replicas, calls, threads)


def _run_all(
    replicas: Sequence[nn.Module], calls: Sequence[Callable[[], Any]], threads: int
) -> list[Any]:
    if len(calls) == 1:
        return [calls[0]()]
    if sys.is_finalizing():  # no thread but this one runs any more
        raise RuntimeError("replicas are called, by a finalizer say, while the interpreter ends")
    outputs: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []
    try:
        with borrowed_workers(len(calls)) as workers:
            for worker in workers:
                worker.use_threads(threads)
            if not _collect(workers, calls, outputs, failures):
                raise failures[-1]  # inside the block, as workers are still busy
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # the traceback of an error refers to this frame
    return outputs


def _collect(
    workers: Sequence[Worker],
    calls: Sequence[Callable[[], Any]],
    outputs: list[Any],
    failures: list[BaseException],
) -> bool:
    """Makes all calls and awaits their results. Returns whether all of them have ended: a failure
    that is to end the program, such as SystemExit, does not wait for the others, nor does one that
    says that they have been waited for."""
    done: SimpleQueue[Outcome] = SimpleQueue()
    nodes = max((worker.nodes for worker in workers), default=0)
    if torch.is_anomaly_enabled():  # which makes a node a matter of milliseconds
        nodes = 0
    elif torch.is_grad_enabled() and abs(nodes - nodes_made()) <= _FEW_NODES:  # the caller, too
        make_nodes(max(0, nodes - nodes_made()))
        nodes = nodes_made()
    for index, (worker, call) in enumerate(zip(workers, calls, strict=True)):
        # A Context cannot be entered by two threads: each has its own copy.
        worker.submit(Task(index, partial(contextvars.copy_context().run, call), done, nodes))
    for _ in calls:
        index, outputs[index], failure, nodes = _next(done)
        workers[index].nodes = nodes
        if failure is not None:
            failures.append(failure)
            kind = type(failure)
            if not issubclass(kind, Exception) or issubclass(kind, ReplicasTimedOut):
                return False
    return True


def _next(done: SimpleQueue[Outcome]) -> Outcome:
    """What comes next. Looks up now and then: of a Ctrl-C that comes right before it goes to sleep
    a thread learns only when it wakes up."""
    while True:
        with suppress(Empty):
            return done.get(timeout=1.0)


class ThreadState:
    """What torch keeps per thread, as it is in the calling thread."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.streams = [current_stream(device) for device in devices]
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = torch.empty(0).device
        kinds = {"cpu", accelerator() or "cpu", *(device.type for device in devices)}
        kinds = set(filter(torch.amp.is_autocast_available, kinds))
        self.autocast = [
            partial(
                torch.autocast,
                kind,
                enabled=torch.is_autocast_enabled(kind),
                dtype=torch.get_autocast_dtype(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in sorted(kinds)
        ]

    def run(self, index: int, module: nn.Module, args: Sequence[Any], kwargs: Any) -> Any:
        """Calls ``module`` in this state, in the thread of replica ``index``."""
        device = self.devices[index]
        try:
            with ExitStack() as stack:
                stack.enter_context(named_range(f"replica {index}"))
                stack.enter_context(torch.inference_mode(self.inference))
                stack.enter_context(torch.set_grad_enabled(self.grad))
                # A default of "cuda" is that of each replica, not that of the caller.
                alike = self.default_device.type == device.type
                default = device if alike else self.default_device
                if torch.empty(0).device != default:
                    stack.enter_context(default)
                for autocast in self.autocast:
                    stack.enter_context(autocast())
                # Messages of other replicas are on their devices, in the caller's streams.
                streams = dict(zip(self.devices, self.streams, strict=True))
                streams[device] = streams.pop(device)  # the last one is the current device
                for other, stream in streams.items():
                    stack.enter_context(use_device(other, stream))
                call = watched_call(module)
                if call is not None and call.rendezvous is not None:
                    # The replica itself reports, too; but not if it fails before its forward.
                    stack.enter_context(Attendance(call.rendezvous, call.replica, call.owner))
                return module(*args, **kwargs)
        except BaseException as error:
            size, is_ours = len(self.devices), issubclass(type(error), ReplicationError)
            if not is_ours and not has_origin(error, index, size):  # ours say who is where
                add_note(error, f"{origin(index, size)} on {device}")
            raise


class Outcome(NamedTuple):
    """What a call has returned or raised."""

    replica: int
    value: Any
    failure: BaseException | None
    #: See `Worker`; after the call.
    nodes: int


class Task(NamedTuple):
    """A call, and where to put what comes of it."""

    replica: int
    call: Callable[[], Any]
    done: SimpleQueue[Outcome]
    #: See `Worker`; before the call.
    nodes: int


#: That a worker makes in a millisecond or two, to have made as many as the others.
_FEW_NODES = 2_000


_setting_threads = threading.Lock()


def _use_threads(count: int) -> None:
    torch.get_num_threads()  # else torch sets what a new thread gets later, at its first operation
    torch.set_num_threads(count)


class Worker:
    """A daemon thread that does one call after the other.

    Attributes:
        nodes: How many nodes of graphs it has made. Autograd takes the latest first, of all
            threads by their own count: for the same sums in each step all begin with the same,
            and the caller, too, unless it is far ahead or behind.
    """

    def __init__(self) -> None:
        self.nodes = 0
        self._threads: int | None = None
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()
        # The thread refers to the inbox alone, so that an unused worker is freed and ends it.
        self.thread = threading.Thread(target=_serve, args=(self._inbox,), daemon=True)
        self.thread.start()

    def use_threads(self, count: int) -> None:
        """Lets torch use so many threads in it, if it does not do so already."""
        if count == self._threads:
            return
        done: SimpleQueue[Outcome] = SimpleQueue()
        with _setting_threads:
            own = torch.get_num_threads()
            self.submit(Task(0, partial(_use_threads, count), done, 0))
            _next(done)
            # It is a setting of each thread, but what has been set last is what a new one gets.
            torch.set_num_threads(own)
        self._threads = count

    def submit(self, task: Task) -> None:
        """Lets the thread do it."""
        self.thread.name = f"replica-{task.replica}"
        self._inbox.put(task)

    def dismiss(self) -> None:
        """Lets the thread end, after its call if there is one."""
        self._inbox.put(None)

    __del__ = dismiss


def _serve(inbox: SimpleQueue[Task | None]) -> None:
    while (task := inbox.get()) is not None:
        replica, call, done, nodes = task
        try:
            make_nodes(max(0, nodes - nodes_made()))
            outcome = Outcome(replica, call(), None, nodes_made())
        except BaseException as error:
            outcome = Outcome(replica, None, error, nodes_made())
        # Nothing of a forward may stay alive in an idle thread.
        del task, call
        done.put(outcome)
        del outcome, done


class _Idle(threading.local):
    """The idle workers of each calling thread: threads that share a model share no worker."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []


_idle = _Idle()


def _forget_workers() -> None:
    """In a forked child the threads are gone."""
    global _idle
    _idle = _Idle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


@contextmanager
def borrowed_workers(count: int) -> Iterator[list[Worker]]:
    """Takes ``count`` workers; they come back unless the block is left by an error, when some may
    still be busy (a worker that nobody holds ends after its call)."""
    idle = _idle.workers
    workers = [idle.pop() if idle else Worker() for _ in range(count)]
    nodes = [worker.nodes for worker in workers]
    if max(nodes, default=0) - min(nodes, default=0) > _FEW_NODES:
        workers = [Worker() for _ in range(count)]
    try:
        yield workers
    except BaseException:
        for worker in workers:
            worker.dismiss()
            _abandoned.add(worker.thread)
        raise
    idle.extend(reversed(workers))


#: Threads whose caller was interrupted; each ends after its call.
_abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _await_abandoned() -> None:
    """Lets abandoned calls end, for a while: torch aborts if the interpreter ends under it."""
    end = time.monotonic() + 1.5
    for thread in list(_abandoned):
        thread.join(max(0.0, end - time.monotonic()))
