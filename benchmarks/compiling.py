"""What `torch.compile` takes for a synchronized network, beside a plain one.

    python -m benchmarks.compiling
    python -m benchmarks.compiling --layers 40 --seconds 300

CPU time, because a machine that compiles is busy, and child processes take a part of it. One
process pretends to be the first of two ranks, which exchange nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from benchmarks.measuring import Figures, Row, Table, alternating, in_processes, parser, show
from benchmarks.processes import connect
from syncbn import convert_model

ABOUT = (
    "The CPU time of the first step of a stack of [Conv 1x1, BN, ReLU] in 16 channels, with empty "
    "caches, in a process whose group pretends to have two ranks and exchanges nothing. In "
    "brackets: until there are graphs of operators, forward and backward, and the kernels, which "
    "Inductor writes and a C++ compiler compiles. The unit is plain BatchNorm."
)


def network(layers: int) -> nn.Sequential:
    blocks = [(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def taken(function: Callable[[], object]) -> float:
    """The CPU time of a call in milliseconds, child processes included."""
    before = os.times()
    function()
    after = os.times()
    return 1e3 * sum(b - a for a, b in zip(before[:4], after[:4], strict=True))


def step(net: nn.Module, backend: str) -> None:
    torch.compiler.reset()
    with fresh_cache():
        model = torch.compile(net, backend=backend, fullgraph=True)
        model(torch.randn(4, 16, 8, 8)).sum().backward()


def compiled(net: nn.Module) -> Figures:
    graph = taken(partial(step, net, "aot_eager"))
    whole = taken(partial(step, net, "inductor"))
    return whole, graph, whole - graph


def figures(rank: int, layers: int, seconds: float) -> dict[str, Figures]:
    # In this process, so that its CPU time is counted.
    connect()
    with config.patch(compile_threads=1):
        step(network(1), "inductor")  # imports the compiler
        ways = {
            "plain BatchNorm": partial(compiled, network(layers)),
            "syncbn": partial(compiled, convert_model(network(layers))),
        }
        return alternating(ways, seconds)


def table(layers: int, seconds: float) -> Table:
    def rows() -> list[Row]:
        return [Row(f"{layers} layers", 1, 1, in_processes(1, 1, figures, layers, seconds))]

    return Table("Time to compile", ABOUT, rows(), counted="processes")


if __name__ == "__main__":
    options = parser(__doc__, seconds=0)
    options.add_argument("--layers", type=int, default=10)
    arguments = options.parse_args()
    show(table(arguments.layers, arguments.seconds))
