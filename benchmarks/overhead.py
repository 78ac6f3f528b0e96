"""What is around the arithmetic: copies of a network, exchanges between replicas, and memory.

python -m benchmarks.overhead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import yardsticks
from benchmarks.layer import WAYS
from benchmarks.measuring import Row, Table, alternating, in_processes, parser, show, timed
from benchmarks.networks import resnet
from replication import (
    DataParallel,
    ReplicaAware,
    SyncMaster,
    execute_replication_callbacks,
    replicate,
)
from syncbn import convert_model

REPLICAS = (2, 4)

EXCHANGES = 100

COPIES = (
    "Copies of a ResNet-50 for CPU replicas. The unit is torch's scheme, on a network without "
    "callbacks."
)


def copies(rank: int, seconds: float) -> list[Row]:
    net = resnet()
    converted = convert_model(resnet())
    older = yardsticks.convert(resnet())

    def with_callbacks(devices: list[str]) -> object:
        made = replicate(converted, devices)
        execute_replication_callbacks(made, devices)
        return made

    def of_older_toolkits(replicas: int) -> object:
        made = yardsticks.replicate(older, replicas)
        yardsticks.connect(made)
        return made

    made = []
    for replicas in REPLICAS:
        devices = ["cpu"] * replicas
        ways: dict[str, Callable[[], object]] = {
            "torch's scheme": partial(yardsticks.replicate, net, replicas),
            "syncbn": partial(replicate, net, devices),
            "syncbn with callbacks": partial(with_callbacks, devices),
            "older toolkits with callbacks": partial(of_older_toolkits, replicas),
        }
        figures = alternating({name: partial(timed, way) for name, way in ways.items()}, seconds)
        made.append(Row("ResNet-50", replicas, torch.get_num_threads(), figures))
    return made


ABOUT_EXCHANGES = (
    f"A forward with {EXCHANGES} exchanges of a few bytes between the replicas. The unit is a "
    "master and its slaves with queues and acknowledgements, as in the older toolkits."
)


class Piped(nn.Module):
    """Exchange messages through a master and its slaves."""

    def __init__(self, master: Callable[[Callable[[list[Any]], Any]], Any], merge: Any) -> None:
        super().__init__()
        self.master, self.merge = master, merge

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.sync_master = self.master(self.merge)
            self.exchange = ctx.sync_master.run_master
        else:
            slave = ctx.sync_master.register_slave(copy_id)
            self.exchange = getattr(slave, "run_slave", slave)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(EXCHANGES):
            self.exchange(x)
        return x


class Reducing(ReplicaAware, nn.Module):
    """Add up a tensor over the replicas."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(EXCHANGES):
            self.group.all_reduce(x)
        return x


def exchanges(rank: int, seconds: float) -> list[Row]:
    made = []
    for replicas in REPLICAS:
        modules = {
            "older toolkits": Piped(yardsticks.Master, sum),
            "`SyncMaster`": Piped(SyncMaster, reply_to_each),
            "`group.all_reduce`": Reducing(),
        }
        x = torch.randn(replicas)
        ways = {
            name: partial(timed, partial(DataParallel(module, ["cpu"] * replicas), x))
            for name, module in modules.items()
        }
        figures = alternating(ways, seconds)
        made.append(Row("exchanges", replicas, torch.get_num_threads(), figures))
    return made


def reply_to_each(messages: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
    total = sum(message for _, message in messages)
    return [(identifier, total) for identifier, _ in messages]


ABOUT_MEMORY = "What a layer keeps for backward. Plain BatchNorm keeps its input."

#: Per replica.
SHAPE = (8, 64, 56, 56)


class Counting(nn.Sequential):
    """Count the bytes that a layer saves for backward, in all its replicas."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        #: Bytes by the address of the storage. All replicas share the dictionary.
        self.saved: dict[int, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return super().forward(x)  # type: ignore[no-any-return]

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.saved[storage.data_ptr()] = storage.nbytes()
        return tensor


def kept(layer: nn.Module, replicas: int) -> float:
    """MiB that the graph of a forward keeps."""
    counting = Counting(layer)
    x = torch.randn(SHAPE[0] * replicas, *SHAPE[1:], requires_grad=True)
    # While the graph lives no two saved tensors share an address.
    y = DataParallel(counting, ["cpu"] * replicas)(x)
    del y
    return sum(counting.saved.values()) / 2**20


def memory(rank: int) -> list[Row]:
    made, case = [], " x ".join(map(str, SHAPE))
    for replicas in REPLICAS:
        figures = {
            name: (kept(make(nn.BatchNorm2d(SHAPE[1])), replicas),) for name, make in WAYS.items()
        }
        made.append(Row(case, replicas, torch.get_num_threads(), figures))
    return made


def rows(measure: Callable[..., list[Row]], *arguments: Any) -> Iterator[Row]:
    yield from in_processes(1, 1, measure, *arguments)


def tables(seconds: float) -> list[Table]:
    return [
        Table("Copies of a network", COPIES, rows(copies, seconds)),
        Table("Exchanges", ABOUT_EXCHANGES, rows(exchanges, seconds)),
        Table("Memory", ABOUT_MEMORY, rows(memory), unit="MiB"),
    ]


if __name__ == "__main__":
    for table in tables(parser(__doc__).parse_args().seconds):
        show(table)
