"""What a synchronized layer costs in replicas: its time to that of torch's in the same ones.

A step is forward and backward of one layer on CPU replicas, one torch thread each: replication,
callbacks and threads included, splitting and joining not.

    python -m benchmarks.layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measuring import Row, alternating, replica_counts, run
from replication import DataParallel, Scattered
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d

#: Ours and torch's, by the number of dimensions of the input.
LAYERS: dict[int, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    2: (SynchronizedBatchNorm1d, nn.BatchNorm1d),
    3: (SynchronizedBatchNorm1d, nn.BatchNorm1d),
    4: (SynchronizedBatchNorm2d, nn.BatchNorm2d),
    5: (SynchronizedBatchNorm3d, nn.BatchNorm3d),
}


class Case(NamedTuple):
    """An input."""

    #: Per replica.
    shape: tuple[int, ...]
    layout: torch.memory_format = torch.contiguous_format
    dtype: torch.dtype = torch.float32
    #: With 2 replicas.
    goal: float | None = None

    def __str__(self) -> str:
        text = " x ".join(map(str, self.shape))
        if self.layout is torch.channels_last:
            text += ", channels_last"
        if self.dtype is not torch.float32:
            text += f", {self.dtype}".replace("torch.", "")
        return text

    def tiny(self) -> Case:
        return self._replace(shape=tuple(min(size, 4) for size in self.shape))


CASES = [
    Case((8, 64, 56, 56), goal=0.8),
    Case((4, 256, 28, 28), goal=0.8),
    Case((8, 64, 56, 56), torch.channels_last, goal=1.05),
    Case((8, 64, 112, 112), torch.channels_last),
    Case((2, 256, 14, 14), goal=1.1),
    Case((2, 64, 8, 8), goal=1.4),
    Case((8, 64, 56, 56), dtype=torch.float64),
    Case((8, 64, 56, 56), dtype=torch.bfloat16),
    Case((64, 256)),
    Case((16, 64, 512)),
    Case((2, 32, 16, 32, 32)),
]


def step(model: nn.Module, shards: list[Tensor], upstream: list[Tensor]) -> None:
    outputs = model(Scattered(shards))
    # Which adds to no gradient of before: that costs as much as a kernel, in either way.
    torch.autograd.grad(outputs, [*shards, *model.parameters()], upstream)


def ways(case: Case, replicas: int) -> list[Callable[[], None]]:
    """A step of ours, and one of torch's."""
    shards, upstream = (
        [
            torch.randn(case.shape).to(case.dtype, memory_format=case.layout)
            for _ in range(replicas)
        ]
        for _ in range(2)
    )
    for shard in shards:
        shard.requires_grad_()
    return [
        partial(
            step,
            DataParallel(
                layer(case.shape[1]).to(case.dtype),
                ["cpu"] * replicas,
                gather_to_one_device=False,
            ),
            shards,
            upstream,
        )
        for layer in LAYERS[len(case.shape)]
    ]


def ratio(case: Case, replicas: int, steps: int) -> float:
    """The median time of ours to that of torch's."""
    ours, plain = alternating(ways(case, replicas), steps)
    return ours / plain


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    for case in CASES:
        measured = case.tiny() if quick else case
        figures = {n: ratio(measured, n, steps) for n in replica_counts(quick)}
        yield Row("layer", str(measured), figures, case.goal, goal_at=2 if case.goal else None)


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
