"""Runs each replica in its own thread and raises the first error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from replication._torch import count_nodes_up_to, in_functorch_transform, named_range, nodes_made
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import (
    ReplicasTimedOut,
    ReplicationError,
    add_note,
    check_list,
    listed,
    lost_derivatives,
    origin,
    origin_note,
)
from replication.modules import layers_of
from replication.steps.thread_state import ThreadState, state_of_new_threads
from replication.steps.workers import Done, Outcome, Report, Worker, stop_if_ending
from replication.sync.current import current_replica
from replication.sync.lifecycle import (
    ForwardScope,
    first_failure_wins,
    rendezvous_of,
    tracked_calls,
)
from replication.sync.positions import location

__all__ = ["parallel_apply"]

#: Seconds that the caller waits for the other replicas after one has failed.
SHUTDOWN_GRACE = 5.0

#: Seconds between checks for events that no replica reports: a Ctrl-C or the death of a thread.
_POLL = 1.0

#: By how many autograd nodes replicas may be ahead of their caller, which counts up to them in
#: some 20 ms. A new thread that calls a model late gets new threads for its replicas.
_NEAR = 2**18

#: The number of weights from which a 1x1 convolution is wide, as in the last stages of ResNet-50.
_WIDE = 2**17


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Calls ``modules[i](*inputs[i], **kwargs_tup[i])`` for all i in parallel, one thread each.

    The threads, ``replica-0``, ``replica-1``, ..., live on, and serve later calls with the same
    devices. In each call they have the caller's grad mode, inference mode, autocast state, default
    device (or their own of the same type), streams, and context variables. Replicas on the CPU
    divide the caller's number of intra-op threads, but each keeps two of several if it has wide
    1x1 convolutions. A single replica runs in the calling thread.

    >>> import torch
    >>> from torch import nn
    >>> from replication import parallel_apply, replicate
    >>> replicas = replicate(nn.Flatten(0), ["cpu"] * 2)
    >>> parallel_apply(replicas, [torch.zeros(1, 2), torch.ones(1, 3)])
    [tensor([0., 0.]), tensor([1., 1., 1.])]

    Args:
        modules: The replicas to call.
        inputs: One tuple or list of arguments per replica, or its only argument.
        kwargs_tup: One dict of keyword arguments per replica.
        devices: The current device of each replica, by default the device of its first tensor.

    Raises:
        ValueError: The lists differ in length.
        RuntimeError: The call is inside a transform of `torch.func`, or the interpreter ends.
        BaseException: The first error, by time, of any replica. A note names the replica and its
            device. The others get 5 seconds to end, and are then abandoned: a note says where they
            are. `ReplicasTimedOut` and errors such as a Ctrl-C are raised at once.
    """
    if devices is None:
        targets = [device_of(replica) or torch.device("cpu") for replica in modules]
    else:
        targets = parse_devices(devices)
    return first_failure_wins(run_replicas, modules, inputs, kwargs_tup, targets)


def run_replicas(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None,
    devices: Sequence[torch.device],
) -> list[Any]:
    """Does what `parallel_apply` does without `first_failure_wins`, which the caller applies."""
    n = len(modules)
    kwargs_tup = [{}] * n if kwargs_tup is None else kwargs_tup
    for name, items in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", devices)):
        check_list(name, items)
        if len(items) != n:
            raise ValueError(f"expected one of {name} for each of {n} replicas (got {len(items)})")
    if n > 1 and in_functorch_transform():
        raise lost_derivatives("parallel_apply")
    if n == 1:
        state = ThreadState(devices, torch.get_num_threads(), nodes=0)
        return [_call(state, 0, modules[0], inputs[0], kwargs_tup[0])]
    if sys.is_finalizing():  # other threads do not run any more
        raise RuntimeError("replicas cannot run during interpreter shutdown (by a finalizer?)")
    if current_replica() is None:  # a forward that has begun may end
        stop_if_ending()
    workers, nodes = _take_workers(devices)
    state = ThreadState(devices, _share_of_threads(modules, devices), nodes)
    calls = zip(range(n), modules, inputs, kwargs_tup, strict=True)
    return _run_all(modules, workers, [partial(_call, state, *call) for call in calls], nodes)


