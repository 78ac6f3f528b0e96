"""What a synchronized layer costs in replicas: its time to that of torch's in the same ones.

A step is forward and backward of one layer on CPU replicas, one torch thread each: replication,
callbacks and threads included, splitting and joining not. The two layers take turns, so that both
see the same machine.

    python benchmarks/layer.py --replicas 2 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
from torch import Tensor, nn

from replication import DataParallel, Scattered
from syncbn import SynchronizedBatchNorm2d

WARM_UP = 5

#: Per replica.
SHAPES = [
    ((8, 64, 56, 56), torch.contiguous_format),
    ((4, 256, 28, 28), torch.contiguous_format),
    ((8, 64, 56, 56), torch.channels_last),
    ((2, 256, 14, 14), torch.contiguous_format),
    ((2, 64, 8, 8), torch.contiguous_format),
]

#: Else what the system has to do for fresh memory drowns the figures.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "100000000",
}


def step(model: nn.Module, shards: list[Tensor], upstream: list[Tensor]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    torch.autograd.backward(model(Scattered(shards)), upstream)
    return time.perf_counter() - begin


def ratio(shape: tuple[int, ...], layout: torch.memory_format, replicas: int, steps: int) -> float:
    """The median time of ours to that of torch's."""
    shards, upstream = (
        [torch.randn(shape).contiguous(memory_format=layout) for _ in range(replicas)]
        for _ in range(2)
    )
    for shard in shards:
        shard.requires_grad_()
    models = [
        DataParallel(layer(shape[1]), ["cpu"] * replicas, gather_to_one_device=False)
        for layer in (SynchronizedBatchNorm2d, nn.BatchNorm2d)
    ]
    times: list[list[float]] = [[], []]
    for _ in range(WARM_UP + steps):
        for model, seconds in zip(models, times, strict=True):
            seconds.append(step(model, shards, upstream))
    ours, plain = (statistics.median(seconds[WARM_UP:]) for seconds in times)
    return ours / plain


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=60, help="of each layer, after warm-up")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(
        f"to torch.nn.BatchNorm2d = 1, float32, medians of {options.steps} steps that take turns"
    )
    print("shape per replica         ", *(f"{n:>4} replicas" for n in options.replicas))
    for shape, layout in SHAPES:
        name = " x ".join(map(str, shape)) + (", cl" if layout is torch.channels_last else "")
        print(f"{name:<26}", end="")
        for replicas in options.replicas:
            print(f" {ratio(shape, layout, replicas, options.steps):>13.2f}", end="", flush=True)
        print()
    return 0


if __name__ == "__main__":
    if not os.environ.keys() >= KEEP_MEMORY.keys():  # read when a program begins
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    raise SystemExit(main())
