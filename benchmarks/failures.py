"""How soon an error in one replica, or a divergence, is an error of the caller.

Each forward runs a small network of two synchronized layers on CPU replicas, of which one goes
wrong. The clock runs from the `raise` in that replica; of a divergence, from the last moment at
which any replica came to a synchronized layer or ended, as from then on no replica has anything to
do. It stops where the caller has the error, which is when all replicas have ended.

    before, between, after   raises there, with regard to the synchronized layers
    in                       raises in the second layer, before it sends anything
    skips                    leaves the second layer out
    twice                    calls the second layer twice
    order                    calls the two layers in another order

    python -m benchmarks.failures --replicas 2 4 8
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import WARM_UP, keep_memory, p99
from replication import DataParallel, ReplicasDiverged
from syncbn import SynchronizedBatchNorm2d


class OwnError(Exception):
    """That of the replica which goes wrong."""


class Timed(SynchronizedBatchNorm2d):
    """Notes when it is entered; may raise before it sends anything."""

    def __init__(self, channels: int, stamps: list[float]) -> None:
        super().__init__(channels)
        self.stamps = stamps
        self.fails_in: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.stamps.append(time.perf_counter())
        return super().forward(input)

    def _check_input_dim(self, input: Tensor) -> None:
        if self.group.rank == self.fails_in:
            fail(self.stamps)


def fail(stamps: list[float]) -> None:
    """Raises; what has been noted before does not count."""
    stamps[:] = [time.perf_counter()]
    raise OwnError


class Net(nn.Module):
    """Two layers; the replica ``wrong`` calls them in its ``way``."""

    copy_id = 0

    def __init__(self, channels: int, way: str, wrong: int) -> None:
        super().__init__()
        self.stamps: list[float] = []
        self.first, self.second = (Timed(channels, self.stamps) for _ in range(2))
        self.way, self.wrong = way, wrong
        self.second.fails_in = wrong if way == "in" else None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.copy_id = copy_id

    def forward(self, x: Tensor) -> Tensor:
        way = WAYS[self.way] if self.copy_id == self.wrong else as_usual
        y = way(self, x)
        if self.way in DIVERGENCES:
            self.stamps.append(time.perf_counter())
        return y


def as_usual(net: Net, x: Tensor) -> Tensor:
    return net.second(net.first(x))


def before(net: Net, x: Tensor) -> Tensor:
    fail(net.stamps)
    return x


def between(net: Net, x: Tensor) -> Tensor:
    return before(net, net.first(x))


def after(net: Net, x: Tensor) -> Tensor:
    return before(net, as_usual(net, x))


def skips(net: Net, x: Tensor) -> Tensor:
    return net.first(x)


def twice(net: Net, x: Tensor) -> Tensor:
    return net.second(as_usual(net, x))


def order(net: Net, x: Tensor) -> Tensor:
    return net.first(net.second(x))


DIVERGENCES = {way.__name__: way for way in (skips, twice, order)}
WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "before": before,
    "in": as_usual,
    "between": between,
    "after": after,
    **DIVERGENCES,
}


def delays(way: str, replicas: int, wrong: int, forwards: int) -> list[float]:
    """Seconds from what goes wrong to the error at the caller, of each forward."""
    net = Net(16, way, wrong)
    model = DataParallel(net, ["cpu"] * replicas)
    x = torch.randn(2 * replicas, 16, 7, 7)
    times = []
    for _ in range(WARM_UP + forwards):
        net.stamps.clear()
        try:
            model(x)
        except (OwnError, ReplicasDiverged):
            end = time.perf_counter()
        else:
            raise AssertionError(f"{way!r} in replica {wrong} has not been noticed")
        times.append(end - (max if way in DIVERGENCES else min)(net.stamps))
    return times[WARM_UP:]


def row(replicas: int, way: str, wrong: int, times: list[float]) -> None:
    print(
        f"{replicas:>8}  {way:<8} {wrong:>4} {1e3 * statistics.median(times):>10.2f} "
        f"{1e3 * p99(times):>8.2f}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--forwards", type=int, default=200, help="of each row, after warm-up")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"from the error in a replica to the caller, {options.forwards} forwards, on the CPU")
    print("replicas  way      copy  median ms   p99 ms")
    for replicas in options.replicas:
        for way in WAYS:
            for wrong in (0, replicas - 1):
                row(replicas, way, wrong, delays(way, replicas, wrong, options.forwards))
    return 0


if __name__ == "__main__":
    keep_memory()
    raise SystemExit(main())
