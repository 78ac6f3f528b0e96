"""What synchronization costs a step of ResNet-50 in thousands of processes, on paper.

    python -m benchmarks.scale --hop 2 20 --bandwidth 40

A collective is a sequence of hops between processes. Forward, n processes gather: a ring
makes n - 1 hops with one message each, a tree log2(n) with more and more. Backward they sum: a
ring makes 2 (n - 1) hops with an n-th of the message, a tree 2 log2(n) with all of it.
`tests/project/test_scale.py` counts bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator

from torch import nn

from benchmarks.measuring import line
from benchmarks.networks import NETWORKS

PROCESSES = (2, 4, 16, 64, 1_024)


def message_bytes(channels: int, of_value: int = 4) -> int:
    """What a process sends, forward and backward: a count, and two values per channel."""
    return of_value * (2 * channels + 1)


def table(latencies: list[float], bandwidth: float) -> Iterator[str]:
    """The lines of the table, in Markdown. The arguments are the options of the program."""
    headings = [
        "processes",
        "hops",
        "MB received",
        *(f"ms, {hop:g} us per hop" for hop in latencies),
    ]
    yield line(headings)
    yield line(["---"] * len(headings))
    modules = NETWORKS["resnet"].build().modules()
    channels = [m.num_features for m in modules if isinstance(m, nn.BatchNorm2d)]
    layers, size = len(channels), sum(message_bytes(c) for c in channels)
    for n in PROCESSES:
        hops = 3 * (n - 1), 3 * math.ceil(math.log2(n))
        passes = (n - 1) + 2 * (n - 1) / n, (n - 1) + 2 * math.ceil(math.log2(n))
        sending = [p * size / (1e6 * bandwidth) for p in passes]
        steps = (
            pair(layers * h * hop / 1e3 + s for h, s in zip(hops, sending, strict=True))
            for hop in latencies
        )
        yield line([number(n), pair(hops), pair(p * size / 1e6 for p in passes), *steps])


def pair(values: Iterable[float]) -> str:
    return " / ".join(map(number, values))


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--hop", type=float, nargs="+", default=[5, 50], help="in microseconds")
    options.add_argument("--bandwidth", type=float, default=10, help="of a process, in GB/s")
    given = options.parse_args()
    print("\n".join(table(given.hop, given.bandwidth)))


if __name__ == "__main__":
    main()
