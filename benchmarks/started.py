"""Starts ranks that may die, and says how each has ended."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed

#: What the server that forks the ranks imports, so that they need not. DDP imports the compiler.
IMPORTED = ["benchmarks.started", "torch._dynamo", "torch.distributed.nn"]


class Ended(NamedTuple):
    """How a rank has ended."""

    #: What the function has returned.
    value: Any = None
    #: The type and the text of what it has raised.
    error: str = ""
    #: "" if it has returned or raised, or else "dies" or "hangs".
    how: str = ""


def started(
    size: int, function: Callable[..., Any], *arguments: Any, seconds: float
) -> list[Ended]:
    """``function(*arguments)`` in each of so many processes, which gloo connects."""
    context: Any = get_context("forkserver" if sys.platform != "win32" else "spawn")
    if sys.platform != "win32":
        context.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(rank, size, folder, seconds, function, arguments))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + seconds
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        ended = [
            _ended(Path(folder, str(rank)), process.is_alive())
            for rank, process in enumerate(ranks)
        ]
        for process in ranks:
            process.kill()
            process.join()
    return ended


def _ended(path: Path, is_alive: bool) -> Ended:
    if path.exists():
        return Ended(*pickle.loads(path.read_bytes()))
    return Ended(how="hangs" if is_alive else "dies")


def _run(
    rank: int,
    size: int,
    folder: str,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # Some packages look there, where torchrun writes them. Nothing connects to the address.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    distributed.init_process_group(
        *("gloo", f"file://{folder}/store"),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * seconds),  # so that a rank that waits hangs until the end
    )
    value, error = None, ""
    try:
        value = function(*arguments)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    path = Path(folder, str(rank))
    path.with_suffix(".part").write_bytes(pickle.dumps((value, error)))
    path.with_suffix(".part").rename(path)
    if not error:
        distributed.barrier()
    # gloo's threads can abort a process that ends in the usual way.
    os._exit(0)
