"""Per-device tensor kernels of batch normalization, which know nothing of replicas.

Notation. ``x`` is ``(N, C, ...)``; a channel has ``n = x.numel() / C`` values. Tensors of the
size of ``x``, and vectors of length C next to them, are computed in the *accumulation dtype*:
float64 for float64, float32 for everything else. Mean and variance are
the float64 results of `syncbn.moments`.

Numerical promises
    * A large mean costs no precision: it is subtracted before scaling, in two parts, the mean
      rounded to the accumulation dtype and the rest.
    * Results for float16 and bfloat16 inputs are rounded once.
    * An empty ``x`` is fine everywhere (torch's native kernels crash on it).

Speed. On the CPU, torch's batch norm kernels for evaluation mode are fused and vectorized:
forward is an affine map of each channel, backward two sums over two tensors. The training kernel
is neither, except for channels_last. On CUDA see `syncbn.cuda_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import cuda_kernels, sums
from syncbn.channels import accumulation_dtype, per_channel, with_usual_strides

__all__: list[str] = []


class Center(NamedTuple):
    """The mean of each channel, split in two parts."""

    #: Rounded to the accumulation dtype, on the device of ``x``.
    head: Tensor
    #: The rounding error of `head`, in float64. None if the mean is not large.
    rest: Tensor | None


def center_of(mean: Tensor, x: Tensor, is_large: bool) -> Center:
    """Splits a float64 mean; ``is_large`` is the result of `syncbn.moments.has_large_mean`."""
    head = mean.to(x.device, accumulation_dtype(x.dtype))
    return Center(head, mean - head.to(mean) if is_large else None)


def normalize(
    x: Tensor,
    center: Center,
    var: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Computes ``(x - mean) / sqrt(var + eps) * weight + bias``, in dtype and layout of ``x``."""
    head, rest = center
    var = var.to(head)
    weight, bias = (p if p is None else p.to(head) for p in (weight, bias))
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        return cuda_kernels.normalize(x, head, (var + eps).rsqrt(), weight, bias)
    if rest is None and x.device.type == "cpu":
        return _fused(x, head, var, eps, weight, bias)
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    return _affine(x, center, scale, torch.zeros_like(scale) if bias is None else bias)


def _fused(
    x: Tensor, mean: Tensor, var: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Runs torch's batch norm in evaluation mode: one fused affine map of each channel.

    It computes ``x * scale + (bias - mean * scale)``, which is precise unless the mean is large.
    """
    args = (x, weight, bias, mean, var, False, 0.0, eps)
    return torch.ops.aten.native_batch_norm(*args)[0]  # type: ignore[no-any-return]


def _affine(
    x: Tensor,
    center: Center,
    scale: Tensor,
    shift: Tensor,
    dy: Tensor | None = None,
    along: Tensor | None = None,
) -> Tensor:
    """Computes ``(x - mean) * scale + shift + dy * along``, in dtype and layout of ``x``."""
    x = with_usual_strides(x)  # the result inherits them
    if x.dtype == center.head.dtype or x.numel() <= sums.BLOCK:
        return _in_one_piece(x, center, scale, shift, dy, along).to(x.dtype)
    # In blocks of samples: the upcast of all of x would be twice its size and leave the cache.
    y, length = torch.empty_like(x), max(1, sums.BLOCK // x[0].numel())
    samples = range(0, len(x), length)
    for block in (slice(first, first + length) for first in samples):
        dy_block = None if dy is None else dy[block]
        y[block] = _in_one_piece(x[block], center, scale, shift, dy_block, along)
    return y


def _in_one_piece(
    x: Tensor,
    center: Center,
    scale: Tensor,
    shift: Tensor,
    dy: Tensor | None,
    along: Tensor | None,
) -> Tensor:
    """Computes `_affine` for a whole tensor, in the accumulation dtype."""
    head, rest = center
    if rest is not None:
        shift = shift - rest.to(scale) * scale
        y = (x - per_channel(head, x)).mul_(per_channel(scale, x)).add_(per_channel(shift, x))
    elif x.device.type == "cpu":
        y = _fused(x.to(head.dtype), head, torch.ones_like(head), 0.0, scale, shift)
    else:
        y = x.to(head.dtype, copy=True).mul_(per_channel(scale, x))
        y.add_(per_channel(shift - head * scale, x))
    return y if dy is None or along is None else y.addcmul_(dy.to(y.dtype), per_channel(along, y))


def reduce(
    dy: Tensor, x: Tensor, center: Center, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes the sums of ``dy * x_hat`` and of ``dy``, in the accumulation dtype.

    ``x_hat`` is ``(x - mean) / sqrt(var + eps)``.
    """
    head, rest = center
    var = var.to(head)
    if x.numel() == 0:
        return torch.zeros_like(head), torch.zeros_like(head)
    if x.is_cuda:
        return cuda_kernels.reduce(dy, x, head, (var + eps).rsqrt())
    along_x, plain = sums.in_backward(dy, x, head, var, eps)
    if rest is not None:
        along_x -= rest.to(head) * (var + eps).rsqrt() * plain
    return along_x, plain


def input_gradient(
    dy: Tensor | None,
    x: Tensor,
    center: Center,
    scale: Tensor | None,
    slope: Tensor,
    offset: Tensor,
) -> Tensor:
    """Computes ``scale * dy + slope * (x - mean) + offset``, in the dtype and layout of ``x``.

    ``dy`` is None if the output is unused. ``scale`` may then be None.
    """
    head = center.head
    slope, offset = slope.to(head), offset.to(head)
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda and dy is not None and scale is not None:
        return cuda_kernels.input_gradient(dy, x, head, scale.to(head), slope, offset)
    return _affine(x, center, slope, offset, dy, scale)
