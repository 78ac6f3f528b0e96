"""What synchronization costs a step of ResNet-50 in thousands of processes, on paper.

    python -m benchmarks.scale --hop 2 20 --bandwidth 40

A collective is a sequence of hops from process to process. A ring of n makes 2 (n - 1) of them
with an n-th of the message, a tree 2 log2(n) with all of it. `tests/project/test_scale.py` counts
bytes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator

from torch import nn

from benchmarks.measuring import line
from benchmarks.networks import NETWORKS

PROCESSES = (2, 4, 16, 64, 1_000, 10_000)


def message_bytes(channels: int) -> tuple[int, int]:
    """What a process sends: forward a count, means and variances, backward two derivatives."""
    return 8 * (2 * channels + 1), 8 * 2 * channels


def table(latencies: list[float], bandwidth: float) -> Iterator[str]:
    """The lines of the table, in Markdown. The arguments are the options of the program."""
    headings = ["processes", "hops", *(f"ms, {hop:g} us per hop" for hop in latencies)]
    yield line(headings)
    yield line(["---"] * len(headings))
    modules = NETWORKS["resnet"].build().modules()
    channels = [m.num_features for m in modules if isinstance(m, nn.BatchNorm2d)]
    layers, size = len(channels), sum(sum(message_bytes(c)) for c in channels)
    for n in PROCESSES:
        hops = 2 * (n - 1), 2 * math.ceil(math.log2(n))
        sending = [passes * size / (1e6 * bandwidth) for passes in (hops[0] / n, hops[1])]
        steps = (
            pair(2 * layers * h * hop / 1e3 + s for h, s in zip(hops, sending, strict=True))
            for hop in latencies
        )
        yield line([number(n), pair(hops), *steps])


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
