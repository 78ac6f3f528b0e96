"""A layer as they are written for the older toolkits: a `SyncMaster`, and slaves that register.

The loss weighs classes by how rare they are in the whole batch. Each copy sends its counts to the
master, whose callback adds them; layers of this kind run unchanged here.

    python examples/older_style.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from replication import CallbackContext, DataParallel, SlavePipe, SyncMaster


class BalancedLoss(nn.Module):
    """This copy's share of the batch's mean loss, each class with the same total weight."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self._sync_master = SyncMaster(self._add_counts)
        self._slave_pipe: SlavePipe | None = None
        self._copy_id: int | None = None

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self._copy_id = copy_id
        if copy_id == 0:
            ctx.sync_master = self._sync_master
        else:
            self._slave_pipe = ctx.sync_master.register_slave(copy_id)

    def _add_counts(self, messages: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        total = sum(counts for _, counts in messages)  # copy 0 comes first
        return [(copy_id, total) for copy_id, _ in messages]

    def forward(self, scores: Tensor, classes: Tensor) -> Tensor:
        counts = torch.bincount(classes, minlength=self.num_classes).cpu()
        if self._copy_id == 0:
            counts = self._sync_master.run_master(counts)
        elif self._slave_pipe is not None:
            counts = self._slave_pipe.run_slave(counts)
        weights = 1 / (counts.clamp(min=1) * (counts > 0).sum())
        return cross_entropy(scores, classes, weights.to(scores), reduction="sum")


def compare(replicas: int, samples: int) -> float:
    """How far the loss on replicas is from that on one device."""
    torch.manual_seed(0)
    scores = torch.randn(samples, 3, dtype=torch.float64)
    classes = torch.tensor([0, 0, 0, 1] * samples)[:samples]
    model = DataParallel(BalancedLoss(3), ["cpu"] * replicas)
    return (model(scores, classes).sum() - BalancedLoss(3)(scores, classes)).abs().item()


if __name__ == "__main__":
    print(f"off by {compare(4, 10):.0e}")
