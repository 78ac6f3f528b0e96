"""The tensor kernels of batch normalization: three strategies, one for each kind of device.

=========  =================================================  ==========================
Strategy   Kernels                                            Devices
=========  =================================================  ==========================
`Native`   torch's fused kernels for evaluation mode          CPU
`Fused`    torch's kernels for `torch.nn.SyncBatchNorm`       those that have them, as CUDA
`Kernels`  plain tensor operations                            every other device
=========  =================================================  ==========================

Where gradients need derivatives of their own, `Differentiable` serves every device.

They know nothing of replicas, and compute in the *accumulation dtype*: float64 for float64,
float32 for everything else. Results in half precision are rounded once.

``x`` and the gradient ``dy`` of the output are ``(N, C, ...)``, ``x_hat`` is
``(x - mean) / sqrt(denominator)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from syncbn import moments as statistics
from syncbn.channels import (
    accumulation_dtype,
    constant_tensor,
    empty_output,
    in_float64,
    in_format_of,
    per_channel,
    reduced_dims,
    statistics_device,
    values_per_channel,
    with_usual_strides,
)

#: The number of values, possibly equal, that may be added one by one.
_FEW_EQUAL = 2**8

#: The number of values that may be added one by one.
_LONG_SUM = 2**12

#: Stands for a weight that is 0 in `Fused.input_gradient`, which divides sums by the weight by
#: which the kernel multiplies again. The gradient of the output times this vanishes.
_TINY = 1e-20

#: The number of values that several operations read and write at a time.
BLOCK = 2**19


class Statistics(NamedTuple):
    """The statistics of the whole batch, ``(C,)`` in the accumulation dtype, on ``x``'s device."""

    #: Values per channel. A tensor where reading it would block the host.
    total: int | Tensor
    mean: Tensor
    #: 1 / sqrt(denominator)
    inverse: Tensor
    #: ``var + eps``, or ``max(var, eps)``. Unused by `Fused`.
    denominator: Tensor
    #: The rounding error of the mean, where the mean is large; otherwise None.
    mean_error: Tensor | None = None
    #: Mean and biased variance, before they were rounded. None if they were never computed.
    mean_and_var: tuple[Tensor, Tensor] | None = None

    @property
    def divisor(self) -> int | Tensor:
        """`total`, or 1 if there are no values, whose means are 0."""
        return self.total + (self.total == 0)


#: A weight or a bias, ``(C,)`` in the accumulation dtype, or None.
Affine = Tensor | None

#: Running mean and variance, and the weight of new values, for kernels that update them.
Buffers = tuple[Tensor | None, Tensor | None, float]


