"""The per-device kernels against float64, one at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn import channels, kernels, sums
from syncbn import moments as statistics

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x], -1)[..., ::2].clone(memory_format=torch.preserve_format),
    "expanded": lambda x: x[:1].expand_as(x),
}


def channels_of(x: torch.Tensor) -> torch.Tensor:
    return x.double().transpose(0, 1).flatten(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3, 65])
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
    ids=str,
)
def test_moments_are_mean_and_biased_variance(layout, channels, dtype, rtol):
    x = LAYOUTS[layout](torch.randn(4, channels, 3, 5).to(dtype))
    mean, var = statistics.moments(x)
    assert mean.dtype == var.dtype == torch.float64
    values = channels_of(x)
    torch.testing.assert_close(mean.double(), values.mean(1), rtol=rtol, atol=rtol)
    torch.testing.assert_close(var.double(), values.var(1, correction=0), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("mean", [0, 1e2, 1e3, 1e4, -1e6])
def test_the_variance_does_not_suffer_from_a_large_mean(mean):
    x = torch.randn(65536, 2) + mean
    exact = x.double().var(0, correction=0)
    mean_of_x, var = statistics.moments(x)
    torch.testing.assert_close(var, exact, rtol=2e-7, atol=0)
    # Half an ulp of values about one; a float32 mean would be off by half an ulp of the mean.
    torch.testing.assert_close(mean_of_x, x.double().mean(0), rtol=0, atol=2**-24)


@pytest.mark.parametrize("mean", [0, 1, 3.9, 4.1, 20, 1e3])
@pytest.mark.parametrize("shape", [(8, 3, 56, 56), (2, 3, 7, 7), (16, 3, 512), (1, 3, 200, 300)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_variance_has_the_digits_of_float32_whatever_the_mean(mean, shape, layout):
    x = torch.randn(shape) + mean + torch.randn(shape[0], *[1] * (len(shape) - 1))
    if layout == "channels_last" and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    exact = channels_of(x)
    center, var = statistics.moments(x)
    # Where the channels are last torch's kernels add one value after the other.
    rtol = 2e-5 if layout == "channels_last" else 1e-6
    torch.testing.assert_close(var, exact.var(1, correction=0), rtol=rtol, atol=0)
    torch.testing.assert_close(center, exact.mean(1), rtol=1e-6, atol=rtol)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("first", [0, 1, 30])
@pytest.mark.parametrize("mean", [0, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(70000, 3), (9, 5, 41, 29), (2, 70, 100, 90), (1, 3, 7, 41, 29)]
)
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_the_moments_of_many_values_are_those_of_float64(layout, shape, dtype, mean, first):
    """However they are cut, and however far the first sample is from the others."""
    x = torch.randn(shape) + mean
    x[0] += first
    x = layout(x.to(dtype))
    values = channels_of(x)
    var, means = torch.var_mean(values, 1, correction=0)
    own_mean, own_var = statistics.moments(x)
    # At most a thousand are added one by one, each with an error of 6e-8.
    torch.testing.assert_close(own_var, var, rtol=1e-5, atol=0)
    assert ((own_mean - means).abs() <= 5e-6 * var.sqrt()).all()


def test_first_samples_far_from_the_others_cost_no_digits():
    """A guess of the mean is that of the first, and all products are rounded alike here."""
    x = torch.where(torch.rand(20_000, 3, 16) < 0.5, 2.59, 3.37)
    x[:4] += 100.123
    exact = channels_of(x).var(1, correction=0)
    torch.testing.assert_close(statistics.moments(x)[1], exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mean", [0, -2])
@pytest.mark.parametrize("replaced", [torch.relu, lambda x: (x > 1.5).float()])
def test_tokens_are_added_as_exactly_as_by_torch(replaced, mean):
    """``(B, L, C)`` as ``(B, C, L)``, which torch adds in pairs; many summands are alike."""
    x = replaced(torch.randn(64, 196, 16) + mean).transpose(1, 2)
    exact = channels_of(x).var(1, correction=0)
    plain = torch.nn.BatchNorm1d(16, momentum=1.0)
    plain(x)
    n = len(x) * x.size(2)
    own = (plain.running_var.double() * (n - 1) / n - exact).abs()
    ulp = torch.finfo(x.dtype).eps * exact
    assert ((statistics.moments(x)[1] - exact).abs() <= 2 * own.amax() + 8 * ulp).all()


@pytest.mark.parametrize("shape", [(300_000, 2, 3), (100_000, 2), (70, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_samples_of_a_large_mean(dtype, shape):
    x = (torch.randn(shape) + (1e5 if dtype is torch.float32 else 300)).to(dtype)
    values = channels_of(x)
    mean, var = statistics.moments(x)
    torch.testing.assert_close(var, values.var(1, correction=0), rtol=2e-7, atol=0)
    torch.testing.assert_close(mean, values.mean(1), rtol=0, atol=1e-7)


class LargestFloat32(TorchDispatchMode):
    """Looks for the largest tensor in float32."""

    values = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if tensor.dtype == torch.float32:
                self.values = max(self.values, tensor.numel())
        return result


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_tensors_in_half_precision_are_rounded_once(dtype, layout, is_large):
    """They are computed in pieces, in float32."""
    x, dy = (layout(t.to(dtype)) for t in torch.randn(2, 5, 8, 300, 64))
    mean, scale, slope, offset = torch.randn(4, 8, dtype=torch.float64)
    center = kernels.center_of(mean, x, is_large)
    with LargestFloat32() as largest:
        dx = kernels.input_gradient(dy, x, center, scale, slope, offset)
    assert largest.values <= x.numel() - x[0].numel()
    assert dx.dtype == dtype and dx.stride() == x.stride()
    of_channels = (slope[:, None] * (channels_of(x) - mean[:, None]), offset[:, None])
    exact = sum(of_channels) + scale[:, None] * channels_of(dy)
    half_ulp = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((channels_of(dx) - exact).abs() <= 1.02 * half_ulp + 1e-6).all()
    y = kernels.input_gradient(None, x, center, None, slope, offset)
    torch.testing.assert_close(channels_of(y), sum(of_channels), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_large", [False, True])
def test_results_have_the_strides_of_their_format_where_a_dimension_has_length_one(is_large):
    """torch's batch norm takes others for those of another format."""
    odd = torch.randn(5, 4, 3).permute(2, 0, 1)[None]
    usual = odd.clone(memory_format=torch.channels_last)
    assert odd.stride() != usual.stride() and odd.is_contiguous(memory_format=torch.channels_last)
    center = kernels.center_of(torch.randn(3, dtype=torch.float64), odd, is_large)
    one, zero = torch.ones(3), torch.zeros(3)
    y = kernels.normalize(odd, center, one, 0.0, None, None)
    dx = kernels.input_gradient(odd, odd, center, one, one, zero)
    assert (y.stride(), dx.stride()) == (usual.stride(), usual.stride())
    torch.testing.assert_close(y, kernels.normalize(usual, center, one, 0.0, None, None))


