"""How the time of a layer grows with replicas, channels and elements, to the least it could take.

The floor: forward reads the input twice and writes the output, backward reads the input and the
upstream gradient twice each and writes a gradient. That is 8 tensors; a copy reads one and writes
one, so it takes 4 copies, by one thread, of all replicas' inputs. (Forwards run side by side, so
on several cores one could get below it.) A step is that of `benchmarks.layer`.

    python -m benchmarks.growth
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.layer import Case, ways
from benchmarks.measuring import Row, alternating, run

#: Reads and writes of a whole input, in copies of it.
COPIES = 4

#: Per replica.
SAMPLES = 4

#: What is varied, one at a time.
AXES = {
    "replicas": (1, 2, 3, 4, 6, 8),
    "channels": (16, 64, 256, 1024, 4096),
    "elements": tuple(1 << exponent for exponent in (10, 12, 14, 16, 18, 20, 22, 23)),
}

#: What is not varied.
USUAL = {"replicas": 2, "channels": 64, "elements": 1 << 18}


class Point(NamedTuple):
    """Median seconds of one input."""

    axis: str
    at: int
    ours: float
    plain: float
    floor: float


def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def point(axis: str, at: int, steps: int) -> Point:
    setting = {**USUAL, axis: at}
    replicas, channels, elements = setting["replicas"], setting["channels"], setting["elements"]
    case = Case((SAMPLES, channels, elements // (SAMPLES * channels)))
    pairs = [(torch.zeros(case.shape), torch.ones(case.shape)) for _ in range(replicas)]
    ours, plain, copied = alternating([*ways(case, replicas), partial(copy, pairs)], steps)
    return Point(axis, at, ours, plain, COPIES * copied)


def points(steps: int, quick: bool = False) -> Iterator[Point]:
    for axis, values in AXES.items():
        for at in values[:2] if quick else values:
            yield point(axis, at, steps)


def rows_of(measured: Iterable[Point]) -> Iterator[Row]:
    """Those with other channels or elements as they come, in the column of their replicas."""
    by_replicas: dict[str, dict[int, float]] = {"plain BatchNorm": {}, "the floor": {}}
    for at in measured:
        ratios = {"plain BatchNorm": at.ours / at.plain, "the floor": at.ours / at.floor}
        for name, ratio in ratios.items():
            if at.axis == "replicas":
                by_replicas[name][at.at] = ratio
            else:
                case = f"{at.at:,} {at.axis}, to {name}"
                yield Row("growth", case, {USUAL["replicas"]: ratio})
    for name, figures in by_replicas.items():
        yield Row("growth", f"replicas, to {name}", figures)


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    return rows_of(points(steps, quick))


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
