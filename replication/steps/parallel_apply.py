"""Runs each replica in its own thread and raises the first error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from replication._torch import in_functorch_transform, named_range
from replication.checks import check_list
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import add_note, lost_derivatives, origin
from replication.steps.threads import CallerState, Key, run_all
from replication.sync.lifecycle import abort_forward, first_failure_wins, tracked_forwards

__all__ = ["parallel_apply"]


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Calls ``modules[i](*inputs[i], **kwargs_tup[i])`` for all i in parallel, one thread each.

    The threads, ``replica-0``, ``replica-1``, ..., are reused by later calls with the same
    devices. In each call they have the caller's grad mode, inference mode, autocast state,
    streams, context variables, and default device (their own device, if the caller's default is
    of the same type). Replicas on the CPU divide the caller's number of intra-op threads between
    them. A single replica runs in the calling thread.

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
        BaseException: The first error, by time, of any replica. A note names the replica, its
            device and the module. It is raised when all replicas have ended, and so is a Ctrl-C,
            after which all waits between replicas fail. A second Ctrl-C is raised at once.
    """
    if devices is None:
        targets = [device_of(replica) or torch.device("cpu") for replica in modules]
    else:
        targets = parse_devices(devices)
    n = len(modules)
    kwargs_tup = [{}] * n if kwargs_tup is None else kwargs_tup
    for name, items in (("inputs", inputs), ("kwargs_tup", kwargs_tup), ("devices", targets)):
        check_list(name, items)
        if len(items) != n:
            raise ValueError(f"expected one of {name} for each of {n} replicas (got {len(items)})")
    if n > 1 and in_functorch_transform():
        raise lost_derivatives("parallel_apply")
    # Replicas on the CPU share its cores. With the caller's number of threads each, they would
    # compete for them: on two cores, the forward of four replicas of a narrow ResNet-50 took 1.4
    # times as long with two threads each as with one. A step of the whole ResNet-50 took 0.8 to
    # 0.9 times as long, because of its wide 1x1 convolutions of few samples. If these dominate,
    # `torch.set_num_threads(2 * n)` gives each replica two.
    on_cpu = [device.type for device in targets].count("cpu")
    share = max(1, torch.get_num_threads() // max(1, on_cpu))
    state = CallerState(targets, share)
    jobs: dict[Key, Callable[[], Any]] = {}
    for index, device in enumerate(targets):
        run = partial(_run, state, index, n, modules[index], inputs[index], kwargs_tup[index])
        jobs[index, device] = partial(run, device)
    # For programs that call this function alone. `DataParallel` does it once more, because a
    # subclass may run its replicas in another way.
    return first_failure_wins(lambda _: run_all(jobs, partial(abort_forward, modules)), modules)


def _run(
    state: CallerState,
    index: int,
    size: int,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    device: torch.device,
) -> Any:
    """Runs a replica in its thread."""

    def work() -> Any:
        with named_range(f"replica {index}"), ExitStack() as stack:
            state.enter(stack, device)
            return module(*(args if isinstance(args, (list, tuple)) else (args,)), **kwargs)

    if tracked := tracked_forwards([module]):
        # Earlier than the replica's own forward does, so that errors before it, for example in a
        # hook, count as well.
        return tracked[0].run(work, device)
    try:
        return work()
    except BaseException as error:
        add_note(error, f"{origin(index, size)} on {device}")
        raise
