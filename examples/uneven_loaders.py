"""Several processes with unequal numbers of batches train like one device.

A rank that runs out of data would leave the others waiting, in the next layer that communicates or
in DistributedDataParallel. `JoinableStep` lets it repeat the step with an empty batch until all
ranks are done. The loss of a rank is its share of the mean over all samples of a step. It is
multiplied by the number of ranks, because DistributedDataParallel divides gradients by it.

    python examples/uneven_loaders.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

from replication import JoinableStep
from syncbn import convert_model

#: The sizes of the batches of each rank.
BATCHES = [[4, 3, 4, 2], [2, 4], []]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return net.double()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    x = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in BATCHES[rank]]
    return [(part, part.square().sum(1, keepdim=True)) for part in x]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train_rank(rank: int, folder: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(BATCHES)
    )
    net = convert_model(make_network())
    model = DistributedDataParallel(net)
    optimizer = optimizer_of(net)

    def train_one_batch(x: Tensor, y: Tensor) -> None:
        count = torch.tensor(len(x))
        distributed.all_reduce(count)
        loss = (model(x) - y).square().sum() / count * distributed.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step = JoinableStep(train_one_batch, empty=(torch.empty(0, 3).double(), torch.empty(0, 1)))
    for _ in range(2):
        with Join([step]):
            for x, y in batches(rank):
                step(x, y)
    torch.save(net.state_dict(), Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def train_on_one_device() -> dict[str, Tensor]:
    """Trains on the batches of all ranks, joined."""
    net = make_network()
    optimizer = optimizer_of(net)
    loaders = [batches(rank) for rank in range(len(BATCHES))]
    for _ in range(2):
        for i in range(max(map(len, loaders))):
            parts = [loader[i] for loader in loaders if i < len(loader)]
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            loss = (net(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.state_dict()


def compare() -> float:
    """How far the networks of all ranks are from the single-device one."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train_rank, (folder,), nprocs=len(BATCHES))
        states = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(len(BATCHES))]
    expected = train_on_one_device()
    return max(
        float((state[name] - expected[name]).abs().max()) for state in states for name in expected
    )


def main() -> int:
    distance = compare()
    print(f"distance of {len(BATCHES)} uneven ranks from one device: {distance:.1e}")
    return 0 if distance < 1e-12 else 1


if __name__ == "__main__":
    raise SystemExit(main())
