"""Checks that synchronized replicas on this machine train like one device.

Prints versions and devices, then compares synchronized layers on several replicas with the same
layers on one device: on the CPU, on each accelerator, and across all accelerators, in float64 and
float32. At the end it prints PASS or FAIL for each device, and a verdict. The exit status is 0 if
all pass, 1 if one fails, and 2 if the arguments are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from replication.__main__ import check_machine
from syncbn.batchnorm import SynchronizedBatchNorm2d
from syncbn.channels import has_float64


def main(arguments: Sequence[str] | None = None) -> int:
    return check_machine("syncbn", __doc__, make_layers, dtypes, arguments)


def make_layers() -> nn.Sequential:
    """Returns two layers with random weights, some of them negative.

    On the CPU the first is computed by `syncbn.joined`. The second is not, for its cumulative
    average, and is computed as on accelerators.
    """
    layers = [SynchronizedBatchNorm2d(16, momentum=momentum) for momentum in (0.1, None)]
    for layer in layers:
        nn.init.normal_(layer.weight, mean=0.5)
    return nn.Sequential(*layers)


def dtypes(device: torch.device) -> list[torch.dtype]:
    """Returns the dtypes to compare in, without those that the device lacks."""
    return [torch.float64, torch.float32] if has_float64(device) else [torch.float32]


if __name__ == "__main__":
    sys.exit(main())