@pytest.mark.parametrize(
    "shape", [(4, 3, 64, 64), (2, 3, 16, 32, 32), (4, 3, 4096), (4096, 3)], ids=str
)
def test_the_sum_of_equal_values_loses_no_digits_where_channels_are_last(shape):
    x, dy = torch.randn(shape), torch.rand(3).view(1, 3, *[1] * (len(shape) - 2)).expand(shape)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    center = kernels.center_of(torch.zeros(3, dtype=torch.float64), x, is_large=False)
    for upstream in (dy, dy.contiguous(), dy.movedim(1, -1).contiguous().movedim(-1, 1)):
        along_x, plain = kernels.reduce(upstream, x, center, torch.ones(3), 0.0)
        exact = channels_of(dy).sum(1)
        torch.testing.assert_close(plain.double(), exact, rtol=1e-6, atol=0)
        exact = (channels_of(dy) * channels_of(x)).sum(1)
        torch.testing.assert_close(along_x.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(4, 3, 256, 257), (4, 300, 50, 50), (8, 3, 65536), (2**17, 3)])
def test_the_sum_along_x_loses_no_digits_where_channels_are_last(shape):
    x = torch.randn(shape).movedim(1, -1).contiguous().movedim(-1, 1)
    center = kernels.center_of(torch.zeros(shape[1], dtype=torch.float64), x, is_large=False)
    along_x, plain = kernels.reduce(x, x, center, torch.ones(shape[1]), 0.0)
    exact = channels_of(x).square().sum(1)
    torch.testing.assert_close(along_x.double(), exact, rtol=5e-6, atol=0)
    torch.testing.assert_close(plain.double(), channels_of(x).sum(1), rtol=0, atol=1e-3)


