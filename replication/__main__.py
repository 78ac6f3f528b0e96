"""Checks that replicas run and communicate on this machine.

Prints versions and devices, then compares replicas of a layer that communicates with the same
layer on one device: on the CPU, on each accelerator, and across all accelerators. At the end it
prints PASS or FAIL for each device, and a verdict. The exit status is 0 if all pass, 1 if one
fails, and 2 if the arguments are wrong. ``python -m syncbn`` does so with synchronized layers.
"""

from __future__ import annotations

import argparse
import platform
import sys
import traceback
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, nn

from replication.devices import accelerator, default_devices
from replication.diagnosis.table import Table
from replication.diagnosis.verify import verify
from replication.groups.layer import ReplicaAware
from replication.version import DISTRIBUTION, __version__

#: Each replica is a thread.
_MOST_REPLICAS = 1024


class Centered(ReplicaAware, nn.Module):
    """Scales its input and subtracts the mean of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        count = self.group.all_reduce(torch.tensor(len(y), device=y.device))
        return y - self.group.all_reduce(y.sum(0)) / count


def main(arguments: Sequence[str] | None = None) -> int:
    return check_machine("replication", __doc__, Centered, lambda _: [torch.float32], arguments)


def check_machine(
    package: str,
    description: str | None,
    make_layer: Callable[[], nn.Module],
    dtypes: Callable[[torch.device], Sequence[torch.dtype]],
    arguments: Sequence[str] | None,
) -> int:
    """Compares a layer on replicas with one device, on every device of this machine.

    ``make_layer`` makes the layer, for images of 16 channels. ``dtypes`` returns the dtypes to
    compare in on a device. ``description`` is the text of ``--help``, title first (None under
    ``-OO``). Returns the exit status: 0 if all comparisons are equal up to rounding, otherwise 1.
    """
    title, _, rest = (description or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=title,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=environment())
    parser.add_argument("--replicas", type=int, default=4, help="replicas per device (default 4)")
    replicas = parser.parse_args(arguments).replicas
    if not 2 <= replicas <= _MOST_REPLICAS:
        parser.error(f"--replicas must be from 2 to {_MOST_REPLICAS} (got {replicas})")
    print(environment())
    torch.manual_seed(0)
    accelerators = default_devices()
    device_lists = [[device] * replicas for device in (torch.device("cpu"), *accelerators)]
    if len(accelerators) > 1:
        device_lists.append(accelerators)
    samples = 3 * max(replicas, len(accelerators)) - 1  # the last shard is smaller
    batch = torch.randn(samples, 16, 9, 9) + 10
    results = [
        check_devices(make_layer, batch, devices, dtypes(devices[0])) for devices in device_lists
    ]
    passes = all(verdict == "PASS" for verdict, *_ in results)
    print()
    print(Table(("result", "device", "checked"), results).text())
    if not accelerators:
        print("\nOnly the CPU was checked: torch finds no GPU or other accelerator here.")
    print(
        "\nPASS: replicas run, communicate, and compute what one device computes"
        if passes
        else "\nFAIL: replicas raise, or differ from one device; see the comparisons above"
    )
    return 0 if passes else 1


def check_devices(
    make_layer: Callable[[], nn.Module],
    batch: Tensor,
    devices: Sequence[torch.device],
    dtypes: Sequence[torch.dtype],
) -> tuple[str, str, str]:
    """Compares a layer on replicas with one device in each dtype, and prints the comparisons.

    Returns ``"PASS"`` or ``"FAIL"``, the names of the devices, and what was checked.
    """
    names = ", ".join(dict.fromkeys(map(str, devices)))
    replicas = f"{len(devices)} replicas"
    checked, failures = [], []
    for dtype in dtypes:
        checked.append(str(dtype).removeprefix("torch."))
        print(f"\n{replicas} on {names} in {checked[-1]}, compared with one device:")
        try:
            verification = verify(make_layer(), batch, devices, dtype=dtype)
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            failures.append(f"{type(error).__name__} in {checked[-1]}")
        else:
            print(verification)
            if not verification:
                failures.append(f"differs from one device in {checked[-1]}")
    what = f"{replicas} in {' and '.join(checked)}"
    if failures:
        return "FAIL", names, f"{what}: {', '.join(failures)}"
    return "PASS", names, what


def environment() -> str:
    """Describes the installed software and the available devices."""
    kind = accelerator()
    count = len(default_devices())
    found = f"{count} {kind} device{'s' * (count != 1)}" if kind else "no GPU or other accelerator"
    backends = [
        name
        for name in ("gloo", "nccl")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    return (
        f"{DISTRIBUTION} {__version__}\n"
        f"Python {platform.python_version()}, torch {torch.__version__}\n"
        f"Devices: CPU ({torch.get_num_threads()} threads), {found}\n"
        f"Backends for several processes: {', '.join(backends) or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())
