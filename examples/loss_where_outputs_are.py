"""Computes the loss on the device of each output, so that no device has to hold all outputs.

Gathering large outputs (a segmentation, say) fills the first device while the others idle. Here
the outputs stay `Scattered`, `DataParallelCriterion` computes the loss where they are, and labels
are split as the outputs were. Shards may differ in size: the loss is not the mean of the replicas'
means, which would give uneven shards the same weight.

The program compares loss and gradients with the single-device ones.

    python examples/loss_where_outputs_are.py
    python examples/loss_where_outputs_are.py --devices cuda:0 cuda:1
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import nn

from replication import DataParallel, DataParallelCriterion


def compare(devices: Sequence[str], samples: int) -> tuple[float, float]:
    """How far loss and gradients are from the single-device ones."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(devices[0])
    alone = copy.deepcopy(net)
    x = torch.randn(samples, 5, dtype=torch.float64, device=devices[0])
    labels = torch.randint(3, (samples,), device=devices[0])

    predict = DataParallel(net, devices, gather_to_one_device=False)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), devices)
    loss = criterion(predict(x), labels)
    loss.backward()

    expected = nn.functional.cross_entropy(alone(x), labels)
    expected.backward()
    grads = zip(net.parameters(), alone.parameters(), strict=True)
    apart = max(float((p.grad - q.grad).abs().max()) for p, q in grads)
    return float((loss - expected).detach().abs()), apart


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu"] * 4, metavar="DEVICE")
    parser.add_argument("--samples", type=int, default=10)
    options = parser.parse_args(argv)
    loss, grads = compare(options.devices, options.samples)
    print(f"distance from one device: loss {loss:.1e}, gradients {grads:.1e}")
    return 0 if max(loss, grads) < 1e-12 else 1


if __name__ == "__main__":
    raise SystemExit(main())
