"""Runs each replica in its own thread and raises the first error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from replication._torch import in_functorch_transform, named_range
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import (
    ReplicationError,
    add_note,
    check_list,
    lost_derivatives,
    origin,
    origin_note,
)
from replication.steps.thread_state import ThreadState
from replication.steps.workers import run_all
from replication.sync.lifecycle import abort_forward, first_failure_wins, tracked_forwards

__all__ = ["parallel_apply"]


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
    divide the caller's number of intra-op threads. A single replica runs in the calling thread.

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
        RuntimeError: The call is inside a transform of `torch.func`.
        BaseException: The first error, by time, of any replica, once all have ended. A note names
            the replica and its device. After a Ctrl-C all waits between replicas fail, and it is
            raised once they have ended; a second Ctrl-C is raised at once.
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
        state = ThreadState(devices, torch.get_num_threads())
        return [_call(state, 0, modules[0], inputs[0], kwargs_tup[0])]
    state = ThreadState(devices, _share_of_threads(devices))
    calls = zip(range(n), modules, inputs, kwargs_tup, strict=True)
    jobs = {
        (index, device): partial(_call, state, *call)
        for index, (device, call) in enumerate(zip(devices, calls, strict=True))
    }
    return run_all(jobs, partial(abort_forward, modules))


def _share_of_threads(devices: Sequence[torch.device]) -> int:
    """The number of intra-op threads of each replica on the CPU, which compete for its cores."""
    return max(1, torch.get_num_threads() // max(1, [d.type for d in devices].count("cpu")))


def _call(state: ThreadState, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
    device, size = state.devices[index], len(state.devices)
    args = args if isinstance(args, (list, tuple)) else (args,)

    def work() -> Any:
        with named_range(f"replica {index}"), ExitStack() as stack:
            state.enter(stack, device)
            return module(*args, **kwargs)

    try:
        # What comes before and after the replica's own forward also counts.
        tracked = tracked_forwards([module])  # none if the module is no replica
        return tracked[0].run(work, device) if tracked else work()
    except BaseException as error:
        # Errors of this package name the replicas themselves.
        if not isinstance(error, ReplicationError) and not origin_note(error, index, size):
            add_note(error, f"{origin(index, size)} on {device}")
        raise
