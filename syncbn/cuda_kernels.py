"""The kernels of `syncbn.kernels` on CUDA: those of torch's own synchronized batch norm, fused.

They read and write each tensor once and in its own dtype, compute in the accumulation dtype, form
``x - mean`` before they scale it, and know contiguous and channels_last inputs. ``x`` is never
empty here. The moments have what float32 leaves of a mean: their kernel adds by Welford's rule.

No kernel here makes the host wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from syncbn.channels import memory_format

__all__: list[str] = []


#: Lost beside any variance that float32 has, and not zero, for which the kernel has another rule.
_TINY = 1e-30


def moments(x: Tensor) -> Tensor:
    """As `syncbn.moments.moments`."""
    mean, inverse = torch.batch_norm_stats(x, _TINY)
    var = inverse.double().square_().reciprocal_().sub_(_TINY)
    return torch.stack((mean.double(), var.clamp_(min=0)))


def normalize(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """``(x - mean) * inverse * weight + bias``; the vectors are in the accumulation dtype."""
    # The last argument is what was added to the variance, for kernels that want to know.
    return torch.batch_norm_elemt(x, weight, bias, mean, inverse, 0.0)


def reduce(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """As `syncbn.kernels.reduce`."""
    plain, along_x, _, _ = torch.batch_norm_backward_reduce(
        *(_alike(dy, x), x, mean, inverse, None, True, False, False)
    )
    return along_x * inverse, plain


def input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """As `syncbn.kernels.input_gradient`."""
    # The kernel has (dy - sum_dy / count - (x - mean) * inverse^2 * sum_dy_xmu / count) * inverse
    # * weight. With a count and an inverse of one that is ours, but where the scale is zero: it is
    # so in all replicas then, and their sums, to which slope and offset belong, are zero, too.
    one = torch.ones_like(mean)
    count = torch.ones(1, dtype=torch.int32, device=x.device)
    over = torch.where(scale == 0, torch.zeros_like(scale), scale.reciprocal())
    return torch.batch_norm_backward_elemt(
        *(_alike(dy, x), x, mean, one, scale, -offset * over, -slope * over, count)
    )


def _alike(dy: Tensor, x: Tensor) -> Tensor:
    """``dy`` in the memory format of ``x``: the kernels walk both in one way."""
    return dy.contiguous(memory_format=memory_format(x)).to(x.dtype)
