"""`verify_ranks`, which starts the ranks that `verify` compares with one device.

A server process that has imported torch forks the ranks, so that only the first call waits for
that import. Each call gets new processes: none inherits what an earlier one has left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from replication.devices import default_devices
from replication.errors import ReplicationError
from replication.groups.processes import ProcessGroup
from replication.verify import server
from replication.verify.agreement import all_or_none
from replication.verify.comparison import verify_made
from replication.verify.copies import Loss
from replication.verify.position import position
from replication.verify.results import Verification
from replication.verify.supervision import job_of, supervised

__all__ = ["verify_ranks"]

#: How a pickle writes the name of the main module.
_OF_MAIN = b"\x8c\x08__main__"


def verify_ranks(
    make: Callable[[], Any], ranks: int = 2, *, timeout: float = 300.0
) -> Verification:
    """Starts processes on the CPU, which gloo connects, and calls `verify` in each.

    >>> from replication import verify_ranks
    >>> def test_ddp_is_one_device():
    ...     assert verify_ranks(make, 2)

    Args:
        make: A function at the top level of a module, because each rank imports it. It returns the
            arguments of `verify`, ``{"model": net, "batch": batch, ...}``, or ``(net, batch)``.
            Each rank calls it with the same random seed. So does one device, as if it were a
            program of one process, so that the function may ask for the number of ranks.
        ranks: The number of processes.
        timeout: Seconds after which they are killed.

    Raises:
        ValueError: Fewer than two ranks; the function can't be imported; any of `verify`.
        TimeoutError: The ranks have not ended in time.
        ReplicationError: A process has died.
        Exception: What ``make`` or `verify` has raised in a rank, with its traceback as a note.
    """
    if ranks < 2:
        raise ValueError(f"expected two or more ranks (got {ranks})")
    return in_ranks(ranks, verified, make, timeout=timeout)  # type: ignore[no-any-return]


def verified(make: Callable[[], Any], device: torch.device | None = None) -> Verification:
    """Calls `verify` in a rank, with what a function returns, on a device."""

    def made() -> dict[str, Any]:
        random.seed(0)
        torch.manual_seed(0)
        arguments = make()
        if isinstance(arguments, tuple) and len(arguments) == 2:
            arguments = dict(zip(("model", "batch"), arguments, strict=True))
        if not (isinstance(arguments, Mapping) and {"model", "batch"} <= {*arguments}):
            raise TypeError(
                "the function must return the arguments of verify, such as dict(model=net, "
                f"batch=x), or (net, x) (got {type(arguments).__name__})"
            )
        if device is not None:
            arguments["model"].to(device)
        return dict(arguments)

    def again() -> tuple[nn.Module, Loss | None]:
        arguments = made()
        return arguments["model"], arguments.get("loss")

    with all_or_none(ProcessGroup(name="verify")):
        arguments = made()
    return verify_made(again, **arguments)


# -- processes -----------------------------------------------------------------------------------


def in_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    """Runs ``function(*arguments)`` in ranks on the CPU. Returns what it returns on rank 0."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise ReplicationError("ranks can't be started, because this torch has no gloo")
    if position.in_rank:
        raise ReplicationError(
            "a rank can't start ranks (got a call in one, which imports the module of the "
            'function); call it below `if __name__ == "__main__":`, or in a test'
        )
    try:
        task = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "each rank imports the function, so define it at the top level of a module (got one "
            f"that can't be pickled: {error})"
        ) from None
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if _OF_MAIN in task and spec is not None and spec.name.rpartition(".")[2] == "__main__":
        raise ValueError(
            "each rank imports the function, but can't import the `__main__.py` of a package; "
            "define the function in another module of it"
        )
    job = job_of(size, task, timeout)
    for output in (sys.stdout, sys.stderr):
        output.flush()  # before the ranks print
    if server.is_available:
        outcome = server.server.supervised(job)
    else:
        outcome = supervised(multiprocessing.get_context("spawn"), job)
    value, raised = pickle.loads(outcome)
    if raised is not None:
        raise raised
    return value


def join_launched(timeout: float) -> tuple[list[torch.device], list[str]]:
    """Connects a process that torchrun has started. Returns its devices, and their backends."""
    devices, backends = [torch.device("cpu")], ["gloo"]
    if accelerators := default_devices():
        device = accelerators[int(os.environ.get("LOCAL_RANK", "0")) % len(accelerators)]
        torch.get_device_module(device).set_device(device)
        backend = distributed.Backend.default_device_backend_map.get(device.type, "gloo")
        # NCCL refuses ranks that share a GPU, and is not part of torch for Windows.
        is_shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > len(accelerators)
        usable = distributed.is_backend_available(backend) and not is_shared
        devices.append(device)
        backends.append(backend if usable else "gloo")
    each = [f"{device.type}:{backend}" for device, backend in zip(devices, backends, strict=True)]
    backend = ",".join(each) if len({*backends}) > 1 else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return devices, backends
