"""A callback written by hand: the loss of the hardest samples of the whole batch.

No base class is needed. After replication each copy of the layer is called with the context that
they share and with its own number; from the context it gets its group. A ReLU with a callback prints
what it knows of its copies.

    python examples/hardest.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from replication import CallbackContext, DataParallel, Group, SoloGroup


class HardestLoss(nn.Module):
    """This copy's share of the mean loss of the ``k`` samples of largest loss; ties all count."""

    group: Group = SoloGroup()

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.group = ctx.group(copy_id)  # set on the copy, and discarded after the forward

    def forward(self, scores: Tensor, classes: Tensor) -> Tensor:
        losses = cross_entropy(scores, classes, reduction="none")
        of_all = torch.cat(self.group.all_gather(losses.detach()))
        threshold = of_all.topk(self.k).values[-1]
        return losses[losses >= threshold].sum() / self.k


class Shows(nn.ReLU):
    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        print(f"`{ctx.path}` is copy {copy_id} of {ctx.num_copies} on {ctx.devices[copy_id]}")


def compare(replicas: int, samples: int) -> float:
    """How far the loss on replicas is from that on one device."""
    torch.manual_seed(0)
    scores, classes = torch.randn(samples, 3, dtype=torch.float64), torch.arange(samples) % 3
    model = DataParallel(HardestLoss(4), ["cpu"] * replicas)
    return (model(scores, classes).sum() - HardestLoss(4)(scores, classes)).abs().item()


if __name__ == "__main__":
    net = nn.Sequential(nn.Linear(2, 2), Shows())
    DataParallel(net, ["cpu"] * 3)(torch.ones(3, 2))
    print(f"off by {compare(4, 10):.0e}")
