"""Sums over the values of each channel, which may be millions.

torch's kernels add the values of a sample, or where the channels are last of all samples, one by
one. For moments they are given runs of values, or rows, as if these were channels of their own, of
which the sums are added in float64. In backward only what comes from above is added with care: it
alone may be the same value all over. float16 and bfloat16 values are summed in float32.
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


#: So many values stay in the cache from one pass of a kernel to the next.
BLOCK = 2**19

#: So many values per channel may be added one by one, where that saves operations.
_FEW = 2**13

#: Of more than `_FEW`, so many are, as far as torch itself adds one by one; else a quarter of it.
_RUN = 2**9

#: So many values of a gradient may be added one by one: they may be equal.
_FEW_ALIKE = 2**8

#: So many channels side by side are added at full speed.
_WIDE = 2**8


def _two_sums(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sums of ``dy * (x - mean) / sqrt(var + eps)`` and of ``dy``."""
    if x.device.type == "cpu":
        # In one format, with its usual strides: where a dimension of length 1 has another stride,
        # which `contiguous` keeps, torch's kernel takes one format for the other.
        layout = memory_format(x)
        dy, x = (with_usual_strides(t.contiguous(memory_format=layout)) for t in (dy, x))
        # As its parameters' gradients, torch's batch norm in evaluation mode returns them, fused.
        args = (dy, x, None, mean, var, None, None, False, eps, [False, True, True])
        return torch.ops.aten.native_batch_norm_backward(*args)[1:]  # type: ignore[no-any-return]
    along_x = (x - per_channel(mean, x)).mul_(dy).sum(reduced_dims(x))
    return along_x * (var + eps).rsqrt(), dy.sum(reduced_dims(x), dtype=mean.dtype)


def runs(x: Tensor, n: int) -> list[Tensor]:
    """``x``, of ``n`` values per channel, in parts whose sums lose no digits; none if that takes
    copies.

    Several runs of a channel are as many channels of a part, the first run of all channels first.
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
    """Rows ``(n, C)`` as an image of one column, channels last, with so many rows side by side."""
    return rows.reshape(1, len(rows) // times, 1, -1).permute(0, 3, 1, 2)


def of_runs(runs: list[Tensor], mean: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of ``x * (x - mean)`` and of ``x``, in float64, of what `runs` has cut."""
    found = []
    for run in runs:
        center = mean.repeat(run.size(1) // len(mean))
        pair = torch.stack(_two_sums(run, run, center, torch.ones_like(center), 0.0))
        found.append(pair.double().view(2, -1, len(mean)).sum(1))
    products, plain = torch.stack(found).sum(0)
    return products, plain


def in_backward(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `_two_sums`, of any number of values.

    ``dy`` may be the same value all over (of a mean behind): added one by one it is rounded alike
    each time. Where it costs little it is added in pairs, as `torch.sum` adds.
    """
    n = values_per_channel(x)
    if x.device.type != "cpu" or n <= _FEW_ALIKE:
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
    """The first of `_two_sums`, of tensors ``(n, C)``: a `_FEW` products are added one by one."""
    n, c = x.shape
    # As many rows side by side as make a good length of loops; what is left over by itself.
    beside = max(1, _WIDE // c)
    whole = n - n % beside
    pieces = [beside * _FEW] * (whole // (beside * _FEW))
    pieces += [rest for rest in (whole - sum(pieces), n - whole) if rest]
    found = []
    for dy_part, x_part in zip(dy.split(pieces), x.split(pieces), strict=True):
        times = 1 if len(x_part) % beside else beside
        images = _image(dy_part, times), _image(x_part, times)
        sums = _two_sums(*images, mean.repeat(times), var.repeat(times), eps)
        found.append(sums[0].view(times, c).sum(0, dtype=torch.float64))
    return torch.stack(found).sum(0).to(mean)


@lru_cache
def _row_length(values: int, longest: int) -> int | None:
    """Into rows of what length so many values can be cut."""
    return next((k for k in range(min(values, longest), 15, -1) if values % k == 0), None)


def _row_length_of(x: Tensor) -> int | None:
    """The values of a row of ``x``; None if those of a channel in one sample are no neighbours, or
    cannot be cut.

    As few as float32 adds without losing digits; in half precision, which has few, and of which
    short rows are slow, more.
    """
    if not x.is_contiguous():
        return None
    longest = 64 if x.dtype == accumulation_dtype(x.dtype) else 4096
    return _row_length(x.shape[2:].numel(), longest)


def has_rows(x: Tensor) -> bool:
    """Whether the values of a channel in one sample can be cut into rows."""
    return _row_length_of(x) is not None


def of_rows(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of ``x * (x - mean)`` and of ``x``: of rows in the accumulation dtype, and of these
    in float64."""
    length = _row_length_of(x) or 1
    shape = (len(x), x.size(1), x.shape[2:].numel() // length)
    center = mean.view(1, -1, 1).expand(shape).reshape(-1)
    rows = x.view(1, -1, length)
    sums = _two_sums(rows, rows, center, torch.ones_like(center), 0.0)
    along_x, plain = (s.view(shape).sum((0, 2), dtype=torch.float64) for s in sums)
    return along_x, plain


def cascaded(x: Tensor) -> Tensor:
    """The sum of each channel: in pairs, as `torch.sum` adds, of up to 64 samples, and of these in
    float64."""
    dims, dtype = list(range(2, x.dim())), accumulation_dtype(x.dtype)
    sums = x.sum(dims, dtype=dtype) if dims else x
    whole = len(x) - len(x) % 64
    if whole:
        of_many = sums[:whole].unflatten(0, (-1, 64)).sum(1, dtype=dtype)
        sums = torch.cat((of_many, sums[whole:].to(dtype)))
    return sums.to(statistics_device(x.device)).sum(0, dtype=torch.float64)
