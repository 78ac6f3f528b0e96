"""Moments of tensors on the CPU and of several sets, against float64."""

from __future__ import annotations

import pytest
import torch

from syncbn import moments as statistics
from tests.layouts import LAYOUTS, channels_last, channels_of
from tests.pairwise import pairwise


@pairwise(
    layout=LAYOUTS,
    channels=[1, 3, 65],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
)
def test_moments_are_mean_and_biased_variance(layout, channels, dtype):
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
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


@pytest.mark.parametrize("shape", [(64, 3), (40_000, 2), (4, 3, 80, 80)], ids=str)
def test_a_small_variance_at_a_large_mean_has_the_digits_that_float64_leaves(shape):
    x = 1e8 + 1e-2 * torch.randn(shape, dtype=torch.float64)
    values = channels_of(x) - 1e8  # exact
    mean, var = statistics.moments(x)
    # The mean is rounded to 1.5e-8, a millionth of the deviation.
    torch.testing.assert_close(mean - 1e8, values.mean(1), rtol=0, atol=2e-8)
    torch.testing.assert_close(var, values.var(1, correction=0), rtol=1e-10, atol=0)


@pairwise(
    layout=[torch.clone, channels_last],
    shape=[
        (70000, 3),
        (16, 3, 2048),
        (8, 3, 56, 56),
        (9, 5, 41, 29),
        (2, 70, 100, 90),
        (1, 3, 200, 300),
        (1, 3, 7, 41, 29),
        (70000, 3, 1, 1, 1, 1),
    ],
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    mean=[0, 1, 3.9, 4.1, 50, 1e3],
    first=[0, 1, 30],
)
def test_the_moments_of_many_values_are_those_of_float64(layout, shape, dtype, mean, first):
    """However they are cut, and however far the first sample is from the others."""
    x = torch.randn(shape) + mean
    x[0] += first
    x = layout(x.to(dtype))
    values = channels_of(x)
    var, means = torch.var_mean(values, 1, correction=0)
    own_mean, own_var = statistics.moments(x)
    # Longer runs are added one by one where channels are last, and the longest in half precision.
    rtol = 1e-5
    if dtype == torch.float32:
        rtol = 1e-6 if x.is_contiguous() and x.dim() > 2 else 2e-6
    torch.testing.assert_close(own_var, var, rtol=rtol, atol=0)
    assert ((own_mean - means).abs() <= min(rtol, 5e-6) * var.sqrt()).all()


def test_first_samples_far_from_the_others_cost_no_digits():
    """The mean is estimated from the first values, and all products are rounded the same way."""
    x = torch.where(torch.rand(20_000, 3, 16) < 0.5, 2.59, 3.37)
    x[:4] += 100.123
    exact = channels_of(x).var(1, correction=0)
    torch.testing.assert_close(statistics.moments(x)[1], exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mean", [0, -2])
@pytest.mark.parametrize(
    "replaced", [torch.relu, lambda x: (x > 1.5).float()], ids=["relu", "mask"]
)
def test_tokens_are_added_as_exactly_as_by_torch(replaced, mean):
    """``(B, L, C)`` as ``(B, C, L)``, which torch adds in pairs. Many summands are equal."""
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
    """Equal products are rounded the same way."""
    x = DATA[kind](*shape)
    n = x.numel() // 3
    exact = channels_of(x)
    plain = torch.nn.BatchNorm1d(3, momentum=1.0)
    plain(x.flatten(2))
    own = torch.stack((plain.running_mean, plain.running_var * (n - 1) / n)).double()
    right = torch.stack((exact.mean(1), exact.var(1, correction=0)))
    error = (torch.stack(statistics.moments(x)) - right).abs()
    mean, var = right
    ulp = torch.finfo(x.dtype).eps * torch.stack((mean.abs().maximum(var.sqrt()), var))
    assert (error <= 2 * (own - right).abs() + ulp).all()


def test_a_constant_channel_has_no_variance():
    x = torch.full((1000, 3), 0.1)
    mean, var = statistics.moments(x)
    assert torch.equal(mean, x[0].double())
    assert torch.equal(var, torch.zeros(3, dtype=torch.float64))


def test_large_half_precision_values_do_not_overflow():
    x = torch.full((1 << 15, 1, 32), 6e4, dtype=torch.float16)
    x[::2] *= -1
    mean, var = statistics.moments(x)
    assert abs(mean.item()) < 1e-3
    assert var.item() == pytest.approx(float(x[0, 0, 0]) ** 2, rel=1e-6)


def test_the_mean_of_infinite_values_is_torchs():
    inf = float("inf")
    x = torch.tensor([[inf, -inf, inf, 1.0], [1.0, 2.0, -inf, 3.0]])
    mean, _ = statistics.moments(x)
    torch.testing.assert_close(mean, x.double().mean(0), equal_nan=True)


def test_merging_the_moments_of_parts_gives_the_moments_of_the_whole():
    parts = [torch.randn(n, 4, dtype=torch.float64) * n + n for n in (1, 5, 17)]
    stats = zip(*[statistics.moments(part) for part in parts], strict=True)
    merged = statistics.merge([len(part) for part in parts], *stats)
    torch.testing.assert_close(merged, statistics.moments(torch.cat(parts)))
