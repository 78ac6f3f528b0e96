"""What a synchronized layer costs the host of GPUs: the CPU time of all threads.

Where layers are small, training on several GPUs is limited by the host. No GPU is needed: torch's
CUDA build runs on a simulated runtime (`tests/cuda`), whose kernels compute nothing.

    python -m benchmarks.host --replicas 2 8

A kernel takes no CPU time, however long it runs, but the driver of a GPU does for each launch. So
the simulated one computes for 4 us, without the GIL. A rank of `torch.distributed` is measured
beside `nn.SyncBatchNorm` itself. Its collectives wait for no other rank: the simulated NCCL would
compute meanwhile, where a host that only launches goes on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import processes, simulated, yardsticks
from benchmarks.launches import RANKS, nccl
from benchmarks.measuring import (
    Figures,
    Row,
    Table,
    alternating,
    environment,
    in_processes,
    parser,
    show,
)
from replication import DataParallel
from syncbn import convert_model

REPLICAS = (2, 4, 8)

#: The number of layers of the network.
LAYERS = 30

#: Per replica or rank.
SHAPE = (2, 8, 4, 4)

#: Microseconds that a launch takes the host.
LAUNCH = 4

#: Of the simulated runtime.
SETTINGS = {"SIMULATED_LAUNCH_US": str(LAUNCH), "SIMULATED_NCCL_MOVES": "0"}

UNIT = (
    "The unit is the CPU time of all threads with plain BatchNorm. Cells are a step without the "
    "optimizer, and in brackets forward and backward."
)

ABOUT = (
    f"A stack of {LAYERS} BatchNorms in `replication.DataParallel`, each replica on a separate "
    "GPU. The GPUs are simulated: torch's code for CUDA runs, kernels compute nothing, and a "
    f"launch or a copy takes the host {LAUNCH} us. {UNIT}"
)

ABOUT_RANK = (
    f"A stack of {LAYERS} BatchNorms in one of {RANKS} ranks (NCCL), each on a GPU that is "
    f"simulated in the same way. A collective takes the host {LAUNCH} us and waits for no other "
    f"rank. {UNIT}"
)

#: Each makes a network from one with plain BatchNorm.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain BatchNorm": lambda net: net,
    "syncbn": convert_model,
    "older toolkits": yardsticks.convert,
}


def step(model: nn.Module, x: torch.Tensor) -> Figures:
    """Milliseconds of CPU time of a step, of its forward, and of its backward."""
    begin = time.process_time()
    loss = model(x).sum()
    forward = time.process_time()
    loss.backward()
    end = time.process_time()
    return 1e3 * (end - begin), 1e3 * (forward - begin), 1e3 * (end - forward)


def measure(
    ways: dict[str, Callable[[nn.Module], nn.Module]],
    wrap: Callable[[nn.Module], nn.Module],
    x: torch.Tensor,
    seconds: float,
) -> dict[str, Figures]:
    steps = {}
    for way, make in ways.items():
        net = make(nn.Sequential(*[nn.BatchNorm2d(SHAPE[1]) for _ in range(LAYERS)]))
        steps[way] = partial(step, wrap(net.to(x.device)), x.requires_grad_())
    return alternating(steps, seconds)


def in_replicas(rank: int, number: int, seconds: float) -> dict[str, Figures]:
    samples, *shape = SHAPE
    x = torch.randn(samples * number, *shape, device="cuda:0")
    devices = [f"cuda:{index}" for index in range(number)]
    return measure(WAYS, lambda net: DataParallel(net, devices), x, seconds)


def in_rank(device: str, seconds: float) -> dict[str, Figures]:
    """In a process that is a rank already."""
    x = torch.randn(SHAPE, device=device)
    return measure(processes.ON_ACCELERATORS, lambda net: net, x, seconds)


def with_nccl(rank: int, size: int, folder: str, seconds: float) -> dict[str, Figures]:
    with nccl(rank, size, folder):
        return in_rank(f"cuda:{rank}", seconds)


def of_replicas(number: int, seconds: float) -> Any:
    return in_processes(1, 1, in_replicas, number, seconds)


def of_ranks(size: int, seconds: float) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(size, 1, with_nccl, size, folder, seconds)


def rows(function: str, counts: Iterable[int], seconds: float) -> Iterator[Row]:
    """What a function of this module measures with so many simulated GPUs."""
    for count in counts:
        with environment(SETTINGS):
            figures = simulated.call(
                f"benchmarks.host:{function}", count, seconds, devices=count, computes=False
            )
        yield Row(f"{LAYERS} layers", count, 1, figures)


def tables(seconds: float, replicas: Iterable[int] = REPLICAS) -> list[Table]:
    """The tables, if this machine can run the simulation."""
    if simulated.reason_to_skip() is not None:
        return []
    of_ranks = rows("of_ranks", [RANKS], seconds)
    return [
        Table("Accelerators: the host's time", ABOUT, rows("of_replicas", replicas, seconds)),
        Table(
            "Accelerators: the host's time of a rank", ABOUT_RANK, of_ranks, counted="processes"
        ),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--replicas", nargs="+", type=int, default=REPLICAS)
    given = options.parse_args()
    if reason := simulated.reason_to_skip():
        options.error(reason)
    for table in tables(given.seconds, given.replicas):
        show(table)


if __name__ == "__main__":
    main()
