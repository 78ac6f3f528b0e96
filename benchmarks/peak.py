"""The peak of memory of a step of training with synchronized layers, to that with plain ones.

It is what the process has resident at its largest during a step, beyond what it has before the
step, as Linux counts it. (The memory events of `torch.profiler` lack those of the replicas'
threads.) It is what is in use if the C library gives memory back at once, which environment
variables have to say before the program begins: so `benchmarks.memory` runs it as a program of its
own, with the number of replicas, that of steps, and 1 for a tiny network. It prints the ratio.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measuring import WARM_UP
from benchmarks.step import batch, network, trained
from replication import DataParallel
from syncbn import convert_model

STATUS = Path("/proc/self/status")


def resident(kind: str) -> int:
    """KiB now (``VmRSS``), or at most (``VmHWM``) since the peak was forgotten."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(fields[kind].split()[0])


def forget_peak() -> None:
    """See proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_of(step: Callable[[], None]) -> int:
    """KiB that a step takes at most."""
    gc.collect()
    forget_peak()
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def ratio(replicas: int, steps: int, quick: bool) -> float:
    # Never tiny: the system counts to some hundreds of KiB.
    images, classes = batch(replicas, quick=False)
    ways = [
        trained(DataParallel(net, ["cpu"] * replicas), images, classes)
        for net in (convert_model(network(quick)), network(quick))
    ]
    # What has been imported is not looked through again before each step.
    gc.freeze()
    peaks: list[list[int]] = [[], []]
    for _ in range(WARM_UP + steps):
        for step, own in zip(ways, peaks, strict=True):
            own.append(peak_of(step))
    ours, plain = (statistics.median(own[WARM_UP:]) for own in peaks)
    return ours / plain


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = [int(argument) for argument in sys.argv[1:]]
    print(ratio(given[0], given[1], bool(given[2])))
