"""Per-device tensor kernels of batch normalization. Torch only; they know no replicas.

Notation. ``x`` is ``(N, C, ...)``; a channel has ``n = x.numel() / C`` values. Moments are
``(2, C)`` in float64, which costs nothing at their size, on the device of ``x``, or on the CPU if
that device has no float64. What has the size of ``x`` is computed in the *accumulation dtype*:
float64 for float64, float32 for everything else; so are vectors of length C next to it.

Numerical promises
    * Moments are centered sums (two-pass, corrected; Chan, Golub & LeVeque, «Algorithms for
      Computing the Sample Variance», The American Statistician 37, 1983, eq. 1.7), never
      ``E[x^2] - E[x]^2``: the variance is not negative and does not suffer from a large mean.
      Where the mean turns out not to be large one factor is centered, by a guess of the mean,
      which needs no centered copy of ``x``.
    * Nor does anything else: where the mean is large, ``x - mean`` is formed before it is scaled,
      and the mean enters in two parts, its rounding to the accumulation dtype and the rest.
    * float16 and bfloat16 inputs are summed in float32, rows and runs of them in float64.
    * An empty ``x`` is fine everywhere (torch's native kernels crash on it).

Speed. On the CPU the kernels of torch's batch norm in evaluation mode are fused and vectorized:
forward is an affine map of each channel, backward two sums over two tensors. Its training kernel
is neither, unless the channels are last. On CUDA see `syncbn.cuda_kernels`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import cuda_kernels

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


def moments(x: Tensor) -> Tensor:
    """Mean and biased variance of each channel.

    Returns:
        ``(2, C)`` in float64: means, variances; zeros if ``x`` is empty.
    """
    home, n = statistics_device(x.device), values_per_channel(x)
    if n == 0:
        return torch.zeros(2, x.size(1), dtype=torch.float64, device=home)
    if x.is_cuda:
        return cuda_kernels.moments(x)
    if x.device.type == "cpu":
        stats = _uncentered_moments(x, n)
        if stats is not None:
            return stats
    head = x.mean(reduced_dims(x), dtype=accumulation_dtype(x.dtype))
    stats = _sum_and_squares(x - per_channel(head, x)).div_(n)
    # What the rounding of the mean has left in the centered values.
    rest, variance = stats
    variance.addcmul_(rest, rest, value=-1).clamp_(min=0)
    # Of infinite values the mean is infinite, and nothing else is a number.
    rest.nan_to_num_(0.0, math.inf, -math.inf).add_(head.to(home))
    return stats


#: Values of a tensor for which the number of operations is the time.
_TINY = 2**15

#: So many values per channel may be added one by one, where that saves operations.
_FEW = 2**13

#: Of more, so many are.
_RUN = 2**10

#: So many values stay in the cache from one pass of a kernel to the next.
_BLOCK = 2**19

#: In deviations: the largest mean for which the moments need no centered copy of ``x``.
_UNCENTERED = 4

#: So many values per channel tell the mean well enough, if they come in any order.
_TYPICAL = 64

#: In deviations: how far such a guess of the mean may be off.
_APART = 2


def _uncentered_moments(x: Tensor, n: int) -> Tensor | None:
    """As `moments`, on the CPU, for a mean that is not large; None if that would cost digits."""
    dtype, c = accumulation_dtype(x.dtype), x.size(1)
    has_rows = _has_rows(x)
    runs = [] if has_rows and x.numel() > _TINY else _runs(x, n)
    if runs and x.dtype == dtype:
        stats = _moments_of_runs(runs, n, c)
        return None if has_large_mean(stats, _UNCENTERED) else stats
    if not has_rows and not runs:
        return None
    # Of the first values: a guess that costs no look at all of them.
    first = runs[0][:, :c] if len(runs) > 1 else x[: 1 + _TYPICAL // (n // len(x))]
    head = first.mean(reduced_dims(first), dtype=dtype)
    if not runs:
        products, plain = _row_sums(x, x, head)
    else:
        sums = []
        for run in runs:
            center = head.repeat(run.size(1) // c)
            pair = torch.stack(_two_sums(run, run, center, torch.ones_like(center), 0.0))
            sums.append(pair.double().view(2, -1, c).sum(1))
        products, plain = torch.stack(sums).sum(0)
    mean = plain.div_(n)
    apart = mean - head
    # E[x (x - head)] = var + mean (mean - head)
    var = products.div_(n).addcmul_(mean, apart, value=-1)
    if _are_beyond(torch.stack((mean, apart * (_UNCENTERED / _APART))), var, _UNCENTERED):
        return None
    return torch.stack((mean, var))


def _moments_of_runs(runs: list[Tensor], n: int, c: int) -> Tensor:
    """The moments of ``c`` channels of ``n`` values, which `_runs` has cut."""
    # A single operation; where the channels are last it is vectorized, too.
    stats = [torch.stack(torch.batch_norm_update_stats(r, None, None, 0.0)) for r in runs]
    if len(runs) == 1 and runs[0].size(1) == c:
        return stats[0].double()
    share = [[[values_per_channel(run) / n]] for run in runs for _ in range(run.size(1) // c)]
    parts = torch.cat([s.double().view(2, -1, c).transpose(0, 1) for s in stats])
    return merge(parts.new_tensor(share), parts)


def _runs(x: Tensor, n: int) -> list[Tensor]:
    """``x`` in parts whose sums lose no digits; none if that takes copies.

    Several runs of a channel are as many channels of a part, the first run of all channels first.
    """
    if n <= _FEW:
        return [x]
    rows = x.movedim(1, -1)
    if not rows.is_contiguous():
        return []
    rows, c = rows.flatten(0, -2), x.size(1)
    whole = n - n % _RUN
    blocks = [*rows[:whole].split(_RUN * max(1, _BLOCK // (_RUN * c))), rows[whole:]]
    # As images of one column, channels last.
    shapes = [(len(block), max(1, len(block) // _RUN)) for block in blocks]
    return [
        block.view(1, length // runs, 1, runs * c).permute(0, 3, 1, 2)
        for block, (length, runs) in zip(blocks, shapes, strict=True)
        if length
    ]


def _sum_and_squares(centered: Tensor) -> Tensor:
    """The sums of each channel's values and of their squares, ``(2, C)`` in float64.

    ``centered`` is used up.
    """
    if centered.device.type == "cpu" and _has_rows(centered):
        squares, plain = _row_sums(centered, centered, centered.new_zeros(centered.size(1)))
    else:
        plain, squares = _cascaded(centered), _cascaded(centered.square_())
    return torch.stack((plain, squares))


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


def _has_rows(x: Tensor) -> bool:
    return _row_length_of(x) is not None


def _row_sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of ``dy * (x - mean)`` and of ``dy``: of rows in the accumulation dtype, and of
    these in float64. torch's kernel would add the values of a sample one by one."""
    length = _row_length_of(x) or 1
    shape = (len(x), x.size(1), x.shape[2:].numel() // length)
    center = mean.view(1, -1, 1).expand(shape).reshape(-1)
    dy, x = dy.view(1, -1, length), x.view(1, -1, length)
    sums = _two_sums(dy, x, center, torch.ones_like(center), 0.0)
    along_x, plain = (s.view(shape).sum((0, 2), dtype=torch.float64) for s in sums)
    return along_x, plain


def _cascaded(x: Tensor) -> Tensor:
    """The sum of each channel: in pairs, as `torch.sum` adds, and over samples in float64."""
    inner = x.sum(list(range(2, x.dim()))) if x.dim() > 2 else x
    return inner.to(statistics_device(x.device)).sum(0, dtype=torch.float64)


def _two_sums(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sums of ``dy * (x - mean) / sqrt(var + eps)`` and of ``dy``."""
    if x.device.type == "cpu":
        # In one format: of two torch's kernel may take one for the other, where a dimension of
        # length 1 has an unusual stride.
        layout = cuda_kernels.memory_format(x)
        dy, x = (t.contiguous(memory_format=layout) for t in (dy, x))
        # As its parameters' gradients, torch's batch norm in evaluation mode returns them, fused.
        args = (dy, x, None, mean, var, None, None, False, eps, [False, True, True])
        return torch.ops.aten.native_batch_norm_backward(*args)[1:]  # type: ignore[no-any-return]
    along_x = (x - per_channel(mean, x)).mul_(dy).sum(reduced_dims(x))
    return along_x * (var + eps).rsqrt(), dy.sum(reduced_dims(x), dtype=mean.dtype)


#: In deviations. A larger mean would cost more than three of the bits that ``x`` has.
LARGE = 8


def has_large_mean(moments: Tensor, deviations: float = LARGE) -> bool:
    """Whether the mean of some channel is more than so many deviations, for all that the host
    knows: it does not wait for an accelerator to tell."""
    return moments.device.type != "cpu" or _are_beyond(moments[0], moments[1], deviations)


def _are_beyond(values: Tensor, var: Tensor, deviations: float) -> bool:
    """Whether any of the values, of which the last dimension is C, is above so many deviations."""
    # A NaN is, too.
    return not torch.addcmul(deviations**2 * var, values, values, value=-1).amin().item() >= 0


class Center(NamedTuple):
    """The mean of each channel, as the kernels take it."""

    #: Rounded to the accumulation dtype, on the device of ``x``.
    head: Tensor
    #: What is left, in float64; None where it does not matter, as the mean is not large.
    rest: Tensor | None


def center_of(mean: Tensor, x: Tensor, is_large: bool) -> Center:
    """What the kernels take of a mean in float64; for ``is_large`` see `has_large_mean`."""
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
    if x.dtype == center.head.dtype or x.numel() <= _BLOCK:
        return _in_one_piece(x, center, scale, shift, dy, along).to(x.dtype)
    # By samples: as a whole it would be twice as large as x, and out of the cache.
    y, length = torch.empty_like(x), max(1, _BLOCK // x[0].numel())
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
    along_x, plain = _two_sums(dy, x, head, var, eps)
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


def merge(share: Tensor, stats: Tensor) -> Tensor:
    """Mean and biased variance of the union of several sets, from those of the sets.

    Chan, Golub & LeVeque, «Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances», 1979. Sets may be empty; if all are, mean and variance are 0.

    Args:
        share: ``(n, 1, 1)``, of each set in the number of values.
        stats: ``(n, 2, C)``, their means and variances.

    Returns:
        ``(2, C)``.
    """
    merged = (share * stats).sum(0)
    apart = stats[:, 0] - merged[0]
    merged[1] += apart.square_().mul_(share[:, 0]).sum(0)
    return merged
