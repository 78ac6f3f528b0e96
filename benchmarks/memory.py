"""What a synchronized layer keeps for backward, and the peak of memory of a step of training.

What is kept is counted by hooks on saved tensors, each storage once, in the forward of every
replica, whose thread is its own. For the peak see `benchmarks.peak`.

    python -m benchmarks.memory
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.measuring import Row, replica_counts, run
from replication import DataParallel, Scattered
from syncbn import SynchronizedBatchNorm2d

#: Per replica.
SHAPE = (8, 64, 56, 56)

#: Blocks of a page or more go back to the system at once: what is resident is what is in use.
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "4096",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_TOP_PAD_": "131072",
}


class Counting(nn.Module):
    """Counts the bytes that a layer saves for backward, in all its replicas."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        #: Shared by all replicas, as it is no tensor: bytes by the address of the storage.
        self.saved: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            self.saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return self.layer(x)  # type: ignore[no-any-return]


def saved(layer: nn.Module, replicas: int) -> float:
    """The bytes that are kept for backward to those of the input."""
    shards = [torch.randn(SHAPE, requires_grad=True) for _ in range(replicas)]
    counting = Counting(layer)
    model = DataParallel(counting, ["cpu"] * replicas, gather_to_one_device=False)
    # What is saved must live until it has been counted, lest two have the same address.
    outputs = model(Scattered(shards))
    del outputs
    return sum(counting.saved.values()) / sum(shard.nbytes for shard in shards)


def peak(replicas: int, steps: int, quick: bool) -> float | None:
    """The peak of a step of ours to that of plain BatchNorm; None if this system cannot tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    program = [sys.executable, "-m", "benchmarks.peak", f"{replicas}", f"{steps}", f"{int(quick)}"]
    done = subprocess.run(
        program, env={**os.environ, **GIVE_BACK}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    for name, layer in (("ours", SynchronizedBatchNorm2d), ("plain", nn.BatchNorm2d)):
        figures = {n: saved(layer(SHAPE[1]), n) for n in replica_counts(quick)}
        goal = 1.0 if name == "ours" else None
        yield Row("memory", f"kept for backward, to the input: {name}", figures, goal)
    figure = peak(2, steps, quick)
    yield Row(
        "memory",
        "peak of a step, to plain BatchNorm",
        {} if figure is None else {2: figure},
        goal=None if figure is None else 1.02,
    )


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
