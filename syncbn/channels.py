"""A tensor ``(N, C, ...)`` as its C channels: what they have, and how they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def statistics_device(device: torch.device) -> torch.device:
    """Where the per-channel quantities are of what is on ``device``."""
    return device if has_float64(device) else torch.device("cpu")


def values_per_channel(x: Tensor) -> int:
    """How many values each channel has."""
    return x.numel() // x.size(1) if x.size(1) else 0


def reduced_dims(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, x.dim())]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Shapes a vector of length C so that it broadcasts against ``like``, in its computations."""
    vector = vector.to(like.device, accumulation_dtype(like.dtype))
    return vector.view(1, -1, *[1] * (like.dim() - 2))


def memory_format(x: Tensor) -> torch.memory_format:
    """That of a tensor; contiguous if it has more than one, or none."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def with_usual_strides(x: Tensor) -> Tensor:
    """A view of ``x`` that has the strides of its memory format where a dimension has length 1,
    too: what they are says nothing there, but torch's batch norm takes them for another format."""
    layout = memory_format(x)
    if 1 not in x.shape or not x.is_contiguous(memory_format=layout):
        return x
    usual = torch.empty_like(x, device="meta", memory_format=layout).stride()
    return x if x.stride() == usual else x.as_strided(x.shape, usual)
