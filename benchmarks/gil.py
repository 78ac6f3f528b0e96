"""What replicas gain where Python runs without the GIL.

The same training steps in two processes that take turns, with and without the GIL. It needs a
free-threaded build of Python.

    python3.14t -m benchmarks.gil --network dense --replicas 2
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from multiprocessing import get_context

import torch

from benchmarks.measuring import KEEP_MEMORY, Figures, Row, Table, alternating, show
from benchmarks.networks import NETWORKS
from benchmarks.step import WAYS, parser_of_networks, training

ABOUT = (
    "Training steps on CPU replicas, in a free-threaded build. The unit is plain BatchNorm in "
    "replicas of syncbn with the GIL. Cells are the step, and in brackets forward and backward."
)

_steps: dict[str, Callable[[], Figures]] = {}


def begin(network: str, replicas: int, threads: int) -> None:
    """Makes the models of this process."""
    if threads:
        torch.set_num_threads(threads)
    _, build, (samples, *shape) = NETWORKS[network]
    x = torch.randn(samples * replicas, *shape)
    for name, way in (("plain", "plain BatchNorm in syncbn's replicas"), ("syncbn", "syncbn")):
        _steps[name] = training(WAYS[way](build(), replicas, "cpu"), x)


def run(name: str, has_gil: bool) -> Figures:
    """A step in this process."""
    assert sys._is_gil_enabled() == has_gil  # type: ignore[attr-defined,unused-ignore]
    return _steps[name]()


def measure(network: str, replicas: int, threads: int, seconds: float) -> Row:
    ways: dict[str, Callable[[], Figures]] = {}
    with ExitStack() as stack:
        pools = {}
        for has_gil in (True, False):
            os.environ["PYTHON_GIL"] = str(int(has_gil))
            pools[has_gil] = stack.enter_context(
                ProcessPoolExecutor(1, get_context("spawn"), begin, (network, replicas, threads))
            )
            pools[has_gil].submit(bool).result()  # starts the process, which reads the variable
        for name in ("plain", "syncbn"):
            for has_gil, pool in pools.items():
                step = partial(pool.submit, run, name, has_gil)
                title = f"{name} {'with' if has_gil else 'without'} the GIL"
                ways[title] = lambda step=step: step().result()
        return Row(NETWORKS[network].title, replicas, threads, alternating(ways, seconds))


def main() -> None:
    options = parser_of_networks(__doc__)
    given = options.parse_args()
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        options.error("this Python always has the GIL; run it with python3.14t")
    os.environ.update(KEEP_MEMORY)
    rows = (
        measure(network, count, number, given.seconds)
        for network, number, count in product(given.network, given.threads, given.replicas)
    )
    show(Table("Without the GIL", ABOUT, rows))


if __name__ == "__main__":
    main()
