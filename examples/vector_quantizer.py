"""A VQ-VAE whose codes average the vectors of all replicas.

Each code is a moving average of the vectors that chose it (van den Oord et al. 2017, appendix A.1,
arXiv:1711.00937). Without communication, the codes silently average replica 0's vectors only.

    python examples/vector_quantizer.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware


class VectorQuantizer(ReplicaAware, nn.Module):
    """Replaces each vector of ``(n, D)`` by its nearest code. Also returns their distances."""

    def __init__(self, size: int, features: int, decay: float = 0.99) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(size, features))
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            self.update(x.detach(), nearest)
        distances = (x - quantized).square().mean(1)  # the commitment loss is their mean
        return x + (quantized - x).detach(), distances  # the gradient goes straight through to x

    def update(self, x: Tensor, nearest: Tensor) -> None:
        counts = torch.bincount(nearest, minlength=len(self.codes)).to(self.counts)
        sums = torch.zeros_like(self.sums).index_add_(0, nearest, x.to(self.sums))
        # Every copy changes its own buffers in place, to the same values.
        self.counts.lerp_(self.group.all_reduce(counts), 1 - self.decay)
        self.sums.lerp_(self.group.all_reduce(sums), 1 - self.decay)
        smooth = self.counts + 1e-5  # Laplace smoothing, for codes that are never chosen
        smooth *= self.counts.sum() / smooth.sum()
        self.codes.copy_(self.sums / smooth[:, None])


class Autoencoder(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encode, quantize, decode = self
        quantized, distances = quantize(encode(x))
        return decode(quantized), distances


def train(model: nn.Module, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        y, distances = model(x)
        loss = (y - x).square().mean() + 0.25 * distances.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def compare(replicas: int, samples: int, group_size: int | None = None) -> float:
    """How far training on replicas is from one device. Groups of 1 do not communicate."""
    torch.manual_seed(0)
    batches = torch.randn(20, samples, 8, dtype=torch.float64)
    alone = Autoencoder(nn.Linear(8, 4), VectorQuantizer(6, 4), nn.Linear(4, 8)).double()
    parallel = copy.deepcopy(alone)
    parallel[1].group_size = group_size
    train(alone, batches)
    train(DataParallel(parallel, ["cpu"] * replicas), batches)
    pairs = zip(parallel.state_dict().values(), alone.state_dict().values(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


if __name__ == "__main__":
    print(f"off by {compare(4, 10):.0e}, without communication by {compare(4, 10, 1):.0e}")
