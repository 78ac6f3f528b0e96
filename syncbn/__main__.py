"""Am I really synchronized? ``python -m syncbn`` says what is there, and checks the layer.

On 1 to n replicas, on the CPU and on an accelerator, and on all accelerators at once, the layer
computes a batch with a mean of 1e4 in float32. The table has the largest error of each quantity
against float64. Allowed is twice that of `torch.nn.BatchNorm2d` on one CPU, plus one ulp.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn

from replication import DataParallel
from replication.devices import accelerator, default_devices
from syncbn.batchnorm import SynchronizedBatchNorm2d

__all__: list[str] = []

#: The largest of each quantity.
Errors = dict[str, float]

_CHANNELS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a quantity is not within what is allowed."""
    parser = argparse.ArgumentParser(prog="python -m syncbn", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4, help="at most so many (default 4)")
    options = parser.parse_args(arguments)
    if options.replicas < 1:
        parser.error(f"--replicas must be at least 1 (got {options.replicas})")
    print(f"{environment()}\n")
    torch.manual_seed(0)
    check = Check(samples=3 * options.replicas - 1)
    print("largest error".ljust(20), *(name.rjust(11) for name in check.allowed))
    print_row("allowed", check.allowed)
    print_row("torch.nn.BatchNorm2d", check.of_torch)
    everything_holds = True
    for devices in device_lists(options.replicas):
        errors = check.errors(devices)
        too_large = [name for name, error in errors.items() if not error <= check.allowed[name]]
        print_row(named(devices), errors, f"  too large: {', '.join(too_large)}" * bool(too_large))
        everything_holds = everything_holds and not too_large
    print("\nall is exact" if everything_holds else "\nnot all is exact")
    return 0 if everything_holds else 1


def print_row(name: str, errors: Errors, remark: str = "") -> None:
    """One line of the table."""
    print(name.ljust(20), *(f"{error:11.1e}" for error in errors.values()), remark)


def environment() -> str:
    """What is installed and what there is to run on."""
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


def device_lists(replicas: int) -> list[list[str]]:
    """The lists of devices to check: one device several times, and all accelerators once."""
    accelerators = list(map(str, default_devices()))
    lists = [
        [device] * count
        for device in ("cpu", *accelerators[:1])
        for count in range(1, replicas + 1)
    ]
    return [*lists, accelerators] if len(accelerators) > 1 else lists


def named(devices: Sequence[str]) -> str:
    """``["cpu", "cpu"]`` -> ``"cpu x 2"``."""
    return f"{devices[0]} x {len(devices)}" if len(set(devices)) == 1 else ", ".join(devices)


class Check:
    """A batch, and how exact a layer has to be with it."""

    def __init__(self, samples: int) -> None:
        self._x = torch.randn(samples, _CHANNELS, 9, 9) + 1e4
        self._dy = torch.randn_like(self._x)
        plain = nn.BatchNorm2d(_CHANNELS)
        for parameter in plain.parameters():
            nn.init.normal_(parameter, mean=0.5)
        self._state = copy.deepcopy(plain.state_dict())
        exact = copy.deepcopy(plain).double()
        self._truth = quantities(exact, exact, self._x.double(), self._dy.double())
        self.of_torch = self._errors_of(quantities(plain, plain, self._x, self._dy))
        ulp = torch.finfo(torch.float32).eps
        # Of a running mean near zero, the ulp is that of the values it is the mean of.
        scales = {name: true.abs().max().item() for name, true in self._truth.items()}
        scales["mean"] = self._x.abs().max().item()
        self.allowed = {name: 2 * e + ulp * scales[name] for name, e in self.of_torch.items()}

    def errors(self, devices: Sequence[str]) -> Errors:
        """Those of a synchronized layer with one replica on each device."""
        layer = SynchronizedBatchNorm2d(_CHANNELS)
        layer.load_state_dict(self._state)
        layer.to(devices[0])
        x, dy = (tensor.to(devices[0]) for tensor in (self._x, self._dy))
        return self._errors_of(quantities(layer, DataParallel(layer, devices), x, dy))

    def _errors_of(self, found: dict[str, Tensor]) -> Errors:
        return {n: (found[n] - true).abs().max().item() for n, true in self._truth.items()}


def quantities(
    layer: nn.BatchNorm2d, model: nn.Module, x: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    """All that a step computes, on the CPU."""
    x = x.detach().requires_grad_()
    y = model(x)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy, create_graph=True)
    (second,) = torch.autograd.grad(dx, x, dy)
    found = {
        "output": y,
        "input grad": dx,
        "weight grad": dw,
        "bias grad": db,
        "second": second,
        "mean": layer.running_mean,
        "variance": layer.running_var,
    }
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


if __name__ == "__main__":
    sys.exit(main())
