"""The contract of the kernels of `torch.nn.SyncBatchNorm`, computed in float64 on any device.

They stand in for the kernels of accelerators where there are none, and check what callers must not
do.
`syncbn.kernels` has fast ones for the CPU. Tests compare both with these, and these with those of
CUDA where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncbn.channels import accumulation_dtype, memory_format, reduced_dims
from syncbn.kernels import Kernels


def shaped(vector: Tensor | None, like: Tensor, default: float) -> Tensor:
    """Shapes a vector of length C, or the default, to broadcast against ``like``, in float64."""
    if vector is None:
        vector = torch.full((like.size(1),), default, device=like.device)
    return vector.double().view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = reduced_dims(x)
    var = x.double().var(dims, correction=0)
    assert eps > 0  # else the inverse of no deviation is zero
    dtype = accumulation_dtype(x.dtype)
    return x.double().mean(dims).to(dtype), (var + eps).rsqrt().to(dtype)


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    eps: float,
) -> Tensor:
    hat = (x.double() - shaped(mean, x, 0)) * shaped(inverse, x, 0)
    return (hat * shaped(weight, x, 1) + shaped(bias, x, 0)).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    wants_sums: bool,
    wants_dweight: bool,
    wants_dbias: bool,
) -> tuple[Tensor | None, ...]:
    assert dy.is_contiguous(memory_format=memory_format(x))
    dims = reduced_dims(x)
    along_x = (dy.double() * (x.double() - shaped(mean, x, 0))).sum(dims)
    plain = dy.double().sum(dims)
    sums = (plain.to(mean), along_x.to(mean)) if wants_sums else (None, None)
    # Only with a weight does the kernel compute the gradients of parameters.
    dweight = (along_x * inverse).to(weight) if weight is not None and wants_dweight else None
    return *sums, dweight, plain.to(weight) if weight is not None and wants_dbias else None


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    plain: Tensor,
    along_x: Tensor,
    count: Tensor,
) -> Tensor:
    assert dy.is_contiguous(memory_format=memory_format(x))
    assert count.dtype == torch.int32
    total = count.sum()
    s = shaped(inverse, x, 0)
    centered = x.double() - shaped(mean, x, 0)
    dx = (
        dy.double() - shaped(plain, x, 0) / total - centered * s**2 * shaped(along_x, x, 0) / total
    )
    return (dx * s * shaped(weight, x, 1)).to(x.dtype)


def batch_norm_gather_stats_with_counts(
    like: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert counts.dtype == means.dtype == like.dtype
    assert counts.is_meta or (counts > 0).all()
    n, variances = counts.double()[:, None], inverses.double() ** -2 - eps
    total = n.sum()
    mean = (n * means.double()).sum(0) / total
    var = (n * (variances + (means.double() - mean) ** 2)).sum(0) / total
    for running, new in ((running_mean, mean), (running_var, var * total / (total - 1))):
        if running is not None:
            assert running.dtype == like.dtype
            running.copy_((1 - momentum) * running.double() + momentum * new)
    return mean.to(like), (var + eps).rsqrt().to(like)


#: As `syncbn.kernels` has them.
AS_ON_ACCELERATORS = Kernels(
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)

#: By the name of the function of torch.
KERNELS: dict[str, Callable[..., Any]] = {kernel.__name__: kernel for kernel in AS_ON_ACCELERATORS}
