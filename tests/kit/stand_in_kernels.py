"""The contract of the kernels of `torch.nn.SyncBatchNorm`, computed in float64 on any device.

They stand in for the kernels of accelerators where there are none, and then refuse what those of
CUDA refuse (see `refusing`).
`syncbn.kernels` has fast ones for the CPU. Tests compare both with these, and these with those of
CUDA where there is a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
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
    if is_channels_last(dy) and is_channels_last(x):  # where CUDA does not look at what is wanted
        wants_sums = wants_dweight = wants_dbias = True
    elif weight is None and (wants_dweight or wants_dbias):
        raise RuntimeError("tensor does not have a device")
    sums = (plain.to(mean), along_x.to(mean)) if wants_sums else (None, None)
    if weight is None:
        dweight = dbias = mean.new_empty(0)
    else:
        dweight, dbias = (along_x * inverse).to(weight), plain.to(weight)
    return *sums, dweight if wants_dweight else None, dbias if wants_dbias else None


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
    assert counts.is_meta or (counts > 0).all()
    n, variances = counts.double()[:, None], inverses.double() ** -2 - eps
    total = n.sum()
    mean = (n * means.double()).sum(0) / total
    var = (n * (variances + (means.double() - mean) ** 2)).sum(0) / total
    for running, new in ((running_mean, mean), (running_var, var * total / (total - 1))):
        if running is not None:
            running.copy_((1 - momentum) * running.double() + momentum * new)
    return mean.to(means), (var + eps).rsqrt().to(means)


# -- what CUDA refuses -------------------------------------------------------------------------


def is_channels_last(x: Tensor) -> bool:
    """Whether CUDA has other kernels for a tensor than for contiguous ones: also for (N, C)."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last):
        return True
    return x.is_contiguous() and x.stride(1) == 1


def refusing(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel that takes the dtypes and shapes that CUDA takes, by names of arguments."""
    signature = inspect.signature(kernel)
    check = check_merge if "counts" in signature.parameters else check_shard

    @wraps(kernel)
    def checked(*args: Any) -> Any:
        check(**signature.bind(*args).arguments)
        return kernel(*args)

    return checked


def check_shard(x: Tensor, **others: Any) -> None:
    dtype, shape = accumulation_dtype(x.dtype), (x.size(1),)
    assert x.is_floating_point()
    assert x.numel()  # no valid launch configuration
    tensors = {name: t for name, t in others.items() if isinstance(t, Tensor)}
    if "dy" in tensors:
        dy = tensors.pop("dy")
        assert (dy.dtype, dy.shape) == (x.dtype, x.shape)
    if "count" in tensors:
        assert tensors.pop("count").dtype == torch.int32
        may_be_half = is_channels_last(x) and is_channels_last(dy)
    else:
        may_be_half = True
    parameters = [tensors.pop(name) for name in ("weight", "bias") if name in tensors]
    dtypes = {p.dtype for p in parameters}
    assert dtypes in (set(), {dtype}, {x.dtype if may_be_half else dtype})
    assert all(t.shape == shape for t in (*parameters, *tensors.values()))
    assert all(t.dtype == dtype for t in tensors.values())


def check_merge(
    like: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    counts: Tensor,
    **others: Any,
) -> None:
    dtype = like.dtype if running_mean is None else running_mean.dtype
    buffers = [t for t in (running_mean, running_var) if t is not None]
    assert {t.dtype for t in (counts, *buffers)} == {dtype}
    assert means.dtype == inverses.dtype == accumulation_dtype(dtype)
    assert means.shape == inverses.shape == (len(counts), means.size(-1))
    assert all(t.shape == means.shape[1:] for t in buffers)


#: By the name of the function of torch.
KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: refusing(kernel)
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
}

#: As `syncbn.kernels` has them.
AS_ON_ACCELERATORS = Kernels(*KERNELS.values())
