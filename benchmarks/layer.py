"""What a synchronized layer alone costs: forward and backward on two CPU replicas.

Every layer runs in the same replicas, without splitting and concatenation.

    python -m benchmarks.layer
"""

from __future__ import annotations

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
from syncbn import convert_model

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


def table(seconds: float) -> Table:
    return Table("A layer alone", ABOUT, rows(seconds))


if __name__ == "__main__":
    show(table(parser(__doc__).parse_args().seconds))
