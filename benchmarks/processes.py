"""What synchronization costs in a process: a layer, and training steps.

`torch.nn.SyncBatchNorm` refuses the CPU, so its scheme takes part there, and itself on a GPU. On
the CPU, waiting for other ranks takes most of a step. So a layer and the steps are also measured
where ranks exchange nothing (torch's backend "fake"). The last two tables show the time and the
memory that `torch.compile` saves.

    python -m benchmarks.processes
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import activations, yardsticks
from benchmarks.measuring import Figures, Row, Table, alternating, in_processes, parser, show
from benchmarks.networks import NETWORKS
from benchmarks.step import training
from syncbn import convert_model

#: Those whose steps depend most on the cost of a layer, and on the usual width.
NAMES = ("dense", "narrow", "unet")

PROCESSES = (2, 4)

#: The input of a layer alone, and how many calls are timed together.
SHARD, CALLS = (4, 16, 8, 8), 50

ABOUT_LAYER = (
    "One layer, forward and backward, in a process whose group pretends to have two ranks and "
    "exchanges nothing. The unit is the CPU time with plain BatchNorm. Cells are both, and in "
    "brackets each."
)

ABOUT = (
    "Training steps of processes under `DistributedDataParallel` on gloo, one torch thread each: "
    "forward, backward and SGD. The unit is plain BatchNorm, which synchronizes nothing. Cells "
    "are the step, and in brackets forward and backward."
)

ABOUT_ALONE = (
    "The same steps in a process whose group pretends to have two ranks and exchanges nothing, "
    "without `DistributedDataParallel`."
)

ABOUT_COMPILED = (
    "The same steps with `torch.compile(net)`. In the rows of 1 process, its group pretends to "
    "have two ranks and exchanges nothing, and there is no DistributedDataParallel. The unit is "
    "plain BatchNorm, uncompiled."
)

#: Each makes a network from one with plain BatchNorm.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain BatchNorm": lambda net: net,
    "syncbn": convert_model,
    "`nn.SyncBatchNorm`'s scheme": partial(yardsticks.convert, kind=yardsticks.ProcessBatchNorm),
}
ON_ACCELERATORS = {
    "plain BatchNorm": WAYS["plain BatchNorm"],
    "syncbn": convert_model,
    "`nn.SyncBatchNorm`": nn.SyncBatchNorm.convert_sync_batchnorm,
}
COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain BatchNorm": WAYS["plain BatchNorm"],
    "plain BatchNorm, compiled": torch.compile,
    "syncbn": convert_model,
    "syncbn, compiled": lambda net: torch.compile(convert_model(net)),
}


def together(way: Callable[[], Figures]) -> Figures:
    """Runs a way that all processes begin at the same time."""
    distributed.barrier()
    return way()


def agree(goes_on: bool) -> bool:
    """Return what rank 0 has passed."""
    flag = torch.tensor(goes_on, dtype=torch.uint8)
    distributed.broadcast(flag, 0)
    return bool(flag)


def connect(rank: int = 0, size: int = 1, folder: str = "") -> None:
    """Connects processes by gloo. A single one pretends to be the first of two."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo" if size > 1 else "fake",
        store=distributed.FileStore(f"{folder}/store", size) if size > 1 else FakeStore(),
        rank=rank,
        world_size=max(2, size),
        timeout=timedelta(minutes=10),  # ranks may take long to compile
    )


@contextmanager
def pretending() -> Iterator[None]:
    """Makes this process the first of two, which exchange nothing, on GPUs."""
    distributed.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=0, world_size=2)
    # `nn.SyncBatchNorm` gathers into one row, which real backends take and this one does not.
    name = (
        "all_gather_single"
        if hasattr(distributed, "all_gather_single")
        else "all_gather_into_tensor"
    )
    gather = getattr(distributed, name)

    def into_one_row(row: Tensor, *arguments: Any, **options: Any) -> Any:
        return gather(row.view(-1), *arguments, **options)

    try:
        with patch.object(distributed, name, into_one_row):
            yield
    finally:
        distributed.destroy_process_group()


def run(net: nn.Module, x: Tensor, upstream: Tensor) -> Figures:
    """Microseconds of CPU time of a forward and backward, and of each."""
    begin = time.process_time()
    outputs = [net(x) for _ in range(CALLS)]
    forward = time.process_time()
    for y in outputs:
        torch.autograd.grad(y, [x, *net.parameters()], upstream)
    end = time.process_time()
    scale = 1e6 / CALLS
    return scale * (end - begin), scale * (forward - begin), scale * (end - forward)


def measure_layer(rank: int, seconds: float) -> list[Row]:
    connect()
    x, upstream = torch.randn(SHARD, requires_grad=True), torch.randn(SHARD)
    nets = {way: make(nn.Sequential(nn.BatchNorm2d(SHARD[1]))) for way, make in WAYS.items()}
    figures = alternating(
        {way: partial(run, net, x, upstream) for way, net in nets.items()}, seconds
    )
    distributed.destroy_process_group()
    return [Row(" x ".join(map(str, SHARD)), 1, torch.get_num_threads(), figures)]


def measure_activations(rank: int) -> list[Row]:
    connect()
    figures = activations.figures()
    distributed.destroy_process_group()
    case = f"{activations.LAYERS} x [Conv 3x3, BN, ReLU]"
    return [Row(case, 1, torch.get_num_threads(), figures)]


def measure(
    rank: int, name: str, size: int, seconds: float, device: str, folder: str, compiles: bool
) -> Row:
    connect(rank, size, folder)
    title, build, shape = NETWORKS[name]
    x = torch.randn(shape).to(device)
    ways = {}
    for way, make in (
        COMPILED if compiles else WAYS if device == "cpu" else ON_ACCELERATORS
    ).items():
        net = make(build()).to(device)
        model = DistributedDataParallel(net) if size > 1 else net
        ways[way] = partial(together, training(model, x))
        if compiles:
            ways[way]()
    figures = alternating(ways, seconds, agree)
    distributed.destroy_process_group()
    return Row(title, size, torch.get_num_threads(), figures)


def rows(
    seconds: float,
    networks: Iterable[str] = NAMES,
    sizes: Iterable[int] = PROCESSES,
    device: str = "cpu",
    compiles: bool = False,
) -> Iterator[Row]:
    for name, size in product(networks, sizes):
        with tempfile.TemporaryDirectory() as folder:
            yield in_processes(size, 1, measure, name, size, seconds, device, folder, compiles)


def of_one_process(measure: Callable[..., list[Row]], *arguments: float) -> Iterator[Row]:
    yield from in_processes(1, 1, measure, *arguments)


def tables(seconds: float) -> list[Table]:
    layer = of_one_process(measure_layer, seconds)
    compiled = rows(seconds, ("narrow", "unet"), (1, 2), compiles=True)
    kept = of_one_process(measure_activations)
    return [
        Table("A layer in a process", ABOUT_LAYER, layer, "us", "processes"),
        Table("Between processes", ABOUT, rows(seconds), counted="processes"),
        Table(
            "Without communication", ABOUT_ALONE, rows(seconds, sizes=(1,)), counted="processes"
        ),
        Table("Compiled", ABOUT_COMPILED, compiled, counted="processes"),
        Table("Activations", activations.ABOUT, kept, "KiB", "processes"),
    ]


if __name__ == "__main__":
    for table in tables(parser(__doc__).parse_args().seconds):
        show(table)
