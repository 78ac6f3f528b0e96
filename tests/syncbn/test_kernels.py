"""The kernels of each device against float64, one at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn import channels
from syncbn.kernels import BLOCK, PLAIN, Fused, Kernels, Native, Statistics
from syncbn.merge import Denominator, kernel_statistics
from tests.layouts import LAYOUTS, channels_last, channels_of, with_odd_strides
from tests.pairwise import pairwise
from tests.sharded import shard_of

# `Fused` needs a GPU, or stand-ins: see `test_fused_kernels.py`.
NATIVE, FUSED = Native(), Fused()
every_strategy = pytest.mark.parametrize("kernels", [NATIVE, PLAIN], ids=["native", "plain"])
#: Whether the mean counts as large, so that no precision may be lost by subtracting it late.
large_or_not = pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])


def statistics_of(
    mean: Tensor, var: Tensor, x: Tensor, eps: float = 0.0, is_large: bool = False
) -> Statistics:
    """What kernels take, given mean and variance in float64."""
    stats = kernel_statistics(10, mean, var, shard_of(x, Denominator(eps)))
    mean_error = (mean - stats.mean.to(mean)).to(stats.mean)
    return stats._replace(mean_error=mean_error if is_large else None)


def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    values = channels_of(x)
    return values.mean(1), values.var(1, correction=0)


def hat_of(x: Tensor, eps: float = 0.0) -> Tensor:
    """The normalized values of each channel, ``(C, n)``."""
    mean, var = (moment[:, None] for moment in moments_of(x))
    return (channels_of(x) - mean) / (var + eps).sqrt()


def normalized(
    kernels: Kernels, x: Tensor, stats: Statistics, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    y = channels.empty_output(x)
    kernels.normalize(x, stats, weight, bias, y)
    return y


def input_gradient(
    kernels: Kernels,
    dy: Tensor,
    x: Tensor,
    stats: Statistics,
    weight: Tensor | None,
    totals: Tensor,
    n: int | Tensor = 10,
) -> Tensor:
    """Calls the kernel, given the sums of a batch of ``n`` values, as `reduce` returns them."""
    stats = stats._replace(total=n)
    derivatives = kernels.derivatives(totals, stats, weight)
    return kernels.input_gradient(dy, x, stats, weight, derivatives)


def gradient_of(x: Tensor, dy: Tensor, eps: float, weight: Tensor, totals: Tensor) -> Tensor:
    """The gradient of a shard whose batch has its moments and the given totals, and 10 values."""
    inverse = (moments_of(x)[1] + eps).rsqrt()[:, None]
    plain, along_x = (totals * weight).double()[..., None]
    of_dy = weight[:, None].double() * channels_of(dy)
    return inverse * (of_dy - (plain + hat_of(x, eps) * along_x) / 10)


class LargestFloat32(TorchDispatchMode):
    """Looks for the largest tensor in float32."""

    values = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if tensor.dtype == torch.float32:
                self.values = max(self.values, tensor.numel())
        return result


@large_or_not
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once_and_converted_block_by_block(dtype, layout, is_large):
    x, dy = (layout(t.to(dtype)) for t in torch.randn(2, 5, 8, 300, 64))
    stats = statistics_of(*moments_of(x), x, 1e-5, is_large)
    weight, totals = torch.randn(8), torch.randn(2, 8)
    with LargestFloat32() as largest:
        dx = input_gradient(NATIVE, dy, x, stats, weight, totals, 10)
    assert largest.values <= x.numel() - x[0].numel()
    assert dx.dtype == dtype and dx.stride() == x.stride()
    exact = gradient_of(x, dy, 1e-5, weight, totals)
    half_ulp = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((channels_of(dx) - exact).abs() <= 1.02 * half_ulp + 1e-6).all()


def test_a_sample_in_half_precision_may_be_larger_than_a_block():
    x = torch.randn(2, 1, BLOCK + 16, dtype=torch.bfloat16)
    one, zero = torch.ones(1), torch.zeros(1)
    stats = Statistics(10, zero, one, one)
    dx = input_gradient(NATIVE, x, x, stats, None, torch.tensor([[0.0], [-20.0]]), 10)
    assert torch.equal(dx, 3 * x)


@every_strategy
@large_or_not
def test_results_have_the_strides_of_their_format_where_a_dimension_has_length_one(
    kernels, is_large
):
    """torch's batch norm mistakes other strides for another format."""
    odd = torch.randn(5, 4, 3).permute(2, 0, 1)[None]
    usual = odd.clone(memory_format=torch.channels_last)
    assert odd.stride() != usual.stride() and odd.is_contiguous(memory_format=torch.channels_last)
    stats = statistics_of(*moments_of(odd), odd, is_large=is_large)
    y = normalized(kernels, odd, stats, None, None)
    dx = input_gradient(kernels, odd, odd, stats, None, torch.ones(2, 3), 10)
    assert (y.stride(), dx.stride()) == (usual.stride(), usual.stride())
    torch.testing.assert_close(y, normalized(kernels, usual, stats, None, None))


