"""Checks that synchronized replicas on this machine train like one device.

Prints versions and devices, then compares a synchronized layer on several replicas with the same
layer on one device: on the CPU, on each accelerator, and across all accelerators, in float64 and
float32. At the end it prints PASS or FAIL for each device, and a verdict. The exit status is 0 if
all pass, 1 if one fails, and 2 if the arguments are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from replication.__main__ import check_machine
from syncbn.batchnorm import SynchronizedBatchNorm2d
from syncbn.channels import has_float64

__all__: list[str] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints comparisons and verdicts. Returns the exit status, which is 1 if one fails."""
    return check_machine("syncbn", __doc__, make_layer, dtypes, arguments)


def make_layer() -> SynchronizedBatchNorm2d:
    """Returns a layer with random weights, some of them negative."""
    layer = SynchronizedBatchNorm2d(16)
    torch.nn.init.normal_(layer.weight, mean=0.5)
    return layer


def dtypes(device: torch.device) -> list[torch.dtype]:
    """Returns the dtypes to compare in, without those that the device lacks."""
    return [torch.float64, torch.float32] if has_float64(device) else [torch.float32]


if __name__ == "__main__":
    sys.exit(main())
