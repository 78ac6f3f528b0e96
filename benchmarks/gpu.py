"""What synchronization costs on one GPU: launches of a layer, and training steps.

All replicas, or processes, share the GPU. Processes communicate through gloo, which is slow, and
which `torch.nn.SyncBatchNorm` allows on a single GPU.

    python -m benchmarks.gpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import processes, step
from benchmarks.layer import REPLICAS, WAYS
from benchmarks.measuring import Row, Table, in_processes, parser, show
from replication import DataParallel, Scattered

DEVICE = "cuda:0"

NETWORKS = ("dense", "resnet")

ABOUT_LAUNCHES = (
    f"Kernels that {REPLICAS} replicas of one layer launch in forward and backward. The unit is "
    "plain BatchNorm."
)


def launches(make: Callable[[nn.Module], nn.Module]) -> int:
    """Count the kernels of a forward and a backward, by the profiler."""
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
        torch.cuda.synchronize()

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        run()
    kernels = [e for e in events.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(kernels)


def count(rank: int) -> Row:
    figures = {name: (float(launches(make)),) for name, make in WAYS.items()}
    return Row("8 x 64 x 56 x 56", REPLICAS, torch.get_num_threads(), figures)


def counts() -> Iterator[Row]:
    yield in_processes(1, 0, count)


def tables(seconds: float) -> list[Table]:
    return [
        Table("Launches on a GPU", ABOUT_LAUNCHES, counts(), unit="launches"),
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
