"""The one place that tells CPU, CUDA and other accelerators apart."""

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
    """Whether this is a whole number, such as one of NumPy's, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_list(name: str, items: object) -> None:
    """Raises TypeError if ``items`` is not a list, such as a mapping or a generator."""
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
    """Makes a tuple of a list of names.

    Raises:
        TypeError: ``names`` is not a list of names. A single name is not one either.
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a list of names (got {names!r})")
    found = tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a list of names (got {list(found)})")
    return found


_ACCELERATORS = ("cuda", "xpu", "mps")

_CPU_HINT = 'the CPU is spelled "cpu", and two replicas on it device_ids=["cpu", "cpu"]'

#: What users may write for a device.
DeviceLike = int | str | torch.device


def accelerator() -> str | None:
    """The type of this machine's accelerator, or None."""
    available = (kind for kind in _ACCELERATORS if torch.get_device_module(kind).device_count())
    return next(available, None)


def parse_device(device: DeviceLike) -> torch.device:
    """Makes a `torch.device` of an index, a string or a device; accelerators get their index.

    Raises:
        TypeError: ``device`` is none of these.
        ValueError: An index where there is no accelerator, or no name of a device.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"{device!r} names no device of torch's; {_CPU_HINT}") from error
    elif not isinstance(device, torch.device):
        return _device_of_index(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and device.type == accelerator():
        one_alone = device.type == "mps"  # of which torch does not say which is current
        return torch.device(device.type, 0 if one_alone else module_of(device).current_device())
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
    """Parses a list of devices, which may repeat.

    Raises:
        TypeError: Not a list of devices.
    """
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f"expected a list of devices (got {devices!r})")
    return [parse_device(device) for device in devices]


def usable_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """Parses a list of devices that replicas are to run on.

    Raises:
        TypeError: Not a list of devices.
        ValueError: One is not there.
    """
    parsed = parse_devices(devices)
    for device in parsed:
        check_available(device)
    return parsed


def device_order(devices: Sequence[DeviceLike]) -> list[int]:
    """The replicas in the order of their devices' indices; on one device they keep theirs."""
    parsed = parse_devices(devices)
    return sorted(range(len(parsed)), key=lambda i: (parsed[i].type, parsed[i].index or 0))


def check_available(device: torch.device) -> None:
    """Raises ValueError if ``device`` is one that replicas cannot run on here."""
    if device.type not in ("cpu", *_ACCELERATORS, "meta"):
        raise ValueError(
            f"replicas run on devices of CPU, CUDA, XPU, MPS or meta (got {str(device)!r})"
        )
    if device.type in _ACCELERATORS and (
        device.type != accelerator() or (device.index or 0) >= module_of(device).device_count()
    ):
        raise ValueError(f"this machine has no device {str(device)!r}; {_CPU_HINT}")


def default_devices() -> list[torch.device]:
    """All accelerators of this machine, none where there is none."""
    kind = accelerator()
    if kind is None:
        return []
    return [torch.device(kind, i) for i in range(module_of(torch.device(kind)).device_count())]


def module_of(device: torch.device) -> Any:
    """`torch.cuda` for a CUDA device, and so on."""
    return torch.get_device_module(device)


def device_of(replica: nn.Module) -> torch.device | None:
    """The device of a replica's first parameter or buffer, or else of a tensor that it has as an
    attribute, which torch's own replicas do not move; replicas have no ``parameters()``."""
    for name in ("_former_parameters", "_parameters", "_buffers", None):
        for module in replica.modules():
            held = vars(module) if name is None else vars(module).get(name) or {}
            for value in held.values():
                if isinstance(value, Tensor):
                    return value.device
    return None


def current_stream(device: torch.device) -> Any:
    """The stream that the calling thread uses on ``device``; None where there are no streams."""
    if device.type in ("cpu", "mps", "meta"):
        return None
    return module_of(device).current_stream(device)


def to_device(tensor: Any, device: torch.device) -> Any:
    """``tensor.to(device)``, without making the host wait where that is safe: not for the CPU."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class _InUse(threading.local):
    device: torch.device | None = None


_in_use = _InUse()


def device_in_use() -> torch.device | None:
    """The device of the innermost `use_device` of this thread; torch's own is never the CPU."""
    return _in_use.device


class use_device(ExitStack):
    """Makes ``device`` and ``stream`` current, as `torch.cuda.device` and `torch.cuda.stream`."""

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
    """Whether torch's own broadcast applies: CUDA devices only, none of them twice."""
    return all(d.type == "cuda" for d in devices) and len(set(devices)) == len(devices)
