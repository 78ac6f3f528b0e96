"""How soon an error in one replica, or a divergence of replicas, reaches the caller.

The clock runs from the moment at which the last replica raises, or ends without having called a
layer that the others wait in, to the exception in the caller.

    python -m benchmarks.failures
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import Figures, Row, Table, alternating, in_processes, parser, show
from replication import DataParallel, ReplicasDiverged
from syncbn import SynchronizedBatchNorm2d

REPLICAS = (2, 4, 8)

ABOUT = (
    "From the failure of the last replica, while the others wait in a layer or come to it, to the "
    "exception in the caller. The unit is an error that the replica raises. A divergence is a "
    "replica that leaves out the layer, and that raises `ReplicasDiverged`."
)


class Failing(nn.Module):
    """A synchronized layer that the last replica does not call."""

    is_last = False

    def __init__(self, replicas: int, raises: bool) -> None:
        super().__init__()
        self.layer = SynchronizedBatchNorm2d(16)
        self.replicas, self.raises = replicas, raises
        #: When each replica came to the layer, or failed. All replicas share the list.
        self.times: list[float] = []

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.is_last = copy_id == self.replicas - 1

    def forward(self, x: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        if not self.is_last:
            return self.layer(x)  # type: ignore[no-any-return]
        if self.raises:
            self.times[:] = [time.perf_counter()]
            raise ZeroDivisionError
        return x


def failure(replicas: int, raises: bool) -> Callable[[], Figures]:
    """A forward that fails, and takes the milliseconds from the failure to the caller."""
    net = Failing(replicas, raises)
    model = DataParallel(net, ["cpu"] * replicas)
    x = torch.randn(2 * replicas, 16, 7, 7)

    def forward() -> Figures:
        net.times.clear()
        try:
            model(x)
        except (ZeroDivisionError, ReplicasDiverged):
            end = time.perf_counter()
        # A divergence is one as soon as no replica has anything left to do.
        return (1e3 * (end - (min if raises else max)(net.times)),)

    return forward


def measure(rank: int, seconds: float) -> list[Row]:
    return [
        Row(
            "a failure",
            replicas,
            torch.get_num_threads(),
            alternating(
                {"error": failure(replicas, True), "divergence": failure(replicas, False)}, seconds
            ),
        )
        for replicas in REPLICAS
    ]


def table(seconds: float) -> Table:
    return Table("From a failure to the caller", ABOUT, in_processes(1, 1, measure, seconds))


if __name__ == "__main__":
    show(table(parser(__doc__).parse_args().seconds))
