"""Checks that replicas run and communicate on this machine.

Prints versions and devices, then compares replicas of a layer that communicates with the same
layer on one device: on the CPU, on one accelerator, and on all accelerators. The exit status is 0
if they compute the same, otherwise 1.
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
from replication.groups.layer import ReplicaAware
from replication.verify import verify

__all__: list[str] = []


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
    """Prints the comparisons. Returns the exit status, which is 1 if one of them fails."""
    return check_machine("replication", __doc__, Centered, lambda _: [torch.float32], arguments)


def check_machine(
    package: str,
    description: str | None,
    make_layer: Callable[[], nn.Module],
    dtypes: Callable[[torch.device], Sequence[torch.dtype]],
    arguments: Sequence[str] | None,
) -> int:
    """Compares a layer on replicas with one device, on every kind of device that there is.

    ``make_layer`` makes the layer, for images of 16 channels. ``dtypes`` returns the dtypes to
    compare in on a device. ``description`` is the text of ``--help``, title first (None under
    ``-OO``). Returns the exit status: 0 if all comparisons are equal up to rounding, otherwise 1.
    """
    title, _, rest = (description or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=title, epilog=rest)
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
        for dtype in dtypes(devices[0]):
            print(
                f"\n{len(devices)} replicas on {', '.join(map(str, devices))}, in {dtype}. "
                "Largest relative differences from one device:"
            )
            try:
                verification = verify(make_layer(), batch, devices, dtype=dtype)
            except Exception:
                traceback.print_exc(file=sys.stdout)
                passes = False
            else:
                print(verification)
                passes = passes and bool(verification)
    print(
        "\nPASS: replicas run, communicate, and compute what one device computes"
        if passes
        else "\nFAIL: replicas raise, or differ from one device; see the comparisons above"
    )
    return 0 if passes else 1


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
        f"Python {platform.python_version()}, torch {torch.__version__}\n"
        f"Devices: CPU ({torch.get_num_threads()} threads), {found}\n"
        f"Backends for several processes: {', '.join(backends) or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())
