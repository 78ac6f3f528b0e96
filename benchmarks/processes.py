"""What synchronization costs in a training step of processes under DistributedDataParallel.

`torch.nn.SyncBatchNorm` refuses the CPU, so its scheme takes part there, and itself on a GPU. The
second table shows what `torch.compile` saves, also where ranks exchange nothing (torch's backend
"fake"): on the CPU, waiting for other ranks takes most of a step.

    python -m benchmarks.processes
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import yardsticks
from benchmarks.measuring import Figures, Row, Table, alternating, in_processes, parser, show
from benchmarks.networks import NETWORKS
from benchmarks.step import training
from syncbn import convert_model

#: Those whose steps depend most on the cost of a layer, and on the usual width.
NAMES = ("dense", "narrow", "unet")

PROCESSES = (2, 4)

ABOUT = (
    "Training steps of processes under `DistributedDataParallel` on gloo, one torch thread each: "
    "forward, backward and SGD. The unit is plain BatchNorm, which synchronizes nothing. Cells "
    "are the step, and in brackets forward and backward."
)

ABOUT_COMPILED = (
    "The same steps with `torch.compile(net)`. In the rows of 1 process, its group pretends to "
    "have two ranks and exchanges nothing, and there is no DistributedDataParallel. The unit is "
    "plain BatchNorm, uncompiled."
)

#: Each makes a network from one with plain BatchNorm.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain BatchNorm": lambda net: net,
    "ours": convert_model,
    "`nn.SyncBatchNorm`'s scheme": partial(yardsticks.convert, kind=yardsticks.ProcessBatchNorm),
}
ON_GPUS = {
    "plain BatchNorm": WAYS["plain BatchNorm"],
    "ours": convert_model,
    "`nn.SyncBatchNorm`": nn.SyncBatchNorm.convert_sync_batchnorm,
}
COMPILED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain BatchNorm": WAYS["plain BatchNorm"],
    "plain BatchNorm, compiled": torch.compile,
    "ours": convert_model,
    "ours, compiled": lambda net: torch.compile(convert_model(net)),
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


def measure(
    rank: int, name: str, size: int, seconds: float, device: str, folder: str, compiles: bool
) -> Row:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo" if size > 1 else "fake",
        store=distributed.FileStore(f"{folder}/store", size) if size > 1 else FakeStore(),
        rank=rank,
        world_size=max(2, size),
        timeout=timedelta(minutes=10),  # ranks may take long to compile
    )
    title, build, shape = NETWORKS[name]
    x = torch.randn(shape).to(device)
    ways = {}
    for way, make in (COMPILED if compiles else WAYS if device == "cpu" else ON_GPUS).items():
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


def tables(seconds: float) -> list[Table]:
    compiled = rows(seconds, ("narrow", "unet"), (1, 2), compiles=True)
    return [
        Table("Between processes", ABOUT, rows(seconds), counted="processes"),
        Table("Compiled", ABOUT_COMPILED, compiled, counted="processes"),
    ]


if __name__ == "__main__":
    for table in tables(parser(__doc__).parse_args().seconds):
        show(table)
