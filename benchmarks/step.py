"""What synchronization costs in a training step of whole networks.

Forward (with the loss), backward, and the whole step (with the optimizer) on CPU replicas.

    python -m benchmarks.step --network dense --replicas 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import yardsticks
from benchmarks.measuring import (
    THREADS,
    Figures,
    Row,
    Table,
    alternating,
    in_processes,
    now,
    parser,
    show,
)
from benchmarks.networks import NETWORKS
from replication import DataParallel
from syncbn import convert_model

REPLICAS = (2, 4)

ABOUT = (
    "Training steps on CPU replicas: forward, backward and SGD. The unit is plain BatchNorm in "
    "replicas made as `nn.DataParallel` makes them, which synchronize nothing. Cells are the "
    "step, and in brackets forward and backward."
)

ABOUT_DEFAULTS = (
    "The same, where the C library gives freed memory back to the system, as glibc does by "
    "default: rows that differ most. Each step then takes thousands of page faults."
)

#: Each makes a model of a network, a number of replicas, and their device.
WAYS: dict[str, Callable[[nn.Module, int, str], nn.Module]] = {
    "plain BatchNorm": lambda net, n, device: yardsticks.DataParallel(net, n),
    "plain BatchNorm in syncbn's replicas": lambda net, n, device: DataParallel(net, [device] * n),
    "syncbn": lambda net, n, device: DataParallel(convert_model(net), [device] * n),
    "older toolkits": lambda net, n, device: yardsticks.DataParallel(yardsticks.convert(net), n),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Figures:
    """Milliseconds of a step, of its forward, and of its backward."""
    begin = now()
    loss = model(x).square().mean()
    forward = now()
    loss.backward()
    backward = now()
    optimizer.step()
    optimizer.zero_grad()
    end = now()
    return 1e3 * (end - begin), 1e3 * (forward - begin), 1e3 * (backward - forward)


def training(model: nn.Module, x: Tensor) -> Callable[[], Figures]:
    """A step of training of ``model``, slow enough that the numbers stay finite for ever."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return partial(step, model, optimizer, x)


def measure(rank: int, name: str, replicas: int, seconds: float, device: str) -> Row:
    title, build, (samples, *shape) = NETWORKS[name]
    x = torch.randn(samples * replicas, *shape).to(device)
    ways = {
        way: training(make(build().to(device), replicas, device), x) for way, make in WAYS.items()
    }
    return Row(title, replicas, torch.get_num_threads(), alternating(ways, seconds))


def rows(
    seconds: float,
    networks: Iterable[str] = tuple(NETWORKS),
    replicas: Iterable[int] = REPLICAS,
    threads: Iterable[int] = THREADS,
    device: str = "cpu",
    keeps_memory: bool = True,
) -> Iterator[Row]:
    for name, number, count in product(networks, threads, replicas):
        arguments = name, count, seconds, device
        yield in_processes(1, number, measure, *arguments, keeps_memory=keeps_memory)


def table(seconds: float, *choice: Iterable[Any]) -> Table:
    return Table("Training steps", ABOUT, rows(seconds, *choice))


def table_of_defaults(seconds: float) -> Table:
    steps = rows(seconds, ("narrow", "resnet"), (2,), keeps_memory=False)
    return Table("Training steps with the C library's defaults", ABOUT_DEFAULTS, steps)


def parser_of_networks(description: str | None) -> argparse.ArgumentParser:
    """The options that choose among the rows."""
    options = parser(description)
    options.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    options.add_argument("--replicas", nargs="+", type=int, default=REPLICAS)
    options.add_argument(
        "--threads", nargs="+", type=int, default=THREADS, help="0 is torch's default"
    )
    return options


def main() -> None:
    given = parser_of_networks(__doc__).parse_args()
    show(table(given.seconds, given.network, given.replicas, given.threads))


if __name__ == "__main__":
    main()
