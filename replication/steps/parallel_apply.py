"""Runs each replica in its own thread and raises the first error."""

from __future__ import annotations

import atexit
import contextvars
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import nn

from replication._torch import (
    count_nodes_up_to,
    in_functorch_transform,
    named_range,
    nodes_made,
    set_grad_modes,
)
from replication.devices import (
    DeviceLike,
    accelerator,
    current_stream,
    device_of,
    parse_devices,
    use_device,
)
from replication.errors import (
    ReplicasTimedOut,
    ReplicationError,
    add_note,
    check_list,
    has_type,
    listed,
    origin,
    origin_note,
)
from replication.modules import layers_of
from replication.sync.lifecycle import (
    ForwardScope,
    first_failure_wins,
    location,
    rendezvous_of,
    tracked_calls,
)

__all__ = ["parallel_apply"]

#: Seconds that the caller waits for the other replicas after one has failed.
SHUTDOWN_GRACE = 5.0

#: Seconds between checks for events that no replica reports: a Ctrl-C or the death of a thread.
_POLL = 1.0

#: The caller's thread has made at least this many autograd nodes when the replicas start from 0.
_MIN_CALLER_NODES = 2_000

#: The number of weights from which a 1x1 convolution is wide, as in the last stages of ResNet-50.
_WIDE = 2**17

#: The index of a replica, its output or its error, and the number of autograd nodes it has made.
Outcome = tuple[int, Any, BaseException | None, int]
Outcomes = SimpleQueue[Outcome]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Calls ``modules[i](*inputs[i], **kwargs_tup[i])`` for all i in parallel, one thread each.

    Each call makes new threads, ``replica-0``, ``replica-1``, ..., which inherit the caller's grad
    mode, inference mode, autocast state, default device (or use their own of the same type),
    streams, and context variables. Replicas on the CPU divide the caller's number of intra-op
    threads, but each keeps two of several if it has wide 1x1 convolutions. A single replica runs
    in the calling thread.

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
        raise RuntimeError(
            "torch.func transforms do not reach the threads of replicas; transform model.module"
        )
    torch_threads = _share_of_threads(modules, devices)
    state = ThreadState(devices)
    arguments = zip(range(n), modules, inputs, kwargs_tup, strict=True)
    calls = [partial(state.run, *of_replica) for of_replica in arguments]
    return _run_all(modules, calls, torch_threads)


