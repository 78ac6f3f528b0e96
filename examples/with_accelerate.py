"""Synchronized batch normalization with Accelerate: convert the network, then prepare it.

    net, optimizer, loader = accelerator.prepare(convert_model(net), optimizer, loader)

is all. Here each of several processes trains on its share of each batch, and the network becomes
the one that a single process trains on the whole batches.

    torchrun --nproc-per-node=2 examples/with_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncbn import convert_model


def parts(batch_size: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """A network, its optimizer, and data; each time the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    data = TensorDataset(torch.randn(64, 4).double(), torch.randn(64, 1).double())
    return net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data, batch_size)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, backward) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        backward((net(x) - y).square().mean())
        optimizer.step()


def main() -> int:
    expected, *rest = parts()
    train(expected, *rest, torch.Tensor.backward)
    # Each process gets a part of each batch, not every n-th batch.
    shared = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=shared)
    net, optimizer, loader = parts()
    net, optimizer, loader = accelerator.prepare(convert_model(net), optimizer, loader)
    train(net, optimizer, loader, accelerator.backward)
    trained = accelerator.unwrap_model(net).cpu().state_dict()
    off = max((trained[k] - v).abs().max().item() for k, v in expected.state_dict().items())
    accelerator.print(f"{accelerator.num_processes} processes: off by {off:.0e}")
    # DDP keeps the processes' threads: with them the program may hang at its end.
    net, optimizer, loader = accelerator.free_memory(net, optimizer, loader)
    accelerator.wait_for_everyone()  # or one may end with a collective still in hand
    accelerator.end_training()
    return int(off > 1e-10)


if __name__ == "__main__":
    raise SystemExit(main())
