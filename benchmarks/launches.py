"""What one layer makes the host do for GPUs: launches, collectives, copies and waits, counted.

    python -m benchmarks.launches
    python -m benchmarks.launches --write     # into details.md

They are counted by the simulated CUDA runtime of the tests (`tests/cuda`), below torch's CUDA
build, so no GPU is needed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks import simulated
from benchmarks.measuring import in_processes, line, replaced
from replication import DataParallel
from syncbn import convert_model
from tests.cuda import environment, runtime

#: Per rank or replica.
SHAPE = (4, 16, 8, 8)

#: Two networks of so many layers are counted, and their difference is shown per layer: what a
#: wrapper does once is in neither.
DEPTHS = (10, 20)

RANKS = 2
REPLICAS = (2, 4)

#: The kinds of what is counted, and their headings.
KINDS = {
    "launches": "launches",
    "collectives": "collectives",
    "copies": "copies between devices",
    "host": "copies between host and device",
    "waits": "host waits",
}

ABOUT = (
    f"One layer with {SHAPE[1]} channels and shards of {' x '.join(map(str, SHAPE))}, in float32 "
    "unless it says otherwise, in forward + backward. A launch is a kernel that torch's CUDA "
    "build starts, or a call of cuDNN. Of replicas, those of all devices are added."
)

#: Each makes a network from one with plain BatchNorm.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nn.BatchNorm2d": lambda net: net,
    "syncbn": convert_model,
    "nn.SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm,
}


#: Unusual layers, as options of `nn.BatchNorm2d`, the dtype of weights and buffers, that of the
#: input, and its memory format.
CASES: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype, torch.memory_format]] = {
    "usual": ({}, torch.float32, torch.float32, torch.contiguous_format),
    "channels_last": ({}, torch.float32, torch.float32, torch.channels_last),
    "input in float16": ({}, torch.float32, torch.float16, torch.contiguous_format),
    "all in bfloat16": ({}, torch.bfloat16, torch.bfloat16, torch.contiguous_format),
    "affine=False": ({"affine": False}, torch.float32, torch.float32, torch.contiguous_format),
    "no running statistics": (
        *({"track_running_stats": False}, torch.float32),
        *(torch.float32, torch.contiguous_format),
    ),
    "momentum=None": ({"momentum": None}, torch.float32, torch.float32, torch.contiguous_format),
}

#: What a forward or backward of one layer does, by kind.
Counts = dict[str, float]


@contextmanager
def nccl(rank: int, size: int, folder: str) -> Iterator[None]:
    """A rank on the GPU of its number."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl",
        store=distributed.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=2),
        device_id=device,
    )
    yield
    distributed.destroy_process_group()


