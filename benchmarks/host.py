"""What a synchronized layer costs the host: the CPU time of all threads, per layer.

Where layers are small, training on several accelerators is limited by the host. No accelerator is
needed: simulated ones (`tests/accelerator`) compute nothing, but each launch takes 4 us without
the GIL. They need a C++ compiler.

    python -m benchmarks.host --replicas 2 8

A rank of `torch.distributed` is measured beside `nn.SyncBatchNorm` itself, which accepts these
devices. Its group pretends to have two ranks and exchanges nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn

from benchmarks import processes, yardsticks
from benchmarks.measuring import Figures, Row, Table, alternating, in_processes, parser, show
from replication import DataParallel
from syncbn import convert_model
from tests import accelerator

REPLICAS = (2, 4, 8)

#: The number of layers of the network.
LAYERS = 30

#: Per replica.
SHAPE = (2, 8, 4, 4)

ABOUT = (
    f"A stack of {LAYERS} BatchNorms in `replication.DataParallel`, each replica on a separate "
    "simulated accelerator, whose kernels compute nothing and take 4 us. The unit is the CPU "
    "time of all threads with plain BatchNorm. Cells are a step without the optimizer, and in "
    "brackets forward and backward."
)

ABOUT_RANK = (
    f"A stack of {LAYERS} BatchNorms on one accelerator, in a process whose group pretends to "
    "have two ranks and exchanges nothing. The unit is the CPU time of all threads with plain "
    "BatchNorm. Cells are a step without the optimizer, and in brackets forward and backward."
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


def measure(rank: int, replicas: int, seconds: float) -> Row:
    accelerator.register(is_hollow=True)
    devices = [f"{accelerator.NAME}:{index}" for index in range(replicas)]
    samples, *shape = SHAPE
    x = torch.randn(samples * replicas, *shape).to(devices[0]).requires_grad_()
    ways = {}
    for name, convert in WAYS.items():
        layers = [nn.BatchNorm2d(SHAPE[1]) for _ in range(LAYERS)]
        net = convert(nn.Sequential(*layers)).to(devices[0])
        ways[name] = partial(step, DataParallel(net, devices), x)
    return Row(f"{LAYERS} layers", replicas, 1, alternating(ways, seconds))


def measure_rank(rank: int, kind: str, seconds: float) -> Row:
    if kind == accelerator.NAME:
        accelerator.register(is_hollow=True)
    x, ways = torch.randn(SHAPE).to(f"{kind}:0").requires_grad_(), {}
    for name, convert in processes.ON_ACCELERATORS.items():
        net = nn.Sequential(*[nn.BatchNorm2d(SHAPE[1]) for _ in range(LAYERS)])
        ways[name] = partial(step, convert(net).to(x.device), x)
    with processes.pretending(kind):
        figures = alternating(ways, seconds)
    return Row(f"{LAYERS} layers", 1, 1, figures)


def rows_of_a_rank(kind: str, seconds: float) -> Iterator[Row]:
    os.environ["SIMULATED_DEVICES"] = "1"
    yield in_processes(1, 1, measure_rank, kind, seconds)


def rows(seconds: float, replicas: Iterable[int] = REPLICAS) -> Iterator[Row]:
    os.environ["SIMULATED_DEVICES"] = str(max(REPLICAS))
    for number in replicas:
        yield in_processes(1, 1, measure, number, seconds)


def tables(seconds: float, *choice: Iterable[int]) -> list[Table]:
    """The tables, if this machine can build the simulated accelerators."""
    if accelerator.reason_to_skip() is not None:
        return []
    of_a_rank = rows_of_a_rank(accelerator.NAME, seconds)
    return [
        Table("Accelerators: the host's time", ABOUT, rows(seconds, *choice)),
        Table(
            "Accelerators: the host's time of a rank", ABOUT_RANK, of_a_rank, counted="processes"
        ),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--replicas", nargs="+", type=int, default=REPLICAS)
    given = options.parse_args()
    if reason := accelerator.reason_to_skip():
        options.error(reason)
    for table in tables(given.seconds, given.replicas):
        show(table)


if __name__ == "__main__":
    main()
