"""A VQ-VAE whose codes average the vectors of all replicas, or of all ranks.

Each code is a moving average of the vectors that chose it (van den Oord et al. 2017, appendix A.1,
arXiv:1711.00937). Without communication, the codes silently average the vectors of replica 0 or of
rank 0 only.

    python examples/vector_quantizer.py
    torchrun --nproc-per-node=2 examples/vector_quantizer.py
    python -m replication.verify examples/vector_quantizer.py:in_ranks --ranks 2,3
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from replication import DataParallel, ReplicaAware, global_mean, verify


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


def loss_of(outputs: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """The loss of the whole batch: between ranks as well, however many samples each has."""
    y, distances = outputs
    return global_mean((y - x).square()) + 0.25 * global_mean(distances)


def train(model: nn.Module, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        loss = loss_of(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return Autoencoder(nn.Linear(8, 4), VectorQuantizer(6, 4), nn.Linear(4, 8)).double()


def compare(replicas: int, samples: int, group_size: int | None = None) -> float:
    """How far training on replicas is from one device. Groups of 1 do not communicate."""
    alone = make_network()
    batches = torch.randn(20, samples, 8, dtype=torch.float64)
    parallel = copy.deepcopy(alone)
    parallel[1].group_size = group_size
    train(alone, batches)
    train(DataParallel(parallel, ["cpu"] * replicas), batches)
    pairs = zip(parallel.state_dict().values(), alone.state_dict().values(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def in_ranks() -> dict[str, Any]:
    """What `verify` compares between ranks: 7 samples, so that their numbers differ."""
    net, x = make_network(), torch.randn(7, 8)
    wrap = DistributedDataParallel
    return {"model": net, "batch": x, "targets": x, "loss": loss_of, "wrap": wrap}


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        distributed.init_process_group("gloo")
        result = verify(**in_ranks())
        if distributed.get_rank() == 0:
            print(result)
        distributed.barrier()
        distributed.destroy_process_group()
        raise SystemExit(not result)
    print(f"off by {compare(4, 10):.0e}, without communication by {compare(4, 10, 1):.0e}")
