"""A contrastive loss whose negatives come from all replicas.

Each sample has two views. The other view of the same sample is the positive. The views of all
other samples in the batch, on any replica, are the negatives (InfoNCE, arXiv:1807.03748). Loss and
gradients equal the single-device ones: gradients flow into the views on the other replicas.

    python examples/contrastive.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from replication import DataParallel, ReplicaAware


class Contrastive(ReplicaAware, nn.Module):
    """This copy's share of the batch's mean loss; views are ``(n, D)``, n may differ."""

    def __init__(self, encoder: nn.Module, temperature: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.temperature = temperature

    def forward(self, view: Tensor, other_view: Tensor) -> Tensor:
        anchors = normalize(self.encoder(view))
        candidates = self.group.all_gather(normalize(self.encoder(other_view)))
        before_mine = sum(len(part) for part in candidates[: self.group.rank])
        positives = before_mine + torch.arange(len(anchors), device=anchors.device)
        everyone = torch.cat(candidates)
        similarities = anchors @ everyone.T / self.temperature
        return cross_entropy(similarities, positives, reduction="sum") / len(everyone)


def compare(replicas: int, samples: int) -> tuple[float, float]:
    """How far the loss, and the gradients, on replicas are from those on one device."""
    torch.manual_seed(0)
    views = torch.randn(2, samples, 8, dtype=torch.float64)
    alone = Contrastive(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double())
    model = DataParallel(copy.deepcopy(alone), ["cpu"] * replicas)
    expected = alone(*views)
    loss = model(*views).sum()  # one share per replica
    expected.backward()
    loss.backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return (loss - expected).abs().item(), max(
        (p.grad - q.grad).abs().max().item() for p, q in pairs
    )


if __name__ == "__main__":
    print("off by {:.0e} in the loss, {:.0e} in the gradients".format(*compare(4, 10)))
