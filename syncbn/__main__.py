"""Checks that synchronized replicas on this machine train like one device.

Compares layers on several replicas with the same layers on one device, in float64 and float32: on
the CPU, on each accelerator, and across all accelerators. The last lines, to be pasted into a
report, say PASS or FAIL for each. The exit status is 0 if all pass, 1 if one fails, and 2 if the
arguments are wrong.
"""

from __future__ import annotations

import argparse
import platform
import sys
import traceback
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from replication.devices import default_devices
from replication.errors import table
from replication.groups.layer import ReplicaAware
from replication.verify import verify
from replication.version import __version__
from syncbn.batchnorm import SynchronizedBatchNorm2d
from syncbn.channels import has_float64


class Checkpointed(SynchronizedBatchNorm2d):
    """A layer in an activation checkpoint, whose shards the CPU does not join."""

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(super().forward, input, use_reentrant=False)  # type: ignore[no-any-return]


class Centered(ReplicaAware, nn.Module):
    """Scales its input and subtracts the mean of the whole batch, by collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        count = self.group.all_reduce(torch.tensor(len(y), device=y.device))
        return y - self.group.all_reduce(y.sum(0)) / count


def make_layers() -> nn.Sequential:
    # `syncbn.joined` computes the first on the CPU. Some of the weights are negative.
    layers = SynchronizedBatchNorm2d(16), Checkpointed(16, momentum=None)
    for layer in layers:
        nn.init.normal_(layer.weight, mean=0.5)
    return nn.Sequential(*layers, Centered())


def main(arguments: Sequence[str] | None = None) -> int:
    accelerators = default_devices()
    devices = [f"CPU ({torch.get_num_threads()} threads)", *map(described, accelerators)]
    environment = (
        f"synchronized-batchnorm {__version__}\n"
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}\n"
        f"Devices: {', '.join(devices)}"
    )
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="version", version=environment)
    parser.add_argument("--replicas", type=int, default=4, help="replicas per device (default 4)")
    replicas = parser.parse_args(arguments).replicas
    if not 2 <= replicas <= 1024:  # each is a thread
        parser.error(f"--replicas must be from 2 to 1024 (got {replicas})")
    print(environment)
    torch.manual_seed(0)
    samples = 3 * max(replicas, len(accelerators)) - 1  # the last shard is smaller
    batch = torch.randn(samples, 16, 9, 9) + 10
    checked = [[device] * replicas for device in (torch.device("cpu"), *accelerators)]
    if len(accelerators) > 1:
        checked.append(accelerators)
    results = []
    for device_ids in checked:
        exact = [torch.float64] if has_float64(device_ids[0]) else []
        for dtype in [*exact, torch.float32]:
            results.append(compared(make_layers(), batch, device_ids, dtype))
    passed = all(verdict == "PASS" for verdict, *_ in results)
    if not accelerators:
        print("\nOnly the CPU was checked: torch finds no GPU or other accelerator here.")
    above = "" if passed else " Add the comparisons above."
    print(f"\nTo report the result, paste the lines below into an issue.{above}\n")
    print(f"```\npython -m syncbn --replicas {replicas}\n{environment}\n")
    print(table(("result", "checked", "largest error"), results))
    if passed:
        print("PASS: replicas run, communicate, and compute what one device computes")
    else:
        print("FAIL: replicas raise, or differ from one device")
    print("```")
    return 0 if passed else 1


def compared(
    layer: nn.Module, batch: Tensor, devices: Sequence[torch.device], dtype: torch.dtype
) -> tuple[str, str, str]:
    """Compares replicas with one device. Returns the verdict, what is checked, and the error."""
    names = ", ".join(dict.fromkeys(map(str, devices)))
    what = f"{len(devices)} replicas on {names} in {str(dtype).removeprefix('torch.')}"
    print(f"\n{what}, compared with one device:")
    try:
        found = verify(layer, batch, devices, dtype=dtype)
        print(found)
        largest = max(one.error for kind in found.differences.values() for one in kind)
        return "PASS" if found else "FAIL", what, f"{largest:.0e}"
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        return "FAIL", what, type(error).__name__


def described(device: torch.device) -> str:
    try:
        name = torch.get_device_module(device).get_device_name(device)
    except Exception:  # of a backend without the function, or without such a device
        return str(device)
    return f"{device} ({name})"


if __name__ == "__main__":
    sys.exit(main())