def _share_of_threads(modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> int:
    """The number of intra-op threads of each replica on the CPU."""
    # With the caller's number each, they would compete for its cores. That costs less than a wide
    # 1x1 convolution of few samples in a single thread, for which torch does not use oneDNN.
    threads = torch.get_num_threads()
    share = max(1, threads // max(1, [device.type for device in devices].count("cpu")))
    first = next(iter(modules), None)  # what is no list of modules is refused when it is called
    if share == 1 < threads and isinstance(first, nn.Module):
        return 2 if any(_is_wide(layer) for _, layer in layers_of(first)) else 1
    return share


def _is_wide(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (1, 1)
        and layer.in_channels // layer.groups * layer.out_channels >= _WIDE
    )


def _take_workers(devices: Sequence[torch.device]) -> tuple[list[Worker], int]:
    """A worker for each replica, and the number of nodes from which all threads count."""
    # All begin a forward with the same number, and the caller goes on with the largest, so that
    # sums have the same order in each step (see `nodes_made`). A new thread counts from 0: 0.1 s
    # for a million nodes. Without grad, what replicas make belongs to each alone.
    grad, of_caller = torch.is_grad_enabled(), nodes_made()
    most = of_caller + _NEAR if grad else math.inf
    begins = state_of_new_threads()
    workers = [Worker.take(key, most, begins) for key in enumerate(devices)]
    first = max([of_caller, *[worker.nodes for worker in workers]]) if grad else 0
    count_nodes_up_to(first)
    return workers, first


def _call(state: ThreadState, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
    device, size = state.devices[index], len(state.devices)
    args = args if isinstance(args, (list, tuple)) else (args,)
    try:
        with named_range(f"replica {index}"), ExitStack() as stack:
            for call in tracked_calls([module]):  # none if the module is no replica
                # The scope also covers what comes before the replica's own forward.
                stack.enter_context(ForwardScope(call, device))
            state.enter(stack, device)
            return module(*args, **kwargs)
    except BaseException as error:
        # Errors of this package name the replicas themselves.
        if not isinstance(error, ReplicationError) and not origin_note(error, index, size):
            add_note(error, f"{origin(index, size)} on {device}")
        raise


def _run_all(
    replicas: Sequence[nn.Module],
    workers: list[Worker],
    jobs: Sequence[Callable[[], Any]],
    nodes: int,
) -> list[Any]:
    """Runs the jobs. Returns their values in order, or raises the first error."""
    done: Done = SimpleQueue()
    running: dict[Worker, int] = {}
    values: list[Any] = [None] * len(jobs)
    failures: list[Outcome] = []
    rendezvous = rendezvous_of(replicas)
    end = math.inf if rendezvous is None else rendezvous.deadline
    try:
        for index, (worker, job) in enumerate(zip(workers, jobs, strict=True)):
            running[worker] = index
            worker.start(job, done)
        while running and (report := _next(done, running, end)) is not None:
            worker, outcome, made = report
            values[running.pop(worker)], nodes = outcome.value, max(nodes, made)
            if outcome.error is not None:
                failures.append(outcome)
                end = min(end, time.monotonic() + _grace(outcome.error))
        if failures:
            _raise_first(failures, running, replicas)
        if running and rendezvous is not None:
            raise rendezvous.time_out()
        return values
    finally:
        # This frame forgets errors (see `Outcome.unwrap`) and threads. Replicas that are left may
        # yet report errors.
        failures.clear()
        running.clear()
        workers.clear()
        report, outcome = None, Outcome()
        del done
        if torch.is_grad_enabled():
            count_nodes_up_to(nodes)


def _next(done: Done, running: dict[Worker, int], end: float) -> Report | None:
    """The report of the next worker, or None if none comes by ``end``."""
    while True:
        time_left = max(0.0, end - time.monotonic())
        try:
            # A Ctrl-C that arrives just before a blocking get is only noticed when that returns.
            return done.get(timeout=min(_POLL, time_left))
        except Empty:
            if not time_left:
                return None
        dead = [worker for worker in running if not worker.thread.is_alive()]
        for worker in dead:  # another thread has sent an exception into it while it was idle
            if successor := worker.successor():
                running[successor] = running.pop(worker)
        ended = [running[worker] for worker in dead if worker in running]
        if ended and done.empty():
            raise RuntimeError(f"the thread of {listed(ended)} ended without a result")


def _grace(error: BaseException) -> float:
    """The seconds that the other replicas get after an error."""
    ends_all = not isinstance(error, Exception) or isinstance(error, ReplicasTimedOut)
    return 0.0 if ends_all else SHUTDOWN_GRACE


def _raise_first(
    failures: list[Outcome], running: dict[Worker, int], replicas: Sequence[nn.Module]
) -> None:
    """Raises the first error, or the first that gives the others no time."""
    errors: list[Any] = [failure.error for failure in failures]
    try:
        index = next((i for i, error in enumerate(errors) if not _grace(error)), 0)
        if running and _grace(errors[index]):
            rows = "; ".join(
                f"replica {index} {location(replicas[index], worker.thread.ident or 0)}".rstrip()
                for worker, index in running.items()
            )
            for error in errors:  # `first_failure_wins` may raise any of them
                add_note(error, f"left running {SHUTDOWN_GRACE:g} s later: {rows}")
        failures[index].unwrap()
    finally:
        errors.clear()
        error = None
