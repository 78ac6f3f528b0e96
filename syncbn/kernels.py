"""Per-device tensor kernels of batch normalization. Torch only; they know no replicas.

Notation. ``x`` is ``(N, C, ...)``; a channel has ``n = x.numel() / C`` values. What has the size
of ``x`` is computed in the *accumulation dtype*: float64 for float64, float32 for everything else;
so are vectors of length C next to it. Mean and variance are those of `syncbn.moments`, in
float64.

Numerical promises
    * Nothing suffers from a large mean: where it is large, ``x - mean`` is formed before it is
      scaled, and the mean enters in two parts, its rounding to the accumulation dtype and what is
      left.
    * What is made of float16 and bfloat16 inputs is rounded once.
    * An empty ``x`` is fine everywhere (torch's native kernels crash on it).

Speed. On the CPU the kernels of torch's batch norm in evaluation mode are fused and vectorized:
forward is an affine map of each channel, backward two sums over two tensors. Its training kernel
is neither, unless the channels are last. On CUDA see `syncbn.cuda_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import cuda_kernels, sums
from syncbn.channels import accumulation_dtype, per_channel, with_usual_strides

__all__: list[str] = []


class Center(NamedTuple):
    """The mean of each channel, as the kernels take it."""

    #: Rounded to the accumulation dtype, on the device of ``x``.
    head: Tensor
    #: What is left, in float64; None where it does not matter, as the mean is not large.
    rest: Tensor | None


def center_of(mean: Tensor, x: Tensor, is_large: bool) -> Center:
    """What the kernels take of a mean in float64; for ``is_large`` see
    `syncbn.moments.has_large_mean`."""
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
    """``(x - mean) / sqrt(var + eps) * weight + bias``, in the dtype and layout of ``x``."""
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
    """What torch's batch norm does in evaluation mode: an affine map of each channel, in one go.

    It is ``x * scale + (bias - mean * scale)``, which wants a mean that is not large.
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
    """``(x - mean) * scale + shift``, plus ``dy * along``, in the dtype and layout of ``x``."""
    x = with_usual_strides(x)  # which the result has then, for torch's kernels elsewhere
    if x.dtype == center.head.dtype or x.numel() <= sums.BLOCK:
        return _in_one_piece(x, center, scale, shift, dy, along).to(x.dtype)
    # By samples: as a whole it would be twice as large as x, and out of the cache.
    y, length = torch.empty_like(x), max(1, sums.BLOCK // x[0].numel())
    samples = range(0, len(x), length)
    for own in (slice(first, first + length) for first in samples):
        part = None if dy is None else dy[own]
        y[own] = _in_one_piece(x[own], center, scale, shift, part, along)
    return y


def _in_one_piece(
    x: Tensor,
    center: Center,
    scale: Tensor,
    shift: Tensor,
    dy: Tensor | None,
    along: Tensor | None,
) -> Tensor:
    """As `_affine`, in the accumulation dtype."""
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
    """The two sums of the backward pass, in the accumulation dtype: of ``dy * x_hat``, with
    ``x_hat = (x - mean) / sqrt(var + eps)``, and of ``dy``."""
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
    """``scale * dy + slope * (x - mean) + offset``, in the dtype and layout of ``x``.

    ``dy`` is None where an output is unused; then ``scale`` is not needed.
    """
    head = center.head
    slope, offset = slope.to(head), offset.to(head)
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda and dy is not None and scale is not None:
        return cuda_kernels.input_gradient(dy, x, head, scale.to(head), slope, offset)
    return _affine(x, center, slope, offset, dy, scale)