@every_strategy
@pytest.mark.parametrize(
    "shape", [(4, 3, 64, 64), (2, 3, 16, 32, 32), (4, 3, 4096), (4096, 3)], ids=str
)
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_sums_of_equal_values_lose_no_more_digits_than_torchs(kernels, shape, layout):
    """The loss may be a mean."""
    x, dy = torch.randn(shape), torch.rand(3).view(1, 3, *[1] * (len(shape) - 2)).expand(shape)
    plain = torch.nn.BatchNorm1d(3)
    x = layout(x)
    stats = statistics_of(*moments_of(x), x, plain.eps)
    exact = torch.stack(((channels_of(dy) * hat_of(x, plain.eps)).sum(1), channels_of(dy).sum(1)))
    for upstream in (dy, dy.contiguous(), channels_last(dy)):
        torchs = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
        plain = torchs.get(len(shape), torch.nn.BatchNorm3d)(3)
        plain(x).backward(upstream)
        theirs = torch.stack((plain.weight.grad, plain.bias.grad)).double()
        sums = kernels.reduce(upstream, x, stats)
        ours = [kernels.weight_gradient(sums, stats), sums[0]]
        error, own = ((torch.stack(tuple(ours)) - exact).abs(), (theirs - exact).abs())
        ulp = torch.finfo(torch.float32).eps * channels_of(dy * x).abs().sum(1)
        assert (error <= 2 * own + ulp).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(8192, 2, 16), (8192, 2, 2, 8), (8192, 2, 1, 1), (8192, 1, 1)], ids=str
)
def test_sums_of_equal_values_of_many_samples_are_precise_in_any_layout(shape, layout):
    """`Tensor.sum` would add the samples of a contiguous tensor one by one."""
    x, dy = torch.randn(shape), torch.full(shape, 0.37)
    made = channels_last if layout == "channels_last" else LAYOUTS[layout]
    for inputs, upstream in itertools.product((x, made(x)), (dy, made(dy))):
        dbias, _ = NATIVE.reduce(upstream, inputs, statistics_of(*moments_of(x), x))
        torch.testing.assert_close(dbias.double(), channels_of(dy).sum(1), rtol=2e-6, atol=0)


@pairwise(
    kernels=[NATIVE, PLAIN],
    shape=[(1, 3, 4, 5), (1, 8, 1, 5), (3, 4, 1, 1), (1, 1, 6, 1)],
    x_layout=["contiguous", "channels_last", "viewed", "image"],
    dy_layout=["contiguous", "channels_last", "viewed", "image"],
)
def test_dimensions_of_length_one_may_have_any_stride(kernels, shape, x_layout, dy_layout):
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        **LAYOUTS,
        "viewed": lambda x: (y := LAYOUTS["channels_last"](x)).view_as(y),
        "image": lambda x: x.permute(0, 2, 3, 1).contiguous()[0].permute(2, 0, 1)[None],
    }
    x, dy = torch.randn(2, *shape)
    x = layouts[x_layout](x) if shape[0] == 1 or x_layout != "image" else x
    dy = layouts[dy_layout](dy) if shape[0] == 1 or dy_layout != "image" else dy
    moments = moments_of(x)
    torch.testing.assert_close(kernels.moments(x, 1.0), moments, rtol=1e-5, atol=1e-6)
    stats = statistics_of(*moments, x, 1.0)
    check_every_kernel(kernels, x, dy, stats, 1.0)


def check_every_kernel(
    kernels: Kernels,
    x: Tensor,
    dy: Tensor,
    stats: Statistics,
    eps: float,
    tolerance: float = 1e-5,
) -> None:
    """Compares all but `moments` with float64."""
    c = x.size(1)
    hat = hat_of(x, eps)
    weight, bias, *totals = torch.randn(4, c).to(stats.mean)
    totals = torch.stack(totals)
    for w, b in ((None, None), (weight, None), (None, bias), (weight, bias)):
        expected = hat * (1 if w is None else w[:, None]) + (0 if b is None else b[:, None])
        y = normalized(kernels, x, stats, w, b)
        torch.testing.assert_close(
            channels_of(y), expected.double(), rtol=tolerance, atol=tolerance
        )
    sums = kernels.reduce(dy, x, stats)
    plain, along_x = sums[0], kernels.weight_gradient(sums, stats)
    expected = torch.stack(((channels_of(dy) * hat).sum(1), channels_of(dy).sum(1)))
    torch.testing.assert_close(
        torch.stack((along_x, plain)).double(), expected, rtol=tolerance, atol=10 * tolerance
    )
    # `Fused` adds ``x - mean`` instead of ``x_hat``.
    along = 1 / stats.inverse if isinstance(kernels, Fused) else torch.ones_like(stats.inverse)
    message = totals * torch.stack((torch.ones_like(along), along))
    expected = gradient_of(x, dy, eps, weight, totals)
    for n in (10, torch.tensor(10.0, device=x.device)):
        dxs = [input_gradient(kernels, dy, x, stats, weight, message, n)]
        if isinstance(kernels, Fused):
            stats = stats._replace(total=n)
            dxs.append(kernels.input_gradient_by_sums(dy, x, stats, weight, message))
        for dx in dxs:
            torch.testing.assert_close(channels_of(dx), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 17, 10, 1), (1, 17, 5, 5), (6, 17, 1, 1), (4, 1, 9, 1)])
