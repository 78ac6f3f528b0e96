"""Checks that replicas on this machine train like one device: ``python -m syncbn``.

Prints the environment, then a comparison of a synchronized layer on several replicas with the same
layer on one device (see `replication.verify.verify`): on the CPU, on one accelerator, and on all
accelerators, in float64 and float32.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

import torch
from torch import distributed

from replication.devices import accelerator, default_devices
from replication.verify import verify
from syncbn.batchnorm import SynchronizedBatchNorm2d
from syncbn.channels import has_float64

__all__: list[str] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the comparisons. Returns the exit status, which is 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4, help="replicas per device (default 4)")
    replicas = parser.parse_args(arguments).replicas
    if replicas < 2:
        parser.error(f"--replicas must be at least 2 (got {replicas})")
    print(environment())
    torch.manual_seed(0)
    batch = torch.randn(3 * replicas - 1, 16, 9, 9) + 10  # the last shard is smaller
    accelerators = default_devices()
    device_lists = [[device] * replicas for device in (torch.device("cpu"), *accelerators[:1])]
    if len(accelerators) > 1:
        device_lists.append(list(accelerators))
        batch = torch.cat([batch] * len(accelerators))  # some data for each of them
    passes = True
    for devices in device_lists:
        for dtype in (torch.float64, torch.float32):
            if has_float64(devices[0]) or dtype == torch.float32:
                layer = SynchronizedBatchNorm2d(16)
                torch.nn.init.normal_(layer.weight, mean=0.5)
                verification = verify(layer, batch, devices, dtype=dtype)
                print(f"\n{', '.join(map(str, devices))} in {dtype}\n{verification}")
                passes = passes and bool(verification)
    print(
        "\nPASS: replicas compute what one device computes"
        if passes
        else "\nFAIL: replicas differ from one device; see the comparisons above"
    )
    return 0 if passes else 1


def environment() -> str:
    """Describes the installed software and the available devices."""
    kind = accelerator()
    devices = f"{len(default_devices())} {kind} devices" if kind else "no accelerator"
    backends = [
        name
        for name in ("gloo", "nccl")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads on the CPU, {devices}, "
        f"torch.distributed: {', '.join(backends) or 'not available'}"
    )


if __name__ == "__main__":
    sys.exit(main())
