"""Passes a list with one item per sample through replicas, and returns one result per sample.

The entire list goes to every replica, in which ``zip(names, images)`` would pair its images with
the first names. So names are grouped by replica and wrapped in `Scattered`. The batch is also
`Scattered`, so that its shards match the groups. Results are wrapped in an object, because lists
of different lengths can't be joined, and lists of equal length would silently be merged.

    python examples/per_sample.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from replication import DataParallel, Scattered

Result = tuple[str, float]


class Found:
    """The results of one replica, sample by sample."""

    def __init__(self, items: list[Result]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Result]:
        return iter(self.items)


class Detector(nn.Module):
    def forward(self, images: Tensor, names: list[str]) -> Found:
        pairs = zip(names, images, strict=True)
        return Found([(name, float(image.max())) for name, image in pairs])


def main() -> int:
    images, names = torch.arange(5.0)[:, None], ["a", "b", "c", "d", "e"]
    model = DataParallel(Detector(), ["cpu"] * 2)
    parts = model(Scattered(images.split([3, 2])), Scattered([names[:3], names[3:]]))
    results = [result for part in parts for result in part]
    print(*results, sep="\n")
    return 0 if results == list(Detector()(images, names)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