def _share_of_threads(modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> int:
    """Returns the number of intra-op threads of each replica on the CPU."""
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


def _run_all(
    replicas: Sequence[nn.Module], calls: Sequence[Callable[[], Any]], torch_threads: int
) -> list[Any]:
    if len(calls) == 1:
        return [calls[0]()]
    if sys.is_finalizing():  # other threads do not run any more
        raise RuntimeError(
            "replicas cannot be called during interpreter shutdown (by a finalizer?)"
        )
    callers_torch_threads = torch.get_num_threads()
    # Autograd orders the nodes of a graph by numbers that each thread counts for itself. The
    # replicas' threads are new, so they count from 0 in every forward. The caller must be ahead of
    # all of them, or the order of sums changes from step to step.
    nodes = _MIN_CALLER_NODES if torch.is_grad_enabled() else 0
    count_nodes_up_to(nodes)
    outputs: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []
    done: Outcomes = SimpleQueue()
    running: dict[int, ReplicaThread] = {}
    rendezvous = rendezvous_of(replicas)
    end = math.inf if rendezvous is None else rendezvous.deadline
    try:
        for index, call in enumerate(calls):
            running[index] = ReplicaThread(index, call, torch_threads, done)
            running[index].start()
        while running and (outcome := _next(done, running, end)) is not None:
            index, value, failure, made = outcome
            thread = running.pop(index)
            outputs[index] = value
            nodes = nodes and max(nodes, made)
            if failure is not None:
                # Frames in the traceback must not run while they are read, without the GIL.
                thread.join(_POLL)
                failures.append(failure)
                if not has_type(failure, Exception):
                    raise failure
                is_over = has_type(failure, ReplicasTimedOut)
                end = min(end, time.monotonic() + (0.0 if is_over else SHUTDOWN_GRACE))
        if failures:
            if running and not has_type(failures[0], ReplicasTimedOut):
                rows = "; ".join(
                    f"replica {index} {location(replicas[index], thread.ident or 0)}".rstrip()
                    for index, thread in running.items()
                )
                for failure in failures:  # `first_failure_wins` may raise any of them
                    add_note(failure, f"left running {SHUTDOWN_GRACE:g} s later: {rows}")
            raise failures[0]
        if running and rendezvous is not None:
            raise rendezvous.time_out()
        return outputs
    finally:
        # First, because a Ctrl-C may come after any call.
        if torch_threads != callers_torch_threads:  # new threads inherit the last setting
            torch.set_num_threads(callers_torch_threads)
        # The traceback of an error refers to this frame, which must not refer to errors.
        failures.clear()
        outcome = value = failure = None
        del done
        count_nodes_up_to(nodes)


def _next(done: Outcomes, running: dict[int, ReplicaThread], end: float) -> Outcome | None:
    """Returns the outcome of the next replica to end, or None if none ends by ``end``."""
    while True:
        time_left = max(0.0, end - time.monotonic())
        try:
            # A Ctrl-C that arrives just before a blocking get is only noticed when that returns.
            return done.get(timeout=min(_POLL, time_left))
        except Empty:
            if not time_left:
                return None
        dead = [index for index, thread in running.items() if not thread.is_alive()]
        if dead and done.empty():
            raise RuntimeError(f"the thread of {listed(dead)} ended without a result")


class ReplicaThread(threading.Thread):
    """The thread of one replica in one forward. Puts the outcome of ``call`` into ``done``."""

    def __init__(
        self, index: int, call: Callable[[], Any], torch_threads: int, done: Outcomes
    ) -> None:
        super().__init__(name=f"replica-{index}", daemon=True)
        # Two threads cannot enter the same Context, so each has a copy.
        self._work = index, call, contextvars.copy_context(), torch_threads, done

    def start(self) -> None:
        """Starts the thread. If a Ctrl-C prevents that, the thread keeps nothing alive."""
        try:
            super().start()
        except BaseException as error:
            vars(self).pop("_work", None)
            interrupt = error.__context__
            if isinstance(interrupt, KeyboardInterrupt):  # `threading` may fail on its way out
                raise interrupt from None
            raise

    def run(self) -> None:
        """Called in the new thread."""
        try:
            index, call, context, torch_threads, done = vars(self).pop("_work")
        except KeyError:  # `start` was interrupted
            return
        try:
            if torch.get_num_threads() != torch_threads:
                torch.set_num_threads(torch_threads)
            outcome: Outcome = index, context.run(call), None, nodes_made()
        except BaseException as error:
            outcome = index, None, error, nodes_made()
        # The traceback of an error refers to this frame, which must not keep the forward alive.
        del call, context
        done.put(outcome)
        del outcome, done


@atexit.register
def _await_replicas() -> None:
    """Waits for abandoned replicas: torch aborts if the interpreter ends while they compute."""
    end = time.monotonic() + 1.5
    for thread in threading.enumerate():
        # A Ctrl-C in `start` leaves a thread that never began in threading's list.
        if isinstance(thread, ReplicaThread) and thread.is_alive():
            thread.join(max(0.0, end - time.monotonic()))


class ThreadState:
    """The caller's thread-local torch state, which the replicas' threads take over."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.streams = {device: current_stream(device) for device in dict.fromkeys(devices)}
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = torch.empty(0).device
        kinds = {"cpu", accelerator() or "cpu", *[device.type for device in devices]}
        self.autocast = {
            kind: _autocast_state(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }

    def run(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls ``module`` in this state, in the thread of replica ``index``."""
        device = self.devices[index]
        args = args if isinstance(args, (list, tuple)) else (args,)
        try:
            with named_range(f"replica {index}"), ExitStack() as stack:
                self._enter(stack, device)
                for call in tracked_calls([module]):  # none if the module is no replica
                    # The scope also covers an error before the replica's own forward.
                    stack.enter_context(ForwardScope(call, device))
                return module(*args, **kwargs)
        except BaseException as error:
            size = len(self.devices)
            # Errors of this package name the replicas themselves.
            if not has_type(error, ReplicationError) and not origin_note(error, index, size):
                add_note(error, f"{origin(index, size)} on {device}")
            raise

    def _enter(self, stack: ExitStack, device: torch.device) -> None:
        """Sets this thread's state, where it differs, until ``stack`` is closed."""
        set_grad_modes(stack, grad=self.grad, inference=self.inference)
        # A default of "cuda" means the replica's own device, not the caller's.
        default = device if self.default_device.type == device.type else self.default_device
        if torch.empty(0).device != default:
            stack.enter_context(default)
        for kind, state in self.autocast.items():
            if _autocast_state(kind) != state:
                stack.enter_context(torch.autocast(kind, *state))
        # Tensors from other replicas are on their devices, in the caller's streams.
        for other, stream in self.streams.items():
            if other != device and stream is not None:
                stack.enter_context(use_device(other, stream))
        stack.enter_context(use_device(device, self.streams[device]))


def _autocast_state(kind: str) -> tuple[torch.dtype, bool, bool]:
    """Returns the arguments of `torch.autocast` that give the state of this thread."""
    return (
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )
