"""Runs a function in several processes that `torch.distributed` connects, by gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from tests.deadlines import DEADLINE, ends

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)

#: A server forks the ranks. It runs no threads, and has imported what a rank would otherwise spend
#: seconds on: torch, what the test files import, and the compiler, which DDP imports when it runs.
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

#: Seconds after which a rank that waits for another gives up.
TIMEOUT = DEADLINE


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` in each of ``size`` processes; what each returned.

    Raises:
        AssertionError: A rank has raised (its traceback is the text), or hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_run, args=(rank, size, folder, function, arguments))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                assert ends(process), f"{process.name} hangs"
        finally:
            for process in ranks:
                process.kill()
        results = [Path(folder, f"{rank}.pt") for rank in range(size)]
        loaded = [torch.load(path, weights_only=False) for path in results]
    failures = [error for _, error in loaded if error]
    assert not failures, "\n".join(failures)
    return [value for value, _ in loaded]


def _run(
    rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("error")
    # Of torch 2.4 about itself.
    warnings.filterwarnings("ignore", ".torch.cpu.amp.autocast", FutureWarning)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
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


#: The argument that holds what a rank sends, by the name of the collective.
_SENT = {"all_reduce": 0, "all_gather": 1, "all_to_all_single": 1, "broadcast": 0, "barrier": None}


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

    wrapped = {name: recorded(name, getattr(distributed, name)) for name in _SENT}
    with mock.patch.multiple(distributed, **wrapped):
        yield calls


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
