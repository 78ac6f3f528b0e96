"""Ranks that stay: each runs one case after the other, so that NCCL is connected only once.

A case that fails on one rank may leave the others in a collective, so ranks end with the first
failure, and the next case starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

from tests.kit.deadlines import DEADLINE, ends

#: Not forked from this process, in which CUDA may have begun.
_context = multiprocessing.get_context("spawn")

#: Seconds in which the other ranks may end a case that has failed on one.
_PATIENCE = 2.0


class Ranks:
    """So many processes, each on the CUDA device of its rank, connected by a backend."""

    def __init__(self, size: int, backend: str = "nccl") -> None:
        self.size, self.backend = size, backend
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(*arguments)`` in each rank; what each returned.

        Raises:
            AssertionError: A rank has raised (its traceback is the text), has died, or hangs.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        outcomes = self._outcomes()
        failures = [text for _, text in outcomes if text]
        if failures:
            self.close()
        assert not failures, "\n".join(failures)
        return [value for value, _ in outcomes]

    def _outcomes(self) -> list[tuple[Any, str | None]]:
        """The value or the error of each rank."""
        hangs = "rank {} hangs, or waits for one that has failed"
        found = {pipe: (None, hangs.format(rank)) for rank, pipe in enumerate(self._pipes)}
        open_pipes, end = list(self._pipes), time.monotonic() + DEADLINE
        while open_pipes and (ready := wait(open_pipes, max(0.0, end - time.monotonic()))):
            for pipe in ready:
                open_pipes.remove(pipe)
                try:
                    found[pipe] = pipe.recv()
                except EOFError:
                    found[pipe] = (None, f"rank {self._pipes.index(pipe)} has died")
                if found[pipe][1]:
                    end = min(end, time.monotonic() + _PATIENCE)
        return list(found.values())

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            assert ends(process)
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        store = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(self.size):
            here, there = _context.Pipe()
            arguments = (there, rank, self.size, self.backend, store)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _serve(pipe: Connection, rank: int, size: int, backend: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=DEADLINE),
        device_id=device if backend == "nccl" else None,
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # threads of a backend can abort a process that finalizes
        value, error = None, None
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value = function(*arguments)
                torch.cuda.synchronize()
        except BaseException:
            error = f"rank {rank}: {traceback.format_exc()}"
        pipe.send((value, error))
