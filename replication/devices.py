"""Devices: the only module that distinguishes CPU, CUDA and other accelerators."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

__all__: list[str] = []


def is_int(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_list(name: str, items: object) -> None:
    """Raises TypeError if ``items`` is not a list: a mapping or a generator, for example."""
    if isinstance(items, (Mapping, str)) or not (
        hasattr(items, "__len__") and hasattr(items, "__getitem__")
    ):
        raise TypeError(
            f"{name} must be a list with one item per replica (got {type(items).__name__})"
        )


def check_module(value: object) -> None:
    """Raises TypeError if ``value`` is not a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"expected a torch.nn.Module (got {type(value).__name__})")


def checked_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns a list of names as a tuple.

    Raises:
        TypeError: ``names`` is not a list of names, but a single name, say.
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a list of names (got {names!r})")
    result = tuple(names)
    if not all(isinstance(name, str) for name in result):
        raise TypeError(f"{argument} must be a list of names (got {list(result)})")
    return result


_ACCELERATORS = ("cuda", "xpu", "mps")

_CPU_HINT = 'use "cpu" for the CPU, and device_ids=["cpu", "cpu"] for two replicas on it'

#: The ways to write a device.
DeviceLike = int | str | torch.device


def accelerator() -> str | None:
    """Returns the type of this machine's accelerator, or None."""
    available = (kind for kind in _ACCELERATORS if torch.get_device_module(kind).device_count())
    return next(available, None)


def parse_device(device: DeviceLike) -> torch.device:
    """Makes a `torch.device` from an index, a string or a device. Accelerators get an index.

    Raises:
        TypeError: ``device`` is none of these.
        ValueError: It is an index on a machine without accelerator, or not the name of a device.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"{device!r} is not a device of torch; {_CPU_HINT}") from error
    elif not isinstance(device, torch.device):
        return _device_of_index(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and device.type == accelerator():
        # There is a single MPS device, and torch has no function for the current one.
        index = 0 if device.type == "mps" else module_of(device).current_device()
        return torch.device(device.type, index)
    return device


def _device_of_index(index: object) -> torch.device:
    if not is_int(index):
        raise TypeError(f"a device is an int, a str or a torch.device (got {index!r})")
    if index == -1:  # torch's own spelling of the CPU as an output device
        return torch.device("cpu")
    kind = accelerator()
    if kind is None:
        raise ValueError(
            f"device {index} is the index of an accelerator, and this machine has none; "
            + _CPU_HINT
        )
    return torch.device(kind, int(index))


def parse_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """Parses a list of devices, which may contain a device several times.

    Raises:
        TypeError: ``devices`` is not a list of devices.
    """
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f"expected a list of devices (got {devices!r})")
    return [parse_device(device) for device in devices]


def usable_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """Parses a list of devices for replicas.

    Raises:
        TypeError: ``devices`` is not a list of devices.
        ValueError: Replicas cannot run on one of them.
    """
    parsed = parse_devices(devices)
    for device in parsed:
        check_available(device)
    return parsed


def device_order(devices: Sequence[DeviceLike]) -> list[int]:
    """Returns the replicas, sorted by the index of their device. The sort is stable."""
    parsed = parse_devices(devices)
    return sorted(range(len(parsed)), key=lambda i: (parsed[i].type, parsed[i].index or 0))


def check_available(device: torch.device) -> None:
    """Raises ValueError if replicas cannot run on ``device`` on this machine."""
    if device.type not in ("cpu", *_ACCELERATORS, "meta"):
        raise ValueError(
            f"replicas run on devices of CPU, CUDA, XPU, MPS or meta (got {str(device)!r})"
        )
    if device.type in _ACCELERATORS and (
        device.type != accelerator() or (device.index or 0) >= module_of(device).device_count()
    ):
        raise ValueError(f"this machine has no device {str(device)!r}; {_CPU_HINT}")


def default_devices() -> list[torch.device]:
    """Returns all accelerators of this machine."""
    kind = accelerator()
    if kind is None:
        return []
    return [torch.device(kind, i) for i in range(module_of(torch.device(kind)).device_count())]


def module_of(device: torch.device) -> Any:
    """Returns the module of torch for a device, such as `torch.cuda`."""
    return torch.get_device_module(device)


def device_of(replica: nn.Module) -> torch.device | None:
    """Returns the device of a replica's first parameter or buffer.

    Without any, it is the device of a tensor in a plain attribute, which torch's replicas do not
    move. ``parameters()`` would not do, because it is empty on replicas.
    """
    for name in ("_former_parameters", "_parameters", "_buffers", None):
        for module in replica.modules():
            attributes = vars(module) if name is None else vars(module).get(name) or {}
            for value in attributes.values():
                if isinstance(value, Tensor):
                    return value.device
    return None


def current_stream(device: torch.device) -> Any:
    """Returns the current stream of this thread on ``device``, or None if it has no streams."""
    if device.type in ("cpu", "mps", "meta"):
        return None
    return module_of(device).current_stream(device)


def to_device(tensor: Any, device: torch.device) -> Any:
    """Copies a tensor to a device. The host waits only for copies to the CPU."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class _InUse(threading.local):
    device: torch.device | None = None


_in_use = _InUse()


def device_in_use() -> torch.device | None:
    """Returns the device of the innermost `use_device` of this thread, which may be the CPU."""
    return _in_use.device


class use_device(ExitStack):
    """Makes ``device`` and ``stream`` current in a ``with`` block, on any type of device."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __enter__(self) -> use_device:
        if self._stream is not None:
            module = module_of(self._device)
            self.enter_context(module.device(self._device))
            self.enter_context(module.stream(self._stream))
        self.callback(setattr, _in_use, "device", _in_use.device)
        _in_use.device = self._device
        return self


def are_distinct_cuda(devices: Sequence[torch.device]) -> bool:
    """Whether all devices are CUDA devices and differ, as torch's broadcast requires."""
    return all(d.type == "cuda" for d in devices) and len(set(devices)) == len(devices)
