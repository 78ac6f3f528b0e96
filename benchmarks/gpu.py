"""What only a GPU shows: launches of a layer, training steps, and what threads that live on save.

All replicas, or processes, share the GPU. Processes communicate through gloo, which is slow, and
which `torch.nn.SyncBatchNorm` allows on a single GPU.

    python -m benchmarks.gpu
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import host, processes, step
from benchmarks.layer import REPLICAS, WAYS
from benchmarks.measuring import Figures, Row, Table, in_processes, parser, show
from benchmarks.networks import NETWORKS as NETWORKS_BY_NAME
from replication import DataParallel, Scattered

DEVICE = "cuda:0"

NETWORKS = ("dense", "resnet")

ABOUT_LAUNCHES = (
    f"Kernels that {REPLICAS} replicas of one layer launch in forward and backward. The unit is "
    "plain BatchNorm."
)


def kernels_of(run: Callable[[], object]) -> float:
    """Counts the kernels of a second run, by the profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in events.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return float(len(kernels))


def launches(make: Callable[[nn.Module], nn.Module]) -> float:
    """Counts the kernels of a forward and a backward of replicas."""
    layer = make(nn.BatchNorm2d(64)).to(DEVICE)
    model = DataParallel(layer, [DEVICE] * REPLICAS, gather_to_one_device=False)
    shards, upstream = (
        [torch.randn(8, 64, 56, 56, device=DEVICE) for _ in range(REPLICAS)] for _ in range(2)
    )
    for shard in shards:
        shard.requires_grad_()

    def run() -> None:
        outputs = model(Scattered(shards))
        torch.autograd.grad(outputs, [*shards, *model.parameters()], upstream)

    return kernels_of(run)


ABOUT_LAUNCHES_OF_A_RANK = (
    "Kernels, and copies between the host and the GPU, of one layer in forward and backward, in a "
    "process whose group pretends to have two ranks. What it pretends to exchange is copied, so "
    "these copies count as well. The unit is plain BatchNorm."
)


def launches_of_a_rank(rank: int) -> Row:
    """Counts the kernels of a forward and a backward in a process, in each way."""
    x, upstream = (torch.randn(8, 64, 56, 56, device=DEVICE) for _ in range(2))
    figures = {}
    with processes.pretending("cuda"):
        for name, convert in processes.ON_ACCELERATORS.items():
            layer = convert(nn.Sequential(nn.BatchNorm2d(64))).to(DEVICE)
            inputs = [x.requires_grad_(), *layer.parameters()]

            def run(layer: nn.Module = layer, inputs: list[torch.Tensor] = inputs) -> None:
                torch.autograd.grad(layer(x), inputs, upstream)

            figures[name] = (kernels_of(run),)
    return Row("8 x 64 x 56 x 56", 1, torch.get_num_threads(), figures)


def counts_of_a_rank() -> Iterator[Row]:
    yield in_processes(1, 0, launches_of_a_rank)


def count(rank: int) -> Row:
    figures = {name: (launches(make),) for name, make in WAYS.items()}
    return Row("8 x 64 x 56 x 56", REPLICAS, torch.get_num_threads(), figures)


def counts() -> Iterator[Row]:
    yield in_processes(1, 0, count)


ABOUT_THREADS = (
    "ResNet-50 with `torch.backends.cudnn.benchmark`, on two replicas. torch keeps cuDNN's plans "
    "per thread. Its DataParallel makes new threads in each forward, ours keeps them. The unit is "
    "torch's. Cells are the second and later steps, and in brackets the first step."
)

ABOUT_MEMORY = (
    "How much the resident memory of the host grows in 200 such steps, after 20, in MiB. The unit "
    "is torch's."
)

#: Each wraps a network in two replicas on the GPU.
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch's DataParallel": lambda net: nn.DataParallel(net, [DEVICE] * 2),
    "ours": lambda net: DataParallel(net, [DEVICE] * 2),
}


def steps_of(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Figures]:
    """A training step of a new network, with plain BatchNorm, that searches cuDNN's plans."""
    torch.backends.cudnn.benchmark = True
    _, build, (samples, *shape) = NETWORKS_BY_NAME["resnet"]
    return step.training(wrap(build().to(DEVICE)), torch.randn(2 * samples, *shape, device=DEVICE))


def plans(rank: int, name: str, count: int = 10) -> Figures:
    """Milliseconds of a later step, and of the first, in a new process."""
    run = steps_of(WRAPPERS[name])
    first, *later = [run()[0] for _ in range(count)]
    return statistics.median(later), first


def resident() -> float:
    """The memory of this process in MiB, where Linux's /proc tells it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(rank: int, name: str, warm_up: int = 20, count: int = 200) -> Figures:
    """MiB by which the process grows."""
    run, sizes = steps_of(WRAPPERS[name]), []
    for number in (warm_up, count):
        for _ in range(number):
            run()
        sizes.append(resident())
    return (sizes[1] - sizes[0],)


def in_turn(measure: Callable[..., Figures]) -> Iterator[Row]:
    figures = {name: in_processes(1, 0, measure, name) for name in WRAPPERS}
    yield Row("ResNet-50, 64x64", REPLICAS, torch.get_num_threads(), figures)


def tables(seconds: float) -> list[Table]:
    return [
        Table("Launches on a GPU", ABOUT_LAUNCHES, counts(), unit="launches"),
        Table(
            "Launches of a rank on a GPU",
            ABOUT_LAUNCHES_OF_A_RANK,
            counts_of_a_rank(),
            unit="launches",
            counted="processes",
        ),
        Table(
            "The host's time of a rank on a GPU",
            host.ABOUT_RANK,
            host.rows_of_a_rank("cuda", seconds),
            counted="processes",
        ),
        Table("Plans of convolutions", ABOUT_THREADS, in_turn(plans)),
        Table("Memory of the host", ABOUT_MEMORY, in_turn(growth), unit="MiB"),
        Table("Training steps on a GPU", step.ABOUT, step.rows(seconds, NETWORKS, device=DEVICE)),
        Table(
            "Between processes on a GPU",
            processes.ABOUT,
            processes.rows(seconds, NETWORKS, (2,), DEVICE),
            counted="processes",
        ),
    ]


if __name__ == "__main__":
    seconds = parser(__doc__).parse_args().seconds
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    for table in tables(seconds):
        show(table)