DATA = {
    "normal": torch.randn,
    "mask": lambda *shape: (torch.rand(shape) < 0.5).float(),
    "two values": lambda *shape: torch.where(torch.rand(shape) < 0.5, 0.3, -0.3),
    "rectified": lambda *shape: torch.randn(shape).relu(),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(
    "shape", [(2, 3, 128, 256), (8, 3, 64, 64), (4, 3, 1009), (16, 3, 56, 56), (9, 3, 16, 12, 7)]
)
def test_the_moments_are_no_worse_than_torchs(kind, shape):
    """Where all products are alike they are rounded alike."""
    x = DATA[kind](*shape)
    n = x.numel() // 3
    exact = channels_of(x)
    plain = torch.nn.BatchNorm1d(3, momentum=1.0)
    plain(x.flatten(2))
    own = torch.stack((plain.running_mean, plain.running_var * (n - 1) / n)).double()
    right = torch.stack((exact.mean(1), exact.var(1, correction=0)))
    error = (statistics.moments(x) - right).abs()
    mean, var = right
    ulp = torch.finfo(x.dtype).eps * torch.stack((mean.abs().maximum(var.sqrt()), var))
    assert (error <= 2 * (own - right).abs() + ulp).all()


@pytest.mark.parametrize(
    "shape", [(1, 3, 4, 5), (1, 8, 1, 5), (3, 4, 1, 1), (1, 1, 6, 1)], ids=str
)
@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last", "viewed", "image"])
@pytest.mark.parametrize("dy_layout", ["contiguous", "channels_last", "viewed", "image"])
def test_dimensions_of_length_one_may_have_any_stride(shape, x_layout, dy_layout):
    layouts = {
        **LAYOUTS,
        "viewed": lambda x: (y := LAYOUTS["channels_last"](x)).view_as(y),
        "image": lambda x: x.permute(0, 2, 3, 1).contiguous()[0].permute(2, 0, 1)[None],
    }
    x, dy = torch.randn(2, *shape)
    x = layouts[x_layout](x) if shape[0] == 1 or x_layout != "image" else x
    dy = layouts[dy_layout](dy) if shape[0] == 1 or dy_layout != "image" else dy
    mean, var = moments = statistics.moments(x)
    values = channels_of(x)
    expected = torch.stack((values.mean(1), values.var(1, correction=0)))
    torch.testing.assert_close(moments, expected, rtol=1e-5, atol=1e-6)
    center = kernels.center_of(mean, x, is_large=False)
    hat = (values - mean[:, None]) / (var + 1)[:, None].sqrt()
    y = kernels.normalize(x, center, var, 1.0, None, None)
    torch.testing.assert_close(channels_of(y), hat, rtol=1e-5, atol=1e-5)
    along_x, plain = kernels.reduce(dy, x, center, var, 1.0)
    expected_sums = (channels_of(dy) * hat).sum(1), channels_of(dy).sum(1)
    torch.testing.assert_close(
        (along_x.double(), plain.double()), expected_sums, rtol=1e-5, atol=1e-5
    )
    one = torch.ones_like(mean)
    dx = kernels.input_gradient(dy, x, center, one, one, 0 * one)
    expected_dx = channels_of(dy) + values - mean[:, None]
    torch.testing.assert_close(channels_of(dx), expected_dx, rtol=1e-5, atol=1e-5)


def with_odd_strides(x: torch.Tensor, layout: str, generator: random.Random) -> torch.Tensor:
    """The same values in one format, with any strides where a dimension has length 1."""
    x = LAYOUTS[layout](x)
    steps = zip(x.shape, x.stride(), strict=True)
    strides = [generator.choice((0, 1, 17, 170)) if n == 1 else step for n, step in steps]
    return x.as_strided(x.shape, strides)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 17, 10, 1), (1, 17, 5, 5), (6, 17, 1, 1), (4, 1, 9, 1)])
