"""What the simulated CUDA runtime has counted, for tests and benchmarks on it.

with runtime.counted() as found:
    layer(x)
assert runtime.kernels(found)["batch_norm_collect_statistics_kernel"] == 1
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

#: The library, or None where CUDA is not there or is real.
_library: Any = ctypes.CDLL(None)
if hasattr(_library, "simulated_reset"):
    _library.simulated_report.restype = _library.simulated_log.restype = ctypes.c_char_p
    _library.simulated_set_times.argtypes = [ctypes.c_double] * 3
else:
    _library = None

needs_simulation = pytest.mark.skipif(_library is None, reason="needs `python -m tests.cuda`")

#: Whether work is done only when somebody waits for it: a missing wait gives wrong numbers.
LAZY = os.environ.get("SIMULATED_LAZY", "0") != "0"

#: Whether operators compute. Without, the host is as fast as with a GPU that takes no time.
NUMBERS = os.environ.get("SIMULATED_NUMBERS", "1") != "0"


def reset() -> None:
    """Sets all counters to zero."""
    _library.simulated_reset()


def report() -> dict[str, dict[str, int]]:
    """Returns what was counted since the last `reset`.

    Sections are "launches" by kernel, "captured" and "replayed" by kind of node, "copies" and
    "bytes" by kind, "memsets", "waits" of the host by call and thread, "nccl" by call, "errors",
    "missing" functions, "pointers" of kernels to other devices, "contexts" and "streams".
    """
    found: dict[str, dict[str, int]] = json.loads(_library.simulated_report())
    return found


@contextmanager
def counted() -> Iterator[dict[str, dict[str, int]]]:
    """Counts a block. The report is there after it."""
    found: dict[str, dict[str, int]] = {}
    reset()
    yield found
    found.update(report())


def log_start() -> None:
    """Begins to write down everything in its order."""
    _library.simulated_log_start()


def log() -> list[str]:
    """Ends what `log_start` has begun, and returns it."""
    entries: list[str] = json.loads(_library.simulated_log())
    return entries


def set_times(kernel: float = 0, copy: float = 0, launch: float = 0) -> None:
    """Lets kernels and copies take this many microseconds, and the host for each of them.

    Kernels and copies take simulated time, for which the host sleeps when it waits for them. For a
    launch it computes.
    """
    _library.simulated_set_times(kernel, copy, launch)


def launches() -> int:
    """Returns the number of launches since the last `reset`."""
    return sum(report().get("launches", {}).values())


def kernels(found: dict[str, dict[str, int]] | None = None) -> Counter[str]:
    """Returns the launches by `short` name."""
    by_name: Counter[str] = Counter()
    for name, number in (found or report()).get("launches", {}).items():
        by_name[short(name)] += number
    return by_name


def short(name: str) -> str:
    """Returns the name of a kernel without namespaces, with the functor among its arguments."""
    name = name.replace("(anonymous namespace)::", "")
    head = name.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1]
    functors = re.findall(r"\w+(?:_kernel_impl|_kernel_cuda|Functor\w*|_impl_nocast)", name)
    inner = [functor for functor in functors if functor != head]
    return head + (f"[{inner[0]}]" if inner else "")


def brief(found: dict[str, dict[str, int]]) -> str:
    """Returns a report in one line."""
    parts = [f"{sum(found.get('launches', {}).values())} launches"]
    sections = ("memsets", "nccl", "copies", "waits", "captured", "replayed")
    for section in (*sections, "errors", "missing", "pointers", "libraries"):
        if entries := found.get(section):
            parts.append(f"{section} " + ", ".join(f"{k}: {n}" for k, n in entries.items()))
    return "; ".join(parts)


def device_count() -> int:
    """Returns the number of simulated devices, 0 without a simulation."""
    return 0 if _library is None else torch.cuda.device_count()