def test_sums_are_rounded_once_for_any_strides(shape, dtype):
    """Once the bias gradient was rounded to bfloat16: torch's kernel had misread the format."""
    x, dy = torch.randn(2, *shape).to(dtype)
    stats = statistics_of(*moments_of(x), x, 1.0)
    expected = [(channels_of(dy) * hat_of(x, 1.0)).sum(1), channels_of(dy).sum(1)]
    generator = random.Random(0)
    for _ in range(20):
        odd_x = with_odd_strides(x, generator.choice(["contiguous", "channels_last"]), generator)
        odd_dy = with_odd_strides(dy, generator.choice(["contiguous", "channels_last"]), generator)
        sums = NATIVE.reduce(odd_dy, odd_x, stats).flip(0).unbind()
        torch.testing.assert_close(
            [s.double() for s in sums], list(expected), rtol=1e-6, atol=2e-6
        )


@every_strategy
@pytest.mark.parametrize("mean", [1e2, 1e4, -1e6])
def test_a_large_mean_costs_no_precision(kernels, mean):
    x, dy = torch.randn(512, 3, 4) + mean, torch.randn(512, 3, 4)
    moments = kernels.moments(x, 1e-5)
    torch.testing.assert_close(moments, moments_of(x), rtol=1e-6, atol=1e-6)
    stats = kernel_statistics(10, *moments, shard_of(x, Denominator(1e-5)))
    assert stats.mean_error is not None
    y = normalized(kernels, x, stats, None, None)
    torch.testing.assert_close(channels_of(y), hat_of(x, 1e-5), rtol=1e-6, atol=1e-6)
    _, along_x = kernels.reduce(dy, x, stats)
    exact = (channels_of(dy) * hat_of(x, 1e-5)).sum(1)
    torch.testing.assert_close(along_x.double(), exact, rtol=1e-5, atol=1e-5)
    totals, one = torch.randn(2, 3), torch.ones(3)
    dx = input_gradient(kernels, dy, x, stats, None, totals, 10)
    expected = gradient_of(x, dy, 1e-5, one, totals)
    torch.testing.assert_close(channels_of(dx), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 1, 4, 5), (2, 1, 3, 4, 5)], ids=str)
def test_a_tensor_in_two_memory_formats_counts_as_contiguous(shape):
    assert channels.memory_format(torch.empty(shape)) is torch.contiguous_format


@every_strategy
@large_or_not
@pairwise(layout=LAYOUTS, upstream=LAYOUTS, channels=[1, 65])
def test_every_kernel_takes_every_layout(kernels, layout, upstream, channels, is_large):
    x = LAYOUTS[layout](torch.randn(4, channels, 3, 5))
    dy = LAYOUTS[upstream](torch.randn(4, channels, 3, 5))
    stats = statistics_of(*moments_of(x), x, 0.25, is_large)
    check_every_kernel(kernels, x, dy, stats, 0.25)
    if layout in ("contiguous", "channels_last"):
        y = normalized(kernels, x, stats, None, None)
        dx = input_gradient(kernels, dy, x, stats, None, torch.ones(2, channels), 10)
        assert y.stride() == dx.stride() == x.stride()


@every_strategy
@large_or_not
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_in_half_precision_have_their_own_dtype(kernels, dtype, is_large):
    x = torch.randn(4, 3, 2, 5).to(dtype)
    stats = statistics_of(*moments_of(x), x, is_large=is_large)
    ones = torch.ones(3)
    assert normalized(kernels, x, stats, ones, ones).dtype == dtype
    dx = input_gradient(kernels, x, x, stats, ones, torch.ones(2, 3), 10)
    assert dx.dtype == dtype
    assert kernels.reduce(x, x, stats).dtype == torch.float32


class WithoutFloat64(TorchDispatchMode):
    """Raises where a tensor in float64 is on an accelerator."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
                assert tensor.dtype != torch.float64, op
        return results


@pytest.mark.skipif(torch.__version__ < "2.5", reason="fakes no device that it lacks")
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5, 5), (0, 4)], ids=str)
def test_a_device_without_float64_leaves_the_statistics_to_the_cpu(shape):
    with FakeTensorMode(), torch.no_grad(), WithoutFloat64():
        x, bias = torch.empty(shape, device="mps"), torch.empty(4, device="mps")
        moments = PLAIN.moments(x, 1e-5)
        stats = kernel_statistics(10, *moments, shard_of(x, Denominator(1e-5)))
        y = PLAIN.affine(x, stats, None, bias)
        sums = PLAIN.reduce(y, x, stats)
        dx = input_gradient(PLAIN, y, x, stats, None, sums, 10)
    assert {(t.device.type, t.dtype) for t in moments} == {("cpu", torch.float64)}
    assert {(t.device.type, t.dtype) for t in (sums, y, dx)} == {("mps", torch.float32)}
