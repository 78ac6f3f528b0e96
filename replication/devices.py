"""Devices: the only module that distinguishes CPU, CUDA and other accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from replication.errors import is_int

#: Types of accelerators, for torch before 2.6, which has no `torch.accelerator`.
_ACCELERATORS = ("cuda", "xpu", "mps")

#: Types of devices that are always there, and have neither indices nor streams.
_WITHOUT_MODULE = ("cpu", "meta")

_CPU_HINT = 'use "cpu" for the CPU, and device_ids=["cpu", "cpu"] for two replicas on it'

_CPU = torch.device("cpu")

DeviceLike = int | str | torch.device


def accelerator() -> str | None:
    """Returns the type of this machine's accelerator, for which indices stand, or None."""
    kinds: Iterable[str] = _ACCELERATORS
    if hasattr(torch, "accelerator"):
        device = torch.accelerator.current_accelerator()
        kinds = () if device is None else (device.type,)
    return next(filter(device_count, kinds), None)


def device_count(kind: str) -> int:
    """Returns the number of accelerators of one type, 0 if torch has no module for it."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(getattr(module, "device_count", int)())


def parse_device(device: DeviceLike) -> torch.device:
    """Makes a `torch.device` from an index, a string or a device. Accelerators get an index."""
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"{device!r} is not a device of torch; {_CPU_HINT}") from error
    elif not isinstance(device, torch.device):
        return _device_of_index(device)
    if device.type == "cpu":
        return _CPU
    if device.index is None and device_count(device.type):
        # MPS has a single device, and no function for the current one.
        current = getattr(module_of(device), "current_device", int)
        return torch.device(device.type, current())
    return device


def _device_of_index(index: object) -> torch.device:
    if not is_int(index):
        raise TypeError(f"a device is an int, a str or a torch.device (got {index!r})")
    if index == -1:  # torch's own spelling of the CPU as an output device
        return _CPU
    kind = accelerator()
    if kind is None:
        raise ValueError(
            f"device {index} is the index of an accelerator, but there is none; {_CPU_HINT}"
        )
    return torch.device(kind, int(index))


def parse_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """Parses a list of devices, which may contain a device several times."""
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f"expected a list of devices (got {devices!r})")
    return [device if device == _CPU else parse_device(device) for device in devices]


def usable_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    """Parses a list of devices, and raises ValueError unless replicas can run on each."""
    parsed = parse_devices(devices)
    for device in dict.fromkeys(parsed):
        check_available(device)
    return parsed


def check_available(device: torch.device) -> None:
    """Raises ValueError if replicas cannot run on ``device`` on this machine."""
    if device.type not in _WITHOUT_MODULE and (device.index or 0) >= device_count(device.type):
        raise ValueError(f"this machine has no device {str(device)!r}; {_CPU_HINT}")


def default_devices() -> list[torch.device]:
    """Returns all accelerators of this machine."""
    kind = accelerator()
    return [] if kind is None else [torch.device(kind, i) for i in range(device_count(kind))]


def module_of(device: torch.device) -> Any:
    """Returns the module of torch for a device, such as `torch.cuda`."""
    return torch.get_device_module(device)


def device_of(replica: nn.Module) -> torch.device | None:
    """Returns the device of a replica's first parameter, buffer or other tensor, or None."""
    # Not `parameters()`, which is empty on replicas. Attributes come last, because torch's
    # replicas do not move them.
    for name in ("_former_parameters", "_parameters", "_buffers", None):
        for module in replica.modules():
            attributes = vars(module) if name is None else vars(module).get(name) or {}
            for value in attributes.values():
                if isinstance(value, Tensor):
                    return value.device
    return None


def current_stream(device: torch.device) -> Any:
    """Returns the current stream of this thread on ``device``, or None if it has no streams."""
    if device.type in _WITHOUT_MODULE:
        return None
    module = module_of(device)
    # `use_device` needs both of them.
    has_streams = hasattr(module, "current_stream") and hasattr(module, "stream")
    return module.current_stream(device) if has_streams else None


Streams = dict[torch.device, Any]


def current_streams(devices: Iterable[torch.device]) -> Streams:
    """Returns the current streams of this thread, for `use_streams` in a backward."""
    # None for a single device: autograd sets the stream of a node's own device, and only this
    # one. So a node that touches other devices must set theirs.
    distinct = set(devices)
    if len(distinct) == 1:
        return {}
    streams = {device: current_stream(device) for device in distinct}
    return {device: stream for device, stream in streams.items() if stream is not None}


def use_streams(streams: Streams) -> AbstractContextManager[None]:
    """Makes streams, but no device, current in a ``with`` block inside an autograd node."""
    # Autograd orders only the stream of the node's own device, the current one, with the nodes
    # before and after. So the others wait for it, and it waits for them.
    return _using(streams) if streams else nullcontext()


@contextmanager
def _using(streams: Streams) -> Iterator[None]:
    with ExitStack() as stack:
        for device, stream in streams.items():
            module = module_of(device)
            current = module.current_device()
            of_node = module.current_stream(current)
            if stream != of_node:
                stream.wait_stream(of_node)
                stack.callback(of_node.wait_stream, stream)
            stack.enter_context(module.stream(stream))
            stack.enter_context(module.device(current))
        yield


def to_device(tensor: Any, device: torch.device) -> Any:
    """Copies a tensor to a device. The host waits only for copies to the CPU."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class use_device(ExitStack):
    """Makes ``device`` and ``stream`` current in a ``with`` block, where the backend has both."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __enter__(self) -> use_device:
        if self._device.type not in _WITHOUT_MODULE:
            module = module_of(self._device)
            if hasattr(module, "device"):
                self.enter_context(module.device(self._device))
            if self._stream is not None:
                self.enter_context(module.stream(self._stream))
        return self
