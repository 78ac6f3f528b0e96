"""A contrastive loss whose negatives come from all replicas, or from all ranks.

Each sample has two views. The other view of the same sample is the positive. The views of all
other samples in the batch, on any replica or rank, are the negatives (InfoNCE, arXiv:1807.03748).
Loss and gradients equal the single-device ones: gradients flow into the views of the others.

    python examples/contrastive.py
    torchrun --nproc-per-node=2 examples/contrastive.py
    python -m replication.verify examples/contrastive.py:in_ranks --ranks 2,3
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from replication import DataParallel, ReplicaAware, functional, global_mean, verify


def contrastive_loss(
    anchors: Tensor, others: Tensor, group: Any = None, temperature: float = 0.1
) -> Tensor:
    """The mean loss of the whole batch, of embeddings ``(n, D)``; n may differ between ranks."""
    anchors, others = normalize(anchors), normalize(others)
    everyone = torch.cat(functional.all_gather(others, group))
    positive = (anchors * others).sum(1) / temperature
    losses = (anchors @ everyone.T / temperature).logsumexp(1) - positive
    return global_mean(losses, group=group)


class Contrastive(ReplicaAware, nn.Module):
    """An encoder with its loss, for replicas: they compute the loss where the embeddings are."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, view: Tensor, other_view: Tensor) -> Tensor:
        return contrastive_loss(self.encoder(view), self.encoder(other_view), self.group)


def make_encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def compare(replicas: int, samples: int) -> tuple[float, float]:
    """How far the loss, and the gradients, on replicas are from those on one device."""
    alone = Contrastive(make_encoder())
    views = torch.randn(2, samples, 8, dtype=torch.float64)
    model = DataParallel(copy.deepcopy(alone), ["cpu"] * replicas)
    expected = alone(*views)
    loss = model(*views).mean()  # each replica returns the loss of the whole batch
    expected.backward()
    loss.backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return (loss - expected).abs().item(), max(
        (p.grad - q.grad).abs().max().item() for p, q in pairs
    )


def in_ranks() -> dict[str, Any]:
    """What `verify` compares between ranks: 5 samples, so that their numbers differ."""
    return {
        "model": make_encoder(),
        "batch": torch.randn(5, 2, 8),  # two views of each
        "loss": lambda y: contrastive_loss(y[:, 0], y[:, 1]),
        "wrap": DistributedDataParallel,
    }


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("gloo")
        result = verify(**in_ranks())
        if distributed.get_rank() == 0:
            print(result)
        distributed.barrier()
        distributed.destroy_process_group()
        raise SystemExit(not result)
    print("off by {:.0e} in the loss, {:.0e} in the gradients".format(*compare(4, 10)))
