"""What synchronization costs in a training step of processes under DistributedDataParallel.

`torch.nn.SyncBatchNorm` refuses the CPU, so its scheme takes part there, and itself on a GPU.

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


def together(way: Callable[[], Figures]) -> Figures:
    """Runs a way that all processes begin at the same time."""
    distributed.barrier()
    return way()


def agree(goes_on: bool) -> bool:
    """Return what rank 0 has passed."""
    flag = torch.tensor(goes_on, dtype=torch.uint8)
    distributed.broadcast(flag, 0)
    return bool(flag)


def measure(rank: int, name: str, size: int, seconds: float, device: str, folder: str) -> Row:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=2),
    )
    title, build, shape = NETWORKS[name]
    x = torch.randn(shape).to(device)
    ways = {}
    for way, make in (WAYS if device == "cpu" else ON_GPUS).items():
        model = DistributedDataParallel(make(build()).to(device))
        ways[way] = partial(together, training(model, x))
    figures = alternating(ways, seconds, agree)
    distributed.destroy_process_group()
    return Row(title, size, torch.get_num_threads(), figures)


def rows(
    seconds: float,
    networks: Iterable[str] = NAMES,
    sizes: Iterable[int] = PROCESSES,
    device: str = "cpu",
) -> Iterator[Row]:
    for name, size in product(networks, sizes):
        with tempfile.TemporaryDirectory() as folder:
            yield in_processes(size, 1, measure, name, size, seconds, device, folder)


def table(seconds: float) -> Table:
    return Table("Between processes", ABOUT, rows(seconds), counted="processes")


if __name__ == "__main__":
    show(table(parser(__doc__).parse_args().seconds))