def in_ranks(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``function(rank, folder, *arguments)`` in ranks, and returns what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(RANKS, 1, function, folder, *arguments)


def stack(depth: int, case: str = "usual") -> nn.Module:
    options, dtype, *_ = CASES[case]
    return nn.Sequential(*[nn.BatchNorm2d(SHAPE[1], **options) for _ in range(depth)]).to(dtype)


def kinds(report: dict[str, dict[str, int]]) -> Counter[str]:
    """What a report of the runtime counts, by kind, and launches by the name of the kernel."""
    found = runtime.kernels(report)
    found["launches"] = sum(report.get("launches", {}).values())
    found["collectives"] = sum(
        number for name, number in report.get("nccl", {}).items() if name in COLLECTIVES
    )
    for name, number in report.get("copies", {}).items():
        if "between devices" in name:
            found["copies"] += number
        elif "on one device" not in name:
            found["host"] += number
    # Threads of NCCL wait by themselves.
    found["waits"] = sum(n for name, n in report.get("waits", {}).items() if "nccl" not in name)
    return found


COLLECTIVES = ("ncclAllGather", "ncclAllReduce", "ncclReduceScatter")


def counted(model: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> list[Counter[str]]:
    """Counts a third forward and backward."""
    for _ in range(3):
        with runtime.counted() as forward:
            y = model(inputs[0])
        dy = torch.ones_like(y)
        with runtime.counted() as backward:
            torch.autograd.grad(y, inputs, dy)
    return [kinds(forward), kinds(backward)]


def per_layer(count: Callable[[int], list[Counter[str]]]) -> list[Counts]:
    """Of forward and backward, from the difference between two depths."""
    small, large = (count(depth) for depth in DEPTHS)
    return [
        {
            kind: (more[kind] - less[kind]) / (DEPTHS[1] - DEPTHS[0])
            for kind in {**KINDS, **more}
            if kind in KINDS or more[kind] != less[kind]
        }
        for less, more in zip(small, large, strict=True)
    ]


def of_a_rank(rank: int, folder: str) -> dict[str, dict[str, list[Counts]]]:
    """Counts in a rank: the usual layer in each way, and ours in each case."""

    def count(way: str, case: str, depth: int) -> list[Counter[str]]:
        _, _, dtype, layout = CASES[case]
        x = torch.zeros(SHAPE, device=f"cuda:{rank}", dtype=dtype)
        x = x.contiguous(memory_format=layout).requires_grad_()
        net = WAYS[way](stack(depth, case)).to(x.device)
        return counted(net, [x, *net.parameters()])

    with nccl(rank, RANKS, folder):
        return {
            f"each of {RANKS} ranks": {
                way: per_layer(partial(count, way, "usual")) for way in WAYS
            },
            f"syncbn, each of {RANKS} ranks": {
                case: per_layer(partial(count, "syncbn", case))
                for case in CASES
                if case != "usual"
            },
        }


def of_replicas(number: int) -> dict[str, list[Counts]]:
    """Counts of all replicas, by way."""
    devices = [f"cuda:{index}" for index in range(number)]
    x = torch.zeros(SHAPE[0] * number, *SHAPE[1:], device=devices[0], requires_grad=True)

    def count(
        wrap: Callable[..., nn.Module], make: Callable[[nn.Module], nn.Module], depth: int
    ) -> list[Counter[str]]:
        net = make(stack(depth)).to(x.device)
        return counted(wrap(net, devices), [x, *net.parameters()])

    return {
        "nn.BatchNorm2d in nn.DataParallel": per_layer(
            partial(count, nn.DataParallel, WAYS["nn.BatchNorm2d"])
        ),
        "syncbn in DataParallel": per_layer(partial(count, DataParallel, convert_model)),
    }


def everything() -> dict[str, dict[str, list[Counts]]]:
    """All counts, by what a row begins with, and by where."""
    usual, cases = in_ranks(of_a_rank).items()
    replicas = {f"{number} replicas": of_replicas(number) for number in REPLICAS}
    return dict([usual, *replicas.items(), cases])


def lines() -> Iterator[str]:
    """The table in Markdown, line by line."""
    yield from (ABOUT, "")
    headings = ["layer", *KINDS.values()]
    yield line(headings)
    yield line(["---"] * len(headings))
    found = simulated.call("benchmarks.launches:everything", devices=max(REPLICAS), computes=False)
    for where, rows in found.items():
        for name, (forward, backward) in rows.items():
            cells = [f"{forward[kind]:g} + {backward[kind]:g}" for kind in KINDS]
            yield line([f"{name}, {where}", *cells])
    yield from ("", "The kernels of a usual layer in a rank, by name:", "")
    usual = found[f"each of {RANKS} ranks"]
    yield line(["kernel", *usual])
    yield line(["---"] * (1 + len(usual)))
    for name in sorted({n for counts in usual.values() for c in counts for n in c} - {*KINDS}):
        cells = [
            "{:g} + {:g}".format(*(c.get(name, 0) for c in counts)) for counts in usual.values()
        ]
        yield line([f"`{name}`", *cells])


def table() -> str:
    return "\n".join(lines())


PAGE = Path(__file__).with_name("details.md")


def print_or_write(about: str | None, table: Callable[[], str], name: str) -> None:
    """Runs a program that prints a table, and with ``--write`` writes it between its marks."""
    options = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    options.add_argument("--write", action="store_true", help="write the table into the page")
    given = options.parse_args()
    try:
        found = table()
    except environment.Unavailable as reason:
        options.error(str(reason))
    print(found)
    if given.write:
        PAGE.write_text(replaced(PAGE.read_text("utf-8"), name, found), "utf-8")


if __name__ == "__main__":
    print_or_write(__doc__, table, "launches")
