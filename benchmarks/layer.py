"""What a synchronized layer alone costs: forward and backward on two CPU replicas.

Every layer runs in the same replicas, without splitting and concatenation.

    python -m benchmarks.layer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

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
from replication import DataParallel, Scattered
from syncbn import convert_model, joined

ABOUT = (
    "One layer, forward and backward, in the replicas of `replication.DataParallel`, without "
    "splitting and gathering. Shapes are per replica. Cells are both, and in brackets each."
)

REPLICAS = 2

CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last

#: Per replica.
INPUTS: list[tuple[tuple[int, ...], torch.memory_format]] = [
    ((8, 64, 56, 56), CONTIGUOUS),
    ((8, 64, 56, 56), CHANNELS_LAST),
    ((2, 256, 14, 14), CONTIGUOUS),
    ((2, 64, 8, 8), CONTIGUOUS),
    ((64, 256), CONTIGUOUS),
]

#: Each makes a layer from a plain BatchNorm.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain BatchNorm": lambda plain: plain,
    "ours": convert_model,
    "older toolkits": lambda plain: yardsticks.convert(nn.Sequential(plain)),
}


def run(model: nn.Module, shards: list[Tensor], upstream: list[Tensor]) -> Figures:
    """Milliseconds of forward and backward, and of each."""
    begin = now()
    outputs = model(Scattered(shards))
    forward = now()
    # Unlike backward(), this adds nothing to the gradients of earlier rounds.
    torch.autograd.grad(outputs, [*shards, *model.parameters()], upstream)
    end = now()
    return 1e3 * (end - begin), 1e3 * (forward - begin), 1e3 * (end - forward)


def title(shape: tuple[int, ...], layout: torch.memory_format) -> str:
    text = " x ".join(map(str, shape))
    return f"{text}, channels_last" if layout is CHANNELS_LAST else text


def measure(rank: int, seconds: float, device: str) -> list[Row]:
    made = []
    for shape, layout in INPUTS:
        shards, upstream = (
            [torch.randn(shape).to(device, memory_format=layout) for _ in range(REPLICAS)]
            for _ in range(2)
        )
        for shard in shards:
            shard.requires_grad_()
        ways = {}
        for name, make in WAYS.items():
            plain = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
            layer = make(plain(shape[1])).to(device)
            model = DataParallel(layer, [device] * REPLICAS, gather_to_one_device=False)
            ways[name] = partial(run, model, shards, upstream)
        figures = alternating(ways, seconds)
        made.append(Row(title(shape, layout), REPLICAS, torch.get_num_threads(), figures))
    return made


def rows(seconds: float, device: str = "cpu") -> Iterator[Row]:
    for threads in THREADS:
        yield from in_processes(1, threads, measure, seconds, device)


ABOUT_SIZES = (
    "The same, with all shards joined (`syncbn/joined.py`) and with one node for all replicas "
    f"(`syncbn/graph.py`). Shards of up to {joined.LARGEST:,} values are joined by default."
)

#: Per replica, from 2**12 values to 2**20.
SIZES = [(8, 8, 8, 8), (8, 32, 8, 8), (8, 64, 16, 16), (8, 64, 24, 24), (8, 64, 32, 32)]
SIZES += [(16, 64, 32, 32)]


def limited(limit: int, run: Callable[[], Figures]) -> Figures:
    """Runs with another size of the largest shard that is joined."""
    joined.LARGEST = limit
    return run()


def measure_sizes(rank: int, seconds: float) -> list[Row]:
    limits = {"plain BatchNorm": 0, "joined": 2**62, "one node": -1}
    made = []
    for shape in SIZES:
        shards = [torch.randn(shape, requires_grad=True) for _ in range(REPLICAS)]
        upstream = [torch.randn(shape) for _ in range(REPLICAS)]
        ways = {}
        for name, limit in limits.items():
            layer = WAYS["ours" if limit else name](nn.BatchNorm2d(shape[1]))
            model = DataParallel(layer, ["cpu"] * REPLICAS, gather_to_one_device=False)
            ways[name] = partial(limited, limit, partial(run, model, shards, upstream))
        figures = alternating(ways, seconds)
        case = f"{title(shape, CONTIGUOUS)}, {math.prod(shape):,} values"
        made.append(Row(case, REPLICAS, torch.get_num_threads(), figures))
    return made


def rows_of_sizes(seconds: float) -> Iterator[Row]:
    for threads in THREADS:
        yield from in_processes(1, threads, measure_sizes, seconds)


def tables(seconds: float) -> list[Table]:
    return [
        Table("A layer alone", ABOUT, rows(seconds)),
        Table("Small and large shards", ABOUT_SIZES, rows_of_sizes(seconds)),
    ]


if __name__ == "__main__":
    for part in tables(parser(__doc__).parse_args().seconds):
        show(part)
