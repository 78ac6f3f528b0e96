"""Runs a function in several processes that `torch.distributed` connects, by gloo."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from replication import _torch
from replication._torch import ENDS_WITH_GIL
from replication.groups import processes
from tests.kit.deadlines import DEADLINE, ends
from tests.kit.threads import outcome_of

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)

#: A server forks the ranks. It runs no threads, sees no GPU, and has imported what a rank would
#: otherwise spend seconds on: torch, what the test files import, and the compiler, which DDP
#: imports when it runs.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "replication",
        "syncbn",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
    ]
)

_destroy = distributed.destroy_process_group


def _destroy_at_rest(*arguments: Any) -> None:
    time.sleep(0.3)  # without the GIL, so that threads of gloo end
    _destroy(*arguments)


#: Seconds after which a rank that waits for another gives up.
TIMEOUT = DEADLINE


class Ended(NamedTuple):
    """How a rank has ended."""

    value: Any = None
    #: The traceback, if the rank has raised.
    error: str | None = None
    #: The exit code of its process. It is negative for a signal.
    code: int | None = None


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` in each of ``size`` processes; what each returned.

    Raises:
        AssertionError: A rank has raised (its traceback is the text), has died, or hangs.
    """
    with started_ranks(size, function, *arguments) as ended:
        ranks = ended()
    failures = [
        rank.error or f"rank {number} ended with exit code {rank.code}"
        for number, rank in enumerate(ranks)
        if rank.error or rank.code
    ]
    assert not failures, "\n".join(failures)
    return [rank.value for rank in ranks]


@contextmanager
def started_ranks(
    size: int, function: Callable[..., Any], *arguments: Any
) -> Iterator[Callable[[], list[Ended]]]:
    """Starts ranks, which may die. The function waits for all, and returns how each has ended.

    It raises AssertionError if a rank hangs. The end of the block kills ranks that still run.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_run, args=(rank, size, folder, function, arguments))
            for rank in range(size)
        ]

        def ended() -> list[Ended]:
            for process in ranks:
                assert ends(process), f"{process.name} hangs"
            paths = [Path(folder, f"{rank}.pt") for rank in range(size)]
            return [
                Ended(*torch.load(path, weights_only=False) if path.exists() else (), code=code)
                for path, code in zip(paths, [process.exitcode for process in ranks], strict=True)
            ]

        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
            for process in ranks:
                process.start()
        try:
            yield ended
        finally:
            for process in ranks:
                process.kill()


def _run(
    rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ENDS_WITH_GIL:
        distributed.destroy_process_group = _destroy_at_rest
    value, error = None, None
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        value = function(rank, *arguments)
        if distributed.is_initialized():  # else the function has seen to it
            distributed.barrier()
            distributed.destroy_process_group()
    except BaseException:
        error = f"rank {rank}: {traceback.format_exc()}"
    torch.save((value, error), f"{folder}/{rank}.pt")


def errors_of(rank: int, checks: Sequence[Callable[[int], Any]]) -> list[str | None]:
    """Runs checks in a rank, one after the other, and returns what each raised, or None."""
    errors = [outcome_of(lambda check=check: check(rank)).error for check in checks]
    return [None if error is None else repr(error) for error in errors]


def free_port() -> int:
    """A port of this machine for ranks that meet as those of torchrun do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def as_launched(rank: int, size: int, port: int) -> None:
    """Lets a rank connect itself to the others once more, as those of torchrun do."""
    distributed.barrier()  # until all are connected
    distributed.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


#: The argument that holds what a rank sends, by the name of the collective.
_SENT = {"all_reduce": 0, "all_gather": 0, "all_to_all_single": 1, "broadcast": 0, "barrier": None}


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    """Lists the collectives of `torch.distributed` in a block: the name, and the bytes sent."""
    calls: list[tuple[str, int]] = []

    def recorded(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            index = _SENT[name]
            calls.append((name, 0 if index is None else _bytes(arguments[index])))
            return collective(*arguments, **options)

        return call

    own = {"all_reduce", "all_gather"}
    wrapped = {name: recorded(name, getattr(distributed, name)) for name in _SENT.keys() - own}
    in_place = recorded("all_reduce", processes.all_reduce_in_place)
    gathered = recorded("all_gather", processes.gathered)
    with (
        mock.patch.multiple(distributed, **wrapped),
        mock.patch.object(processes, "all_reduce_in_place", in_place),
        mock.patch.object(processes, "gathered", gathered),
        mock.patch("replication.groups.collective.gathered", gathered),
        mock.patch.object(_torch, "all_reduce_in_place", in_place),
    ):
        yield calls


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
