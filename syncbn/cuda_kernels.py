"""The kernels of `syncbn.kernels` on CUDA: the fused kernels of torch's synchronized batch norm.

They read and write each tensor once in its own dtype, compute in the accumulation dtype, subtract
the mean before they scale, and support contiguous and channels_last inputs. ``x`` is never empty
here. The moments have float32 precision (Welford's algorithm).

No kernel here makes the host wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncbn.channels import memory_format

__all__: list[str] = []


#: Too small to change any float32 variance, but not zero, which the kernel treats differently.
_TINY = 1e-30


def moments(x: Tensor) -> Tensor:
    """Computes `syncbn.moments.moments`."""
    mean, inverse = torch.batch_norm_stats(x, _TINY)
    var = inverse.double().square_().reciprocal_().sub_(_TINY)
    return torch.stack((mean.double(), var.clamp_(min=0)))


def normalize(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Computes ``(x - mean) * inverse * weight + bias``, with vectors in accumulation dtype."""
    # The last argument is eps, which only some kernels use.
    return torch.batch_norm_elemt(x, weight, bias, mean, inverse, 0.0)


def reduce(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `syncbn.kernels.reduce`."""
    plain, along_x, _, _ = torch.batch_norm_backward_reduce(
        *(_like(dy, x), x, mean, inverse, None, True, False, False)
    )
    return along_x * inverse, plain


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """Computes `syncbn.kernels.input_gradient`."""
    # The kernel has (dy - sum_dy / count - (x - mean) * inverse^2 * sum_dy_xmu / count) * inverse
    # * weight. With a count and an inverse of one this is the formula above. Where the scale is
    # zero it is zero in all replicas, and so are slope and offset.
    one = torch.ones_like(mean)
    count = torch.ones(1, dtype=torch.int32, device=x.device)
    over = torch.where(scale == 0, torch.zeros_like(scale), scale.reciprocal())
    return torch.batch_norm_backward_elemt(
        *(_like(dy, x), x, mean, one, scale, -offset * over, -slope * over, count)
    )


def _like(dy: Tensor, x: Tensor) -> Tensor:
    """Returns ``dy`` in the memory format of ``x``, which the kernels assume."""
    return dy.contiguous(memory_format=memory_format(x)).to(x.dtype)