def test_sums_are_rounded_once_whatever_the_strides(shape, dtype):
    """Once the bias gradient was rounded to bfloat16: torch's kernel had misread the format."""
    x, dy = torch.randn(2, *shape).to(dtype)
    mean, var = statistics.moments(x)
    center = kernels.center_of(mean, x, is_large=False)
    hat = (channels_of(x) - mean[:, None]) / (var + 1)[:, None].sqrt()
    expected = (channels_of(dy) * hat).sum(1), channels_of(dy).sum(1)
    generator = random.Random(0)
    for _ in range(20):
        odd_x = with_odd_strides(x, generator.choice(["contiguous", "channels_last"]), generator)
        odd_dy = with_odd_strides(dy, generator.choice(["contiguous", "channels_last"]), generator)
        sums = kernels.reduce(odd_dy, odd_x, center, var, 1.0)
        torch.testing.assert_close(tuple(s.double() for s in sums), expected, rtol=1e-6, atol=2e-6)


def test_a_constant_channel_has_no_variance():
    x = torch.full((1000, 3), 0.1)
    mean, var = statistics.moments(x)
    assert torch.equal(mean, x[0].double())
    assert torch.equal(var, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("mean", [1e2, 1e4, -1e6])
def test_normalizing_and_its_gradient_do_not_suffer_from_a_large_mean(mean):
    x, dy = torch.randn(512, 3, 4) + mean, torch.randn(512, 3, 4)
    moments = statistics.moments(x)
    assert statistics.has_large_mean(moments)
    mean, var = moments
    center = kernels.center_of(mean, x, is_large=True)
    one = torch.ones(3, dtype=torch.float64)
    hat = (x.double() - mean[:, None]) / var.sqrt()[:, None]
    y = kernels.normalize(x, center, var, 0.0, None, None)
    torch.testing.assert_close(y.double(), hat, rtol=1e-6, atol=1e-6)
    along_x, _ = kernels.reduce(dy, x, center, var, 0.0)
    torch.testing.assert_close(along_x.double(), (dy * hat).sum((0, 2)), rtol=1e-5, atol=1e-5)
    dx = kernels.input_gradient(dy, x, center, one, -one, 0 * one)
    expected = dy - (x.double() - mean[:, None])
    torch.testing.assert_close(dx.double(), expected, rtol=1e-6, atol=1e-6)


def test_large_half_precision_values_do_not_overflow():
    x = torch.full((1 << 15, 1, 32), 6e4, dtype=torch.float16)
    x[::2] *= -1
    mean, var = statistics.moments(x)
    assert abs(mean.item()) < 1e-3
    assert var.item() == pytest.approx(float(x[0, 0, 0]) ** 2, rel=1e-6)


def test_a_sample_in_half_precision_may_be_larger_than_a_piece():
    x = torch.randn(2, 1, sums.BLOCK + 16, dtype=torch.bfloat16)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    center = kernels.center_of(zero, x, is_large=False)
    y = kernels.input_gradient(None, x, center, None, 2 * one, zero)
    assert torch.equal(y, 2 * x)


def test_the_mean_of_infinite_values_is_torchs():
    inf = float("inf")
    x = torch.tensor([[inf, -inf, inf, 1.0], [1.0, 2.0, -inf, 3.0]])
    mean, _ = statistics.moments(x)
    torch.testing.assert_close(mean, x.double().mean(0), equal_nan=True)


def test_without_channels_there_are_no_values():
    x = torch.empty(2, 0, 4)
    assert channels.values_per_channel(x) == 0
    assert statistics.moments(x).shape == (2, 0)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 1, 4, 5), (2, 1, 3, 4, 5)], ids=str)
def test_what_has_two_memory_formats_counts_as_contiguous(shape):
    assert channels.memory_format(torch.empty(shape)) is torch.contiguous_format


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0, 4), (0, 3, 0, 0, 0)], ids=str)
def test_every_kernel_takes_an_empty_shard(shape):
    x = torch.randn(shape)
    ones = torch.ones(3, dtype=torch.float64)
    assert channels.values_per_channel(x) == 0
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(statistics.moments(x), zeros)
    for is_large in (False, True):
        center = kernels.center_of(ones, x, is_large)
        assert kernels.normalize(x, center, ones, 0.0, ones, ones).shape == x.shape
        assert torch.equal(torch.stack(kernels.reduce(x, x, center, ones, 0.0)), zeros.float())
        assert kernels.input_gradient(x, x, center, ones, ones, ones).shape == x.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("upstream", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 3, 65])
