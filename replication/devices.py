"""Devices: the only module that distinguishes CPU, CUDA and other accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from replication._torch import has_kernels
from replication.checks import check_list, is_int

#: Types of devices that are always there, and have neither indices nor streams.
_WITHOUT_MODULE = ("cpu", "meta")

_CPU_HINT = 'use "cpu" for the CPU, and device_ids=["cpu", "cpu"] for two replicas on it'

_CPU = torch.device("cpu")

DeviceLike = int | str | torch.device


def accelerator() -> str | None:
    """Returns the type of this machine's accelerator, for which indices stand, or None."""
    # Asked first, because torch 2.6 raises an error for the current one where there is none.
    device = torch.accelerator.current_accelerator() if torch.accelerator.device_count() else None
    return None if device is None else device.type


def device_count(kind: str) -> int:
    """Returns the number of accelerators of one type, 0 if torch has no module for it."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    return int(getattr(module, "device_count", int)())


def parse_device(device: DeviceLike) -> torch.device:
    """Makes a `torch.device` of this machine, with an index if it is an accelerator."""
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"{device!r} is not a device of torch; {_CPU_HINT}") from error
    elif is_int(device):
        if device == -1:  # torch's own spelling of the CPU as an output device
            return _CPU
        kind = accelerator()
        if kind is None or device < 0:
            raise ValueError(f"this machine has no accelerator of index {device}; {_CPU_HINT}")
        device = torch.device(kind, int(device))
    elif not isinstance(device, torch.device):
        raise TypeError(f"a device is an int, a str or a torch.device (got {device!r})")
    if device.type in _WITHOUT_MODULE:
        return _CPU if device.type == "cpu" else device
    if (device.index or 0) >= device_count(device.type):
        raise ValueError(f"this machine has no device {str(device)!r}; {_CPU_HINT}")
    if device.index is not None:
        return device
    # MPS has a single device, and no function for the current one.
    current = getattr(torch.get_device_module(device), "current_device", int)
    return torch.device(device.type, current())


def parse_devices(devices: Sequence[DeviceLike]) -> list[torch.device]:
    check_list("devices", devices)
    return list(map(parse_device, devices))


def default_devices() -> list[torch.device]:
    kind = accelerator()
    return [] if kind is None else [torch.device(kind, i) for i in range(device_count(kind))]


def device_of(replica: nn.Module) -> torch.device | None:
    """Returns the device of a replica's first parameter, buffer or other tensor, or None."""
    # From the dictionaries, because `parameters()` is empty on replicas. Attributes come last,
    # because torch's replicas do not move them.
    for name in ("_former_parameters", "_parameters", "_buffers", None):
        for module in replica.modules():
            attributes = vars(module) if name is None else vars(module).get(name) or {}
            for value in attributes.values():
                if isinstance(value, Tensor):
                    return value.device
    return None


def current_stream(device: torch.device) -> Any:
    """Returns the current stream of this thread on ``device``, or None if it has no streams."""
    # As a `torch.Stream`, which takes a third of the time of a `torch.cuda.Stream`.
    return torch.accelerator.current_stream(device) if _has_streams(device.type) else None


@lru_cache
def _has_streams(kind: str) -> bool:
    module = None if kind in _WITHOUT_MODULE else torch.get_device_module(kind)
    # `use_device` needs both of them.
    return hasattr(module, "current_stream") and hasattr(module, "stream")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is recorded for later, as in a CUDA graph."""
    module = None if device.type in _WITHOUT_MODULE else torch.get_device_module(device.type)
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and asks()


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


def use_streams(streams: Streams) -> AbstractContextManager[object]:
    """Makes streams, but no device, current until the end of a ``with`` block inside a node."""
    # Autograd orders only the stream of the node's own device, the current one, with the nodes
    # before and after. So the others wait for it, and it waits for them.
    stack = ExitStack()
    if streams:
        kind = next(iter(streams)).type  # the only one: a process has one type of accelerator
        module = torch.get_device_module(kind)
        node = torch.device(kind, module.current_device())
        of_node = current_stream(node)
        for device, stream in streams.items():
            if stream != of_node:
                stream.wait_stream(of_node)
                stack.callback(of_node.wait_stream, stream)
            if current_stream(device) != stream:
                stack.enter_context(module.stream(stream))
                stack.enter_context(module.device(node))
    return stack


def record_stream(tensor: Tensor, stream: Any) -> None:
    """Keeps the memory of a tensor until a stream has read it, where the backend needs that."""
    if has_kernels(tensor.device.type, "record_stream"):
        tensor.record_stream(stream)


def to_device(tensor: Any, device: torch.device) -> Any:
    """Copies a tensor to a device. The host waits only for copies to the CPU, and to MPS."""
    # MPS reads the memory of the host later, when it may be freed.
    return tensor.to(device, non_blocking=device.type not in ("cpu", "mps"))


def current_device() -> torch.device:
    """This thread's current device: an accelerator's, if there is one."""
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def use_device(stack: ExitStack, device: torch.device, stream: Any) -> None:
    """Makes ``device`` and ``stream`` current, if they are not, until ``stack`` is closed."""
    if device.type not in _WITHOUT_MODULE:
        module = torch.get_device_module(device)
        if hasattr(module, "device") and module.current_device() != device.index:
            stack.enter_context(module.device(device))
        if stream is not None and current_stream(device) != stream:
            stack.enter_context(module.stream(stream))
