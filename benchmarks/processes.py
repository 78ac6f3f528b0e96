"""What a synchronized layer costs between processes: time, collectives and bytes per layer.

Each number of ranks is a run of its own, in which the ways to synchronize take turns, one step
each, so that all of them see the same machine. A step is forward and backward of one layer.

    plain     `torch.nn.BatchNorm2d`, which synchronizes nothing
    ours      `syncbn.SynchronizedBatchNorm2d`
    reduce    ours, with an all-reduce also where it would gather
    gather    ours, with a gather also where it would reduce: the bytes of each rank's statistics,
              as `torch.nn.SyncBatchNorm` (which refuses the CPU) sends them forward

    python -m benchmarks.processes --ranks 2 4 8 16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, multiprocessing, nn

from benchmarks.measuring import WARM_UP, Row, keep_memory
from replication.groups import processes as process_group
from syncbn import SynchronizedBatchNorm2d

CHANNELS = 256


class Figures(NamedTuple):
    """Of one way."""

    #: The median.
    seconds: float
    #: The collectives of a step.
    calls: int
    #: The bytes that a rank gets in a step.
    received: int


class Counting:
    """Counts the collectives of a step, and the bytes that each rank gets from the others."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.calls = self.received = 0

    def all_reduce(self, tensor: Tensor, **options: Any) -> None:
        self.calls += 1
        # Of a ring: all but one part of n, twice.
        self.received += 2 * (self._ranks - 1) * _bytes(tensor) // self._ranks
        _all_reduce(tensor, **options)

    def all_gather(self, tensors: list[Tensor], tensor: Tensor, group: Any) -> None:
        self.calls += 1
        self.received += (self._ranks - 1) * _bytes(tensor)
        _all_gather(tensors, tensor, group)


_all_reduce, _all_gather = distributed.all_reduce, distributed.all_gather


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)


def ways(channels: int) -> dict[str, tuple[nn.Module, int]]:
    """The layers, each with the number of ranks up to which it gathers."""
    few = process_group._FEW_RANKS
    return {
        "plain": (nn.BatchNorm2d(channels), few),
        "ours": (SynchronizedBatchNorm2d(channels), few),
        "reduce": (SynchronizedBatchNorm2d(channels), 0),
        "gather": (SynchronizedBatchNorm2d(channels), 1 << 30),
    }


def measure(rank: int, ranks: int, folder: str, channels: int, steps: int) -> None:
    """What one process does; rank 0 writes the figures down."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    x = torch.randn(2, channels, 7, 7, requires_grad=True)
    dy = torch.randn_like(x)
    times: dict[str, list[float]] = {}
    traffic: dict[str, Counting] = {}
    layers = ways(channels)
    for turn in range(WARM_UP + steps):
        for way, (layer, few) in layers.items():
            process_group._FEW_RANKS = few
            traffic[way] = counting = Counting(ranks)
            distributed.all_reduce, distributed.all_gather = (
                counting.all_reduce,
                counting.all_gather,
            )
            distributed.barrier()
            begin = time.perf_counter()
            step(layer, x, dy)
            if turn >= WARM_UP:
                times.setdefault(way, []).append(time.perf_counter() - begin)
    if rank == 0:
        figures = {
            way: Figures(statistics.median(values), traffic[way].calls, traffic[way].received)
            for way, values in times.items()
        }
        Path(folder, "figures").write_text(json.dumps(figures))
    distributed.barrier()
    distributed.destroy_process_group()


def measured(ranks: int, channels: int, steps: int) -> dict[str, Figures]:
    """The figures of each way between so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (ranks, folder, channels, steps), ranks)
        figures = json.loads(Path(folder, "figures").read_text())
    return {way: Figures(*values) for way, values in figures.items()}


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    counts, channels = ((2,), 4) if quick else ((2, 4), CHANNELS)
    figures = {ranks: measured(ranks, channels, steps) for ranks in counts}
    for way, name in (("plain", "plain BatchNorm"), ("gather", "the gather")):
        ratios = {n: own["ours"].seconds / own[way].seconds for n, own in figures.items()}
        yield Row("processes", f"{channels} channels, to {name}", ratios)


def show(ranks: int, figures: dict[str, Figures]) -> None:
    best = min(figures[way].seconds for way in ("reduce", "gather"))
    for way, (median, calls, received) in figures.items():
        print(
            f"{ranks:>5}  {way:<7} {1e3 * median:>8.2f} {median / best:>8.2f} "
            f"{calls:>12} {received:>10}",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--channels", type=int, default=CHANNELS)
    parser.add_argument("--steps", type=int, default=50, help="of each way, after warm-up")
    options = parser.parse_args(arguments)
    print(f"C = {options.channels}, medians of {options.steps} steps, gloo over loopback")
    print("ranks  way           ms  to best  collectives  bytes got")
    for ranks in options.ranks:
        show(ranks, measured(ranks, options.channels, options.steps))
    return 0


if __name__ == "__main__":
    keep_memory()
    raise SystemExit(main())
