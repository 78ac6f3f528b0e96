"""MoCo's shuffled BatchNorm: keys are normalized with other samples than their queries.

MoCo learns to find the key of each query among many. If BatchNorm normalizes both with the same
few samples, the shared statistics give the key away. So the batch is shuffled over all replicas,
encoded with plain BatchNorm and put back in order (He et al. 2020, section 3.3, arXiv:1911.05722).

    python examples/shuffled_batchnorm.py
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware, UnsynchronizedWarning


class ShuffledKeys(ReplicaAware, nn.Module):
    """Returns the keys of ``x``. A shuffle decides which replica encodes which sample."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        # Its parameters are not trained. They are a moving average of the query encoder's.
        self.encoder = encoder.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.encoder(x)  # BatchNorm uses its running statistics
        group = self.group
        shards = group.all_gather(x)
        sizes = [len(shard) for shard in shards]  # the last shard may be smaller
        order = torch.arange(sum(sizes), device=x.device)
        if group.rank == 0:  # a single draw gives every copy the same order
            order = torch.randperm(len(order), device=x.device)
        order = group.broadcast(order)
        mine = order.split(sizes)[group.rank]
        keys = torch.cat(group.all_gather(self.encoder(torch.cat(shards)[mine])))
        return keys[order.argsort()].split(sizes)[group.rank]


def make_encoder() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AvgPool2d(4), nn.Flatten())
    return net.double()


def encode_on_one_device(encoder: nn.Module, images: Tensor, replicas: int) -> Tensor:
    """Encodes the shards of the shuffled batch one after the other."""
    order = torch.randperm(len(images))
    shards = images[order].chunk(replicas)
    keys = torch.cat([encoder(shard) for shard in shards])
    return torch.empty_like(keys).index_copy(0, order, keys)


def compare(replicas: int, samples: int, group_size: int | None = None) -> tuple[Tensor, float]:
    """The keys, and how far they are from those of one device. Groups of 1 do not communicate."""
    warnings.simplefilter("ignore", UnsynchronizedWarning)  # plain BatchNorm is intended here
    torch.manual_seed(0)
    layer, images = ShuffledKeys(make_encoder()), torch.randn(samples, 3, 6, 6).double()
    layer.group_size = group_size
    torch.manual_seed(1)
    keys = DataParallel(layer, ["cpu"] * replicas)(images)
    torch.manual_seed(1)
    expected = encode_on_one_device(layer.encoder, images, replicas)
    return keys, (keys - expected).abs().max().item()


if __name__ == "__main__":
    for title, group_size in (("shuffled", None), ("not shuffled", 1)):
        keys, off = compare(4, 12, group_size)
        # Unshuffled keys of a replica add up to 0: each one follows from the others.
        total = max(shard.sum(0).abs().max().item() for shard in keys.chunk(4))
        print(f"{title}: off by {off:.0e}; the keys of a shard add up to {total:.0e} at most")
