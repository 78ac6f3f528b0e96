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
from syncbn import convert_model, replicas

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
    "syncbn": convert_model,
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


def limited(limit: int, run: Callable[[], Figures]) -> Figures:
    """Runs with this size of the largest shard that is joined."""
    replicas.LARGEST_JOINED = limit
    return run()


def measured(
    case: str,
    shape: tuple[int, ...],
    layout: torch.memory_format,
    layers: dict[str, tuple[str, int]],
    seconds: float,
) -> Row:
    """Measures layers: each is a way of `WAYS`, and the size of the largest shard to join."""
    shards, upstream = (
        [torch.randn(shape).to(memory_format=layout) for _ in range(REPLICAS)] for _ in range(2)
    )
    for shard in shards:
        shard.requires_grad_()
    plain = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    ways = {}
    for name, (way, limit) in layers.items():
        layer = WAYS[way](plain(shape[1]))
        model = DataParallel(layer, ["cpu"] * REPLICAS, gather_to_one_device=False)
        ways[name] = partial(limited, limit, partial(run, model, shards, upstream))
    return Row(case, REPLICAS, torch.get_num_threads(), alternating(ways, seconds))


def measure(rank: int, seconds: float) -> list[Row]:
    layers = {way: (way, replicas.LARGEST_JOINED) for way in WAYS}
    return [
        measured(title(shape, layout), shape, layout, layers, seconds) for shape, layout in INPUTS
    ]


ABOUT_SIZES = (
    "The same, with all shards joined and by the kernels (see `syncbn/replicas.py`). "
    f"Shards of up to {replicas.LARGEST_JOINED:,} values are joined by default."
)

#: Per replica, from 2**12 values to 2**20.
SIZES = [(8, 8, 8, 8), (8, 32, 8, 8), (8, 64, 16, 16), (8, 64, 24, 24), (8, 64, 32, 32)]
SIZES += [(16, 64, 32, 32)]


def measure_sizes(rank: int, seconds: float) -> list[Row]:
    layers = {
        "plain BatchNorm": ("plain BatchNorm", 0),
        "joined": ("syncbn", 2**62),
        "kernels": ("syncbn", -1),
    }
    cases = {f"{title(s, CONTIGUOUS)}, {math.prod(s):,} values": s for s in SIZES}
    return [measured(case, s, CONTIGUOUS, layers, seconds) for case, s in cases.items()]


def rows(measure: Callable[..., list[Row]], seconds: float) -> Iterator[Row]:
    for threads in THREADS:
        yield from in_processes(1, threads, measure, seconds)


def tables(seconds: float) -> list[Table]:
    return [
        Table("A layer alone", ABOUT, rows(measure, seconds)),
        Table("Small and large shards", ABOUT_SIZES, rows(measure_sizes, seconds)),
    ]


if __name__ == "__main__":
    for part in tables(parser(__doc__).parse_args().seconds):
        show(part)
