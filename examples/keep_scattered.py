"""Two networks in a row, without gathering between them.

Case 1: a network extracts features, another makes predictions from them. The features stay where
they were computed: `gather_to_one_device=False` makes them a `Scattered`, one entry per replica.
The second network recognizes it, and entry i goes to replica i.

Case 2: a network returns both features and a prediction. The prediction is gathered. The features
stay, are added on their devices, and passed on.

    python examples/keep_scattered.py
    python examples/keep_scattered.py --devices cuda:0 cuda:1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from replication import DataParallel, Scattered


class Features(nn.Module):
    """Features under two names, nested, beside a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.model(x)
        return {"outputs": {"out1": y, "out2": y}, "second_output": y}


def keep_all(x: Tensor, devices: Sequence[str]) -> tuple[Scattered, Tensor]:
    """Case 1: nothing is gathered between the networks."""
    extract = DataParallel(nn.Linear(5, 2).to(devices[0]), devices, gather_to_one_device=False)
    classify = DataParallel(nn.Linear(2, 1).to(devices[0]), devices)
    features = extract(x)
    return features, classify(features)


def keep_some(x: Tensor, devices: Sequence[str]) -> tuple[dict[str, Any], Tensor]:
    """Case 2: ``out1`` and ``out2`` stay scattered, everything else is gathered."""
    extract = DataParallel(Features().to(devices[0]), devices, except_keywords=["out1", "out2"])
    classify = DataParallel(nn.Linear(2, 1).to(devices[0]), devices)
    found = extract(x)
    both = zip(found["outputs"]["out1"], found["outputs"]["out2"], strict=True)
    return found, classify(Scattered(one + two for one, two in both))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu"] * 8, metavar="DEVICE")
    devices = parser.parse_args(argv).devices
    x = torch.ones(16, 5, device=devices[0])

    features, scores = keep_all(x, devices)
    print(f"features: {type(features).__name__} of {len(features)}, each {[*features[0].shape]}")
    print(f"scores: {[*scores.shape]}")

    found, scores = keep_some(x, devices)
    out1 = found["outputs"]["out1"]
    print(f"out1: {type(out1).__name__} of {len(out1)}, each {[*out1[0].shape]}")
    print(f"second_output: {[*found['second_output'].shape]}")
    scores.mean().backward()
    print(f"scores: {[*scores.shape]}, and gradients flow back through both networks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
