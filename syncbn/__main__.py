"""Checks that synchronized replicas on this machine train like one device.

Compares layers on several replicas with the same layers on one device, in float64 and float32: on
the CPU, on each accelerator, and across all accelerators. The last lines, to be pasted into a
report, say PASS or FAIL for each. The exit status is 0 if all pass, 1 if one fails, and 2 if the
arguments are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from replication.__main__ import Centered, check_machine, run
from syncbn.batchnorm import SynchronizedBatchNorm2d
from syncbn.channels import has_float64


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks this machine, and returns the exit status."""
    return check_machine("syncbn", __doc__, make_layers, has_float64, arguments)


class Checkpointed(SynchronizedBatchNorm2d):
    """A layer in an activation checkpoint, for which the CPU takes the formula."""

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(super().forward, input, use_reentrant=False)  # type: ignore[no-any-return]


def make_layers() -> nn.Sequential:
    """Returns two synchronized layers, and the layer that ``python -m replication`` checks."""
    # `syncbn.joined` computes the first on the CPU. Some of the weights are negative.
    layers = SynchronizedBatchNorm2d(16), Checkpointed(16, momentum=None)
    for layer in layers:
        nn.init.normal_(layer.weight, mean=0.5)
    return nn.Sequential(*layers, Centered())


if __name__ == "__main__":
    run(main)