@pytest.mark.parametrize("is_large", [False, True])
def test_every_kernel_takes_every_layout(layout, upstream, channels, is_large):
    x = LAYOUTS[layout](torch.randn(4, channels, 3, 5))
    dy = LAYOUTS[upstream](torch.randn(4, channels, 3, 5))
    mean, scale, slope, offset = torch.randn(4, channels, dtype=torch.float64)
    var = torch.rand(channels, dtype=torch.float64) + 0.5
    view = (1, -1, 1, 1)
    center = kernels.center_of(mean, x, is_large)

    hat = (x.double() - mean.view(view)) / (var + 0.25).sqrt().view(view)
    for weight, bias in ((None, None), (scale, None), (None, offset), (scale, offset)):
        expected = hat * (1 if weight is None else weight.view(view))
        expected = expected + (0 if bias is None else bias.view(view))
        y = kernels.normalize(x, center, var, 0.25, weight, bias)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)

    along_x, plain = (sums.double() for sums in kernels.reduce(dy, x, center, var, 0.25))
    torch.testing.assert_close(plain, channels_of(dy).sum(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(along_x, channels_of(dy * hat).sum(1), rtol=1e-5, atol=1e-4)

    dx = kernels.input_gradient(dy, x, center, scale, slope, offset)
    expected = (
        scale.view(view) * dy.double()
        + slope.view(view) * (x.double() - mean.view(view))
        + offset.view(view)
    )
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_output_keeps_the_memory_format(layout):
    x = LAYOUTS[layout](torch.randn(4, 3, 2, 5))
    ones = torch.ones(3, dtype=torch.float64)
    for is_large in (False, True):
        center = kernels.center_of(ones, x, is_large)
        assert kernels.normalize(x, center, ones, 0.0, None, None).stride() == x.stride()
        assert kernels.input_gradient(None, x, center, None, ones, ones).stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_comes_back_in_its_own_dtype(dtype):
    x = torch.randn(4, 3, 2, 5).to(dtype)
    ones = torch.ones(3, dtype=torch.float64)
    for is_large in (False, True):
        center = kernels.center_of(ones, x, is_large)
        for parameter in (None, ones.float(), ones.to(dtype)):
            y = kernels.normalize(x, center, ones, 0.0, parameter, parameter)
            assert y.dtype == dtype
        assert kernels.input_gradient(x, x, center, ones, ones, ones).dtype == dtype
        assert {s.dtype for s in kernels.reduce(x, x, center, ones, 0.0)} == {torch.float32}


def test_merging_the_moments_of_parts_gives_those_of_the_whole():
    parts = [torch.randn(n, 4, dtype=torch.float64) * n + n for n in (1, 5, 0, 17)]
    counts = torch.tensor([[[float(len(part))]] for part in parts], dtype=torch.float64)
    stats = torch.stack([statistics.moments(part) for part in parts])
    merged = statistics.merge(counts / counts.sum(), stats)
    torch.testing.assert_close(merged, statistics.moments(torch.cat(parts)))


class WithoutFloat64(TorchDispatchMode):
    """Raises where a tensor in float64 is on an accelerator."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                assert tensor.dtype != torch.float64, op
        return results


@pytest.mark.skipif(torch.__version__ < "2.5", reason="fakes no device that it lacks")
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5, 5), (0, 4)], ids=str)
def test_a_device_without_float64_leaves_the_statistics_to_the_cpu(shape):
    with FakeTensorMode(), torch.no_grad(), WithoutFloat64():
        x, bias = torch.empty(shape, device="mps"), torch.empty(4, device="mps")
        mean, var = moments = statistics.moments(x)
        center = kernels.center_of(mean, x, is_large=True)
        y = kernels.normalize(x, center, var, 1e-5, None, bias)
        sums = kernels.reduce(y, x, center, var, 1e-5)
        dx = kernels.input_gradient(y, x, center, var, var, var)
    assert (moments.device.type, moments.dtype) == ("cpu", torch.float64)
    assert {(t.device.type, t.dtype) for t in (*sums, y, dx)} == {("mps", torch.float32)}
