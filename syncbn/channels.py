"""Layout helpers for tensors ``(N, C, ...)``: dtypes, devices, dimensions, strides, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replication.extending import current_stream, is_capturing, to_device

HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


_has_float64: dict[torch.device, bool] = {}


def has_float64(device: torch.device) -> bool:
    """Returns whether a device supports float64. An accelerator is asked once, by computing."""
    if device.type in ("cpu", "cuda", "meta", "mps"):  # a fake tensor of MPS would say yes
        return device.type != "mps"
    if device not in _has_float64:
        try:
            if type(torch.zeros(1, dtype=torch.float64, device=device).sqrt_()) is not Tensor:
                return True  # a fake tensor, whose device is not asked
        except (RuntimeError, TypeError):
            _has_float64[device] = False
        else:
            _has_float64[device] = True
    return _has_float64[device]


def in_float64(tensor: Tensor) -> Tensor:
    """Returns a tensor in float64, on the CPU if its device has no float64."""
    if not has_float64(tensor.device):
        tensor = tensor.cpu()
    return tensor.to(torch.float64)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor.to(dtype)``, in less time for the usual dtypes and if nothing changes."""
    if tensor.dtype == dtype:
        return tensor
    return tensor.float() if dtype == torch.float32 else tensor.to(dtype)


def values_per_channel(x: Tensor) -> int:
    return x.numel() // x.size(1) if x.size(1) else 0


def reduced_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Shapes a vector of length C to broadcast against ``like``, in its accumulation dtype."""
    vector = in_dtype(vector, accumulation_dtype(like.dtype))
    if vector.device != like.device:
        vector = vector.to(like.device)
    return vector.view(1, -1, *[1] * (like.dim() - 2))


def memory_format(x: Tensor) -> torch.memory_format:
    """Returns the memory format of a tensor; contiguous if it is ambiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def with_usual_strides(x: Tensor) -> Tensor:
    """Returns a view of ``x`` with the canonical strides of its memory format, if it has one."""
    # The stride of a dimension of length 1 is arbitrary, but torch's batch norm may infer a
    # wrong memory format from it.
    layout = memory_format(x)
    if not x.numel() or not x.is_contiguous(memory_format=layout):
        return x
    usual = torch.empty_like(x, device="meta", memory_format=layout).stride()
    return x if x.stride() == usual else x.as_strided(x.shape, usual)


def in_format_of(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    return tensor.contiguous(memory_format=memory_format(like))


def on_each(tensor: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Returns copies of a tensor on each of some devices, the same for equal devices."""
    made = {device: to_device(tensor, device) for device in dict.fromkeys(devices)}
    return [made[device] for device in devices]


_constants: dict[Any, Tensor] = {}


def constant_tensor(
    numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    # An accelerator fills it in order of its current stream: a copy from the host would block
    # the host, and is impossible while a CUDA graph is captured.
    key = numbers, device, dtype, current_stream(device)
    tensor = _constants.get(key)
    if tensor is None:
        with torch.inference_mode(False):
            tensor = torch.full((len(numbers),), numbers[0], dtype=dtype, device=device)
            for one, number in zip(tensor, numbers, strict=True):
                if number != numbers[0]:  # most shards have equal sizes
                    one.fill_(number)
        # A fake tensor has no values, and one that is captured has them after the replay only.
        if type(tensor) is Tensor and not is_capturing(device) and len(_constants) < 1000:
            _constants[key] = tensor
    return tensor
