"""Sums over the values of each channel, which may be millions.

torch's kernels add the values of a sample (with channels_last, of all samples) one by one, which
loses digits. For moments, the values are cut into runs or rows that torch sees as separate
channels, and the sums of the runs are added in float64. In backward only ``dy`` is added with such
care, because all its values may be equal. float16 and bfloat16 values are summed in float32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from syncbn.channels import (
    accumulation_dtype,
    memory_format,
    per_channel,
    reduced_dims,
    statistics_device,
    values_per_channel,
    with_usual_strides,
)

__all__: list[str] = []


#: The number of values that stay in the cache between two passes of a kernel.
BLOCK = 2**19

#: The number of values per channel that may be added one by one if that saves operations.
_FEW = 2**13

#: The length of a run of a channel that has more values than `_FEW`. A quarter of it for 3D.
_RUN = 2**9

#: The number of values of a gradient, possibly equal, that may be added one by one.
_FEW_EQUAL = 2**8

#: The number of adjacent channels that torch adds at full speed.
_WIDE = 2**8


def _two_sums(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes the sums of ``dy * (x - mean) / sqrt(var + eps)`` and of ``dy``."""
    if x.device.type == "cpu":
        # In one memory format, with canonical strides: `contiguous` keeps an unusual stride of a
        # dimension of length 1, and torch's kernel would infer a wrong memory format.
        layout = memory_format(x)
        dy, x = (with_usual_strides(t.contiguous(memory_format=layout)) for t in (dy, x))
        # They are the parameter gradients of torch's batch norm in evaluation mode, fused.
        args = (dy, x, None, mean, var, None, None, False, eps, [False, True, True])
        return torch.ops.aten.native_batch_norm_backward(*args)[1:]  # type: ignore[no-any-return]
    along_x = (x - per_channel(mean, x)).mul_(dy).sum(reduced_dims(x))
    return along_x * (var + eps).rsqrt(), dy.sum(reduced_dims(x), dtype=mean.dtype)


def runs(x: Tensor, n: int) -> list[Tensor]:
    """Cuts ``x``, with ``n`` values per channel, into views whose sums lose no digits.

    A view holds several runs of each channel as separate channels, ordered by run. Returns an
    empty list if ``x`` would have to be copied.
    """
    if n <= _FEW:
        return [x]
    rows = x.movedim(1, -1)
    if not rows.is_contiguous():
        return []
    rows, c = rows.flatten(0, -2), x.size(1)
    run = _RUN // 4 if x.dim() == 3 else _RUN
    whole = n - n % run
    blocks = [*rows[:whole].split(run * max(1, BLOCK // (run * c))), rows[whole:]]
    return [_image(block, max(1, len(block) // run)) for block in blocks if len(block)]


def _image(rows: Tensor, times: int) -> Tensor:
    """Views rows ``(n, C)`` as a channels_last image ``(1, times * C, n / times, 1)``."""
    return rows.reshape(1, len(rows) // times, 1, -1).permute(0, 3, 1, 2)


def of_runs(runs: list[Tensor], mean: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the sums of ``x * (x - mean)`` and of ``x``, in float64, given its `runs`."""
    results = []
    for run in runs:
        center = mean.repeat(run.size(1) // len(mean))
        pair = torch.stack(_two_sums(run, run, center, torch.ones_like(center), 0.0))
        results.append(pair.double().view(2, -1, len(mean)).sum(1))
    products, plain = torch.stack(results).sum(0)
    return products, plain


def in_backward(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes `_two_sums` for any number of values.

    All values of ``dy`` may be equal (if the loss is a mean). Added one by one, their rounding
    errors add up, so they are added pairwise, as in `torch.sum`, where that is cheap.
    """
    n = values_per_channel(x)
    if x.device.type != "cpu" or n <= _FEW_EQUAL:
        return _two_sums(dy, x, mean, var, eps)
    channels_are_last = x.dim() == 2 or x.stride(1) == 1
    if channels_are_last and n > _FEW:
        dy, x = (t.movedim(1, -1).reshape(n, -1) for t in (dy, x))
        return _along_rows(dy, x, mean, var, eps), dy.sum(0, dtype=mean.dtype)
    along_x, plain = _two_sums(dy, x, mean, var, eps)
    if channels_are_last or not dy.is_contiguous():
        plain = dy.sum(reduced_dims(dy), dtype=mean.dtype)
    return along_x, plain


def _along_rows(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Computes the first of `_two_sums` for tensors ``(n, C)``, in pieces of `_FEW` products."""
    n, c = x.shape
    # Enough rows side by side for full speed, and the remainder separately.
    beside = max(1, _WIDE // c)
    whole = n - n % beside
    pieces = [beside * _FEW] * (whole // (beside * _FEW))
    pieces += [rest for rest in (whole - sum(pieces), n - whole) if rest]
    results = []
    for dy_part, x_part in zip(dy.split(pieces), x.split(pieces), strict=True):
        times = 1 if len(x_part) % beside else beside
        images = _image(dy_part, times), _image(x_part, times)
        sums = _two_sums(*images, mean.repeat(times), var.repeat(times), eps)
        results.append(sums[0].view(times, c).sum(0, dtype=torch.float64))
    return torch.stack(results).sum(0).to(mean)


@lru_cache
def _row_length(values: int, longest: int) -> int | None:
    """Returns the largest row length, from 16 to ``longest``, that divides ``values``; or None."""
    return next((k for k in range(min(values, longest), 15, -1) if values % k == 0), None)


def _row_length_of(x: Tensor) -> int | None:
    """Returns the row length of ``x``; None if it is not contiguous or can't be cut into rows.

    Rows are so short that float32 sums lose no digits. In half precision, which has few digits and
    is slow for short rows, they are longer.
    """
    if not x.is_contiguous():
        return None
    longest = 64 if x.dtype == accumulation_dtype(x.dtype) else 4096
    return _row_length(x.shape[2:].numel(), longest)


def has_rows(x: Tensor) -> bool:
    """Returns whether the values of a channel in one sample can be cut into rows."""
    return _row_length_of(x) is not None


def of_rows(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the sums of ``x * (x - mean)`` and of ``x``, given that `has_rows` is true.

    Rows are summed in the accumulation dtype, and their sums in float64.
    """
    length = _row_length_of(x) or 1
    shape = (len(x), x.size(1), x.shape[2:].numel() // length)
    center = mean.view(1, -1, 1).expand(shape).reshape(-1)
    rows = x.view(1, -1, length)
    sums = _two_sums(rows, rows, center, torch.ones_like(center), 0.0)
    along_x, plain = (s.view(shape).sum((0, 2), dtype=torch.float64) for s in sums)
    return along_x, plain


def cascaded(x: Tensor) -> Tensor:
    """Computes the sum of each channel: pairwise for up to 64 samples, then in float64."""
    dims, dtype = list(range(2, x.dim())), accumulation_dtype(x.dtype)
    sums = x.sum(dims, dtype=dtype) if dims else x
    whole = len(x) - len(x) % 64
    if whole:
        of_many = sums[:whole].unflatten(0, (-1, 64)).sum(1, dtype=dtype)
        sums = torch.cat((of_many, sums[whole:].to(dtype)))
    return sums.to(statistics_device(x.device)).sum(0, dtype=torch.float64)