class Kernels:
    """Tensor operations that every device has."""

    #: Whether the host waits for the device where it reads a value.
    is_asynchronous = True
    _multiply = staticmethod(Tensor.mul_)

    def moments(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Computes mean and biased variance of each channel, for an ``x`` that is not empty."""
        home, dims = statistics_device(x.device), reduced_dims(x)
        head = x.mean(dims, dtype=accumulation_dtype(x.dtype))
        centered = x - per_channel(head, x)
        # The centered values still contain the rounding error of the mean.
        rest, squares = (
            sums.to(home).double() for sums in (centered.mean(dims), centered.square().mean(dims))
        )
        return head.to(home) + rest, squares.addcmul_(rest, rest, value=-1).clamp_(min=0)

    def normalize(
        self, x: Tensor, stats: Statistics, weight: Affine, bias: Affine, out: Tensor
    ) -> None:
        """Writes ``x_hat * weight + bias`` into ``out``, for an ``x`` that is not empty."""
        out.copy_(self.affine(x, stats, weight, bias))

    def affine(self, x: Tensor, stats: Statistics, weight: Affine, bias: Affine) -> Tensor:
        """Returns ``x_hat * weight + bias``, in the accumulation dtype."""
        scale = _scale(stats.inverse, weight)
        y = (with_usual_strides(x) - per_channel(stats.mean, x)).mul_(per_channel(scale, x))
        if stats.mean_error is not None:
            shift = stats.mean_error * -scale
            bias = shift if bias is None else bias + shift
        return y if bias is None else y.add_(per_channel(bias, x))

    def reduce(self, dy: Tensor, x: Tensor, stats: Statistics) -> Tensor:
        """Computes the sums of ``dy`` and of ``dy * x_hat`` over a shard, ``(2, C)``."""
        # The second may be in units of the strategy's own, for the next two methods.
        dims = reduced_dims(x)
        dbias = dy.sum(dims, dtype=stats.mean.dtype)
        dweight = self._multiply(x - per_channel(stats.mean, x), dy).sum(dims)
        if stats.mean_error is not None:
            dweight = dweight - stats.mean_error * dbias
        return torch.stack((dbias, dweight * stats.inverse))

    def weight_gradient(self, sums: Tensor, stats: Statistics) -> Tensor:
        """Returns the sum of ``dy * x_hat``, given the result of `reduce`."""
        return sums[1]

    def derivatives(self, sums: Tensor, stats: Statistics, weight: Affine) -> Tensor:
        """Returns derivatives by the mean of the batch and by half of its variance, ``(2, C)``."""
        weight = weight if weight is None else weight.to(sums)
        return sums * self._factors(stats.inverse.to(sums), weight)

    def _factors(self, inverse: Tensor, weight: Affine) -> Tensor:
        #     dmean = -sum(weight * dy) / sqrt(denominator)
        #     dvar = -sum(weight * dy * x_hat) / (2 * denominator)
        scale = -_scale(inverse, weight)
        return torch.stack((scale, scale * inverse))

    def input_gradient(
        self, dy: Tensor, x: Tensor, stats: Statistics, weight: Affine, derivatives: Tensor
    ) -> Tensor:
        """Computes the gradient of a shard that is not empty, given the sum of all derivatives."""
        # For n values in the whole batch:
        #     dx = weight * dy / sqrt(denominator) + (dmean + 2 * dvar * (x - mean)) / n
        # (Ioffe & Szegedy, arXiv:1502.03167, section 3.)
        shift, slope = (derivatives / stats.divisor).unbind()
        if stats.mean_error is not None:
            shift = shift - stats.mean_error * slope
        dx = with_usual_strides(x) - per_channel(stats.mean, x)
        dx = self._multiply(dx, per_channel(slope, x)).add_(per_channel(shift, x))
        dx.addcmul_(dy.to(dx.dtype), per_channel(_scale(stats.inverse, weight), x))
        return dx.to(x.dtype)


# In place, `vmap` could not multiply a tensor by a batch, and autograd would copy it first.
class Differentiable(Kernels):
    """Operations on any device for gradients that have derivatives, or are computed in batches."""

    _multiply = staticmethod(Tensor.mul)


# Not those for training mode, which cannot take statistics from outside.
class Native(Kernels):
    """torch's fused CPU kernels for evaluation mode: an affine map, and two sums in backward."""

    is_asynchronous = False

    def moments(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return statistics.moments(x)

    def normalize(
        self, x: Tensor, stats: Statistics, weight: Affine, bias: Affine, out: Tensor
    ) -> None:
        if stats.mean_error is not None:
            # x * scale + (bias - mean * scale), as below, would lose digits.
            in_blocks(lambda x: self.affine(x, stats, weight, bias), out, x)
            return
        none = stats.mean.new_empty(0)  # in evaluation mode the kernel saves nothing
        args = (weight, bias, stats.mean, stats.denominator, False, 0.0, 0.0)
        torch.native_batch_norm(with_usual_strides(x), *args, out=(out, none, none))

    def reduce(self, dy: Tensor, x: Tensor, stats: Statistics) -> Tensor:
        adds_in_pairs = values_per_channel(x) > _FEW_EQUAL and (
            x.shape[2:].numel() == 1 or not (x.is_contiguous() and dy.is_contiguous())
        )
        x = with_usual_strides(x if x.is_contiguous() else in_format_of(x, x))
        dy = with_usual_strides(in_format_of(dy, x))
        if not adds_in_pairs:
            dweight, dbias = _parameter_gradients(dy, x, stats)
        else:
            # This kernel adds values one by one where channels are last, so that the rounding
            # errors add up, above all of equal ones (if the loss is a mean). torch's layer does
            # not. So would a single `sum`, of many samples.
            blocks = [t.movedim(1, -1).reshape(-1, t.size(1)).split(_LONG_SUM) for t in (dy, x)]
            parts = [_parameter_gradients(a, b, stats)[0] for a, b in zip(*blocks, strict=True)]
            dweight = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            samples = dy if dy.dim() == 2 else dy.sum(reduced_dims(dy)[1:], dtype=dweight.dtype)
            dbias = samples.sum(0, dtype=dweight.dtype)
        if stats.mean_error is not None:
            dweight -= stats.mean_error * stats.inverse * dbias
        return torch.stack((dbias, dweight))

    def input_gradient(
        self, dy: Tensor, x: Tensor, stats: Statistics, weight: Affine, derivatives: Tensor
    ) -> Tensor:
        if x.dtype != derivatives.dtype:
            dx, plain = empty_output(x), super().input_gradient
            in_blocks(lambda x, dy: plain(dy, x, stats, weight, derivatives), dx, x, dy)
            return dx
        if stats.mean_error is not None:
            return super().input_gradient(dy, x, stats, weight, derivatives)
        shift, slope = (derivatives / stats.total).unbind()
        slope = slope / stats.inverse  # the kernel multiplies by it
        x = with_usual_strides(x)  # the result inherits them
        args = (x, slope, shift, stats.mean, stats.denominator, False, 0.0, 0.0)
        dx = torch.native_batch_norm(*args)[0]
        return dx.addcmul_(dy, per_channel(_scale(stats.inverse, weight), x))


# They read and write each tensor once, in its dtype, subtract the mean before they scale, and
# do not make the host wait.
class Fused(Kernels):
    """The kernels of `torch.nn.SyncBatchNorm`, for contiguous and channels_last inputs."""

    def moments(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Computes mean and ``1 / sqrt(var + eps)``."""
        return torch.batch_norm_stats(x, eps)

    def merge(
        self, counts: tuple[int, ...], moments: Sequence[Tensor], eps: float, running: Buffers
    ) -> tuple[Tensor, Tensor]:
        """Merges `moments` of n shards, ``(n, C)`` each, and updates running statistics."""
        mean, inverse = moments
        count = constant_tensor(counts, mean.device, mean.dtype)
        # The first argument only gives the dtype.
        args = (mean, mean, inverse, *running, eps, count)
        return torch.batch_norm_gather_stats_with_counts(*args)

    def normalize(
        self, x: Tensor, stats: Statistics, weight: Affine, bias: Affine, out: Tensor
    ) -> None:
        # The last argument is eps, which only some kernels use.
        torch.batch_norm_elemt(x, weight, bias, stats.mean, stats.inverse, 0.0, out=out)

    def reduce(self, dy: Tensor, x: Tensor, stats: Statistics) -> Tensor:
        sums = torch.batch_norm_backward_reduce(
            *(in_format_of(dy, x), x, stats.mean, stats.inverse, None, True, False, False)
        )
        return torch.stack(sums[:2])  # of dy, and of dy * (x - mean)

    def weight_gradient(self, sums: Tensor, stats: Statistics) -> Tensor:
        return sums[1] * stats.inverse

    def _factors(self, inverse: Tensor, weight: Affine) -> Tensor:
        scale = -_scale(inverse, weight)
        return torch.stack((scale, scale * inverse.square()))

    def input_gradient(
        self, dy: Tensor, x: Tensor, stats: Statistics, weight: Affine, derivatives: Tensor
    ) -> Tensor:
        # In float64, because the product of a tiny weight may be too small for float32.
        inverse = in_float64(stats.inverse)
        if weight is not None:
            weight = weight.masked_fill(weight.abs() < _TINY, _TINY)
        sums = (in_float64(derivatives) / self._factors(inverse, weight)).to(derivatives)
        return self.input_gradient_by_sums(dy, x, stats, weight, sums)

    def input_gradient_by_sums(
        self, dy: Tensor, x: Tensor, stats: Statistics, weight: Affine, sums: Tensor
    ) -> Tensor:
        """Computes `input_gradient`, given the sums of `reduce` over the whole batch."""
        n = 1
        if _is_int32(stats.total):  # the kernel divides by a count that it can hold
            n = stats.total
        else:
            sums = sums / stats.total
        plain, along_x = sums.unbind()
        count = constant_tensor((n,), x.device, torch.int32)
        dy = in_format_of(dy, x).to(x.dtype)
        return torch.batch_norm_backward_elemt(
            dy, x, stats.mean, stats.inverse, weight, plain, along_x, count
        )


def _is_int32(total: int | Tensor) -> TypeGuard[int]:
    return isinstance(total, int) and total < 2**31


#: The operators of torch that `Fused` calls.
_FUSED = (
    "batch_norm_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_elemt.out",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)

FUSED, PLAIN, DIFFERENTIABLE = Fused(), Kernels(), Differentiable()


class Strategies(dict[str, Kernels]):
    """The strategy for each type of device, found when it is first asked for."""

    def __missing__(self, kind: str) -> Kernels:
        key = torch._C._dispatch_key_for_device(kind)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        is_fused = all(has_kernel(f"aten::{name}", key) for name in _FUSED)
        self[kind] = FUSED if is_fused else PLAIN
        return self[kind]


KERNELS = Strategies(cpu=Native())


def _scale(inverse: Tensor, weight: Affine) -> Tensor:
    """Returns ``weight / sqrt(denominator)``, ``(C,)``."""
    return inverse if weight is None else inverse * weight


def _parameter_gradients(dy: Tensor, x: Tensor, stats: Statistics) -> tuple[Tensor, Tensor]:
    """Returns the sums of ``dy * x_hat`` and ``dy``: parameter gradients in evaluation mode."""
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward.default(
        *(dy, x, None, stats.mean, stats.denominator, None, None, False, 0.0),
        [False, True, True],
    )
    return dweight, dbias


def in_blocks(function: Callable[..., Tensor], out: Tensor, *tensors: Tensor) -> None:
    """Writes ``function(*tensors)`` into ``out``, computed in the accumulation dtype."""
    dtype = accumulation_dtype(out.dtype)
    # In blocks of samples: an upcast, or the passes over a whole tensor, would leave the cache.
    length = max(1, BLOCK // out[0].numel())
    for block, *parts in zip(*(t.split(length) for t in (out, *tensors)), strict=True):
        block.copy_(function(*[part.to(dtype) for part in parts]))
