"""Checks that synchronized replicas and ranks on this machine train like one device.

Compares layers on several replicas with the same layers on one device, in float64 and float32: on
the CPU, on each accelerator, and across all accelerators. Then it starts two processes, which are
ranks of torch.distributed on the CPU, by gloo, and compares those.

    torchrun --nproc-per-node=2 -m syncbn

compares the ranks that torchrun starts instead: on the CPU by gloo, and each on its accelerator,
by NCCL on GPUs (or by gloo if ranks share one).

The last lines, to be pasted into a report, say PASS or FAIL for each. The exit status is 0 if all
pass, 1 if one fails, and 2 if the arguments are wrong. It is the same on every rank.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from replication import ProcessGroup, ReplicaAware, __version__, verify
from replication.extending import (
    default_devices,
    destroy_group,
    end,
    in_ranks,
    join_launched,
    table,
)
from syncbn.batchnorm import SynchronizedBatchNorm2d
from syncbn.channels import has_float64

#: What is printed of a comparison: the verdict, what was compared, and the largest error.
Row = tuple[str, str, str]

_CPU = torch.device("cpu")


class Checkpointed(SynchronizedBatchNorm2d):
    """A layer in an activation checkpoint, whose shards the CPU does not join."""

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(super().forward, input, use_reentrant=False)  # type: ignore[no-any-return]


class Centered(ReplicaAware, nn.Module):
    """Subtracts the mean of the whole batch, by collectives."""

    def forward(self, x: Tensor) -> Tensor:
        count = self.group.all_reduce(torch.tensor(len(x), device=x.device))
        return x - self.group.all_reduce(x.sum(0)) / count


class Moved(ReplicaAware, nn.Module):
    """Gives all samples to the first rank, so that the other shards are empty."""

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat(self.group.all_gather(x))
        return whole if self.group.rank == 0 else whole[:0]


def make_layers() -> nn.Sequential:
    # On the CPU, shards of the first are joined. Some of the weights are negative. Between two
    # linear layers, gradients of parameters would cancel except for rounding.
    layers = SynchronizedBatchNorm2d(16), Checkpointed(16, momentum=None)
    for layer in layers:
        nn.init.normal_(layer.weight, mean=0.5)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), Centered())


def make_batch(copies: int) -> Tensor:
    return torch.randn(3 * copies - 1, 16, 9, 9) + 10  # the last shard is smaller


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
    add = parser.add_argument
    add("--replicas", type=int, default=4, help="replicas per device (default 4)")
    add("--timeout", type=float, default=300, help="seconds that ranks may wait (default 300)")
    options = parser.parse_args(arguments)
    if not 2 <= options.replicas <= 1024:  # each is a thread
        parser.error(f"--replicas must be from 2 to 1024 (got {options.replicas})")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return check_launched_ranks(environment, options.timeout)
    print(environment)
    rows = check_replicas(accelerators, options.replicas)
    rows += check_own_ranks(options.timeout)
    if not accelerators:
        print("\nOnly the CPU was checked: torch finds no GPU or other accelerator here.")
    return report(f"python -m syncbn --replicas {options.replicas}\n{environment}", rows)


def report(head: str, rows: Sequence[Row]) -> int:
    """Prints the lines to be pasted. Returns the exit status."""
    passed = all(verdict == "PASS" for verdict, *_ in rows)
    above = "" if passed else " Add the comparisons above."
    print(f"\nTo report the result, paste the lines below into an issue.{above}\n")
    print(f"```\n{head}\n")
    print(table(("result", "checked", "largest error"), rows))
    if passed:
        print("PASS: they run, communicate, and compute what one device computes\n```")
    else:
        print("FAIL: they raise, or differ from one device\n```")
    return 0 if passed else 1


def check_replicas(accelerators: list[torch.device], replicas: int) -> list[Row]:
    checked = [[device] * replicas for device in (_CPU, *accelerators)]
    if len(accelerators) > 1:
        checked.append(accelerators)
    torch.manual_seed(0)
    batch, rows = make_batch(max(replicas, len(accelerators))), list[Row]()
    for devices in checked:
        names = ", ".join(dict.fromkeys(map(str, devices)))
        what = f"{len(devices)} replicas on {names}"
        rows += compared(what, devices[0], make_layers(), batch, devices)
    return rows


def check_ranks(devices: Sequence[torch.device], backends: Sequence[str]) -> list[Row]:
    """Compares the ranks of this process's group, on each of its devices."""
    torch.manual_seed(0)  # all ranks need the same batch
    size, rows = distributed.get_world_size(), list[Row]()
    cases: dict[str, tuple[nn.Module, Any]] = {
        "uneven shards": (make_layers(), None),
        "empty shards": (nn.Sequential(Moved(), make_layers()), None),
        "DistributedDataParallel": (make_layers(), DistributedDataParallel),
    }
    batch = make_batch(size)
    for device, backend in zip(devices, backends, strict=True):
        for case, (model, wrap) in cases.items():
            what = f"{size} ranks on {device.type} ({backend}), {case}"
            rows += compared(what, device, model.to(device), batch, wrap=wrap)
    return rows


def compared(
    what: str, device: torch.device, *arguments: Any, wrap: Callable[..., Any] | None = None
) -> list[Row]:
    """Compares with one device by `verify`, in each dtype, and prints what that returns."""
    rows = []
    for dtype in [*([torch.float64] if has_float64(device) else []), torch.float32]:
        title = f"{what} in {str(dtype).removeprefix('torch.')}"
        print(f"\n{title}, compared with one device:", flush=True)
        try:
            found = verify(*arguments, dtype=dtype, wrap=wrap)
            print(found)
            largest = max(one.error for kind in found.differences.values() for one in kind)
            rows.append(("PASS" if found else "FAIL", title, f"{largest:.0e}"))
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            rows.append(("FAIL", title, type(error).__name__))
    return rows


# -- ranks of torchrun ---------------------------------------------------------------------------


def check_launched_ranks(environment: str, timeout: float) -> int:
    devices, backends = join_launched(timeout)
    group = ProcessGroup(name="python -m syncbn")
    owned = group.all_gather_object(", ".join(map(described, devices[1:] or devices)))
    with printing_of_first():
        print(environment)
        rows = check_ranks(devices, backends)
        ranks = "\n".join(f"Rank {rank}: {name}" for rank, name in enumerate(owned))
        head = f"torchrun -m syncbn, {group.size} ranks\n{environment}\n{ranks}\n"
        names = ", ".join(map(version_of, dict.fromkeys(backends)))
        status = report(f"{head}Backends: {names}", rows)
    status = max(group.all_gather_object(status))
    destroy_group(None)
    return status


def printing_of_first() -> redirect_stdout[Any]:
    """Drops what ranks print, except the first one."""
    return redirect_stdout(sys.stdout if distributed.get_rank() == 0 else io.StringIO())


def version_of(backend: str) -> str:
    if backend != "nccl":
        return backend
    version: Any = torch.cuda.nccl.version()
    return f"nccl {'.'.join(map(str, version))}"


# -- ranks that this process starts --------------------------------------------------------------


def check_own_ranks(timeout: float) -> list[Row]:
    """Starts two ranks on the CPU, and ends both if one fails or they take too long."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        print("\nNo ranks were checked: this torch has no gloo.")
        return []
    sys.stdout.flush()  # before the ranks print
    # By the name under which new processes find it: their `__main__` is another.
    run = import_module("syncbn.__main__").run_own_rank
    try:
        return in_ranks(2, run, timeout=timeout)  # type: ignore[no-any-return]
    except Exception as error:
        print(f"\n2 ranks on cpu (gloo): {error}")
        return [("FAIL", "2 ranks on cpu (gloo)", type(error).__name__)]


def run_own_rank() -> list[Row]:
    with printing_of_first():
        return check_ranks([_CPU], ["gloo"])


def described(device: torch.device) -> str:
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({get_name(device)})" if get_name else str(device)


if __name__ == "__main__":
    end(main())
