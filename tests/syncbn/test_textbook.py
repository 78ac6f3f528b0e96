"""The textbook on one shard: against torch's layer in float64."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from syncbn.statistics import Epsilon
from syncbn.textbook import exact_batch_norm
from tests.kit.properties import pairwise
from tests.kit.shards import LAYOUTS, channels_last, with_odd_strides


def normalized(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The output of a batch of one shard."""
    return exact_batch_norm(x, weight, bias, Epsilon(eps), lambda sums: sums)[0]


def step(function: Callable[..., Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    leaves = [x.detach().requires_grad_()]
    generator = torch.Generator().manual_seed(0)
    for mean in (0.5, 0.0):
        vector = torch.randn(x.size(1), generator=generator) + mean
        leaves.append(vector.to(dy.dtype if dy.dtype == torch.float64 else torch.float32))
        leaves[-1].requires_grad_()
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, eps=1e-5)


# -- outputs and gradients ---------------------------------------------------------------------


@pairwise(
    layout=LAYOUTS,
    upstream=LAYOUTS,
    channels=[1, 65],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
)
def test_every_layout_gives_the_numbers_of_float64(layout, upstream, channels, dtype):
    x = LAYOUTS[layout](torch.randn(4, channels, 3, 5).to(dtype))
    dy = LAYOUTS[upstream](torch.randn(4, channels, 3, 5).to(dtype))
    ours, exact = step(normalized, x, dy), step(plain, x.double(), dy.double())
    rounding = 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    for got, want in zip(ours[:2], exact[:2], strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=rounding, atol=max(rounding, 1e-6))
    rounding = min(rounding, 1e-5)
    for got, want in zip(ours[2:], exact[2:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=rounding, atol=1e-5)
    if layout == upstream and layout in ("contiguous", "channels_last"):
        assert ours[0].stride() == ours[1].stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 17, 10, 1), (1, 17, 5, 5), (6, 17, 1, 1), (4, 1, 9, 1)])
def test_dimensions_of_length_one_may_have_any_stride(shape, dtype):
    """torch's kernels may take them for another memory format."""
    x, dy = torch.randn(2, *shape).to(dtype)
    exact = step(plain, x.double(), dy.double())
    generator, rounding = random.Random(0), 2 * torch.finfo(dtype).eps
    for _ in range(20):
        odd = [
            with_odd_strides(t, generator.choice(["contiguous", "channels_last"]), generator)
            for t in (x, dy)
        ]
        for got, want in zip(step(normalized, *odd), exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=rounding, atol=max(rounding, 1e-5))


@pytest.mark.parametrize("shape", [(512, 3), (64, 3, 8), (16, 3, 8, 4)], ids=str)
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("mean", [0, 7.9, 8.1, 1e2, 1e4, -1e6])
def test_errors_are_at_most_twice_those_of_torchs_layer(shape, layout, mean):
    x, dy = layout(torch.randn(shape) + mean), torch.randn(shape)
    exact = step(plain, x.double(), dy.double())
    for own, theirs, want in zip(step(normalized, x, dy), step(plain, x, dy), exact, strict=True):
        ulp = torch.finfo(torch.float32).eps * want.abs().max()
        assert (own - want).abs().max() <= 2 * (theirs - want).abs().max() + 2 * ulp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
@pytest.mark.parametrize("value", [0.1, -3.7, 1e4, 1e11])
def test_a_constant_channel_gives_the_bias_exactly(value, layout, dtype):
    """Its mean may be rounded, above all where channels are last and added one by one."""
    x = layout(torch.full((70, 2, 16, 9), value, dtype=dtype)).requires_grad_()
    bias = torch.randn(2, dtype=dtype)
    y = normalized(x, None, bias)
    assert torch.equal(y, bias.view(1, 2, 1, 1).expand_as(y))
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert dx.isfinite().all()


@pytest.mark.parametrize(("deviation", "mean"), [(1e-10, 0), (1e15, 0), (1e-6, 1)])
def test_extreme_deviations(deviation, mean):
    x, dy, eps = torch.randn(6, 3) * deviation + mean, torch.randn(6, 3), 0.1 if mean else 1e-30
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, want = normalized(leaf, eps=eps), normalized(exact, eps=eps)
    torch.testing.assert_close(y, want.float(), rtol=1e-5, atol=0)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (want,) = torch.autograd.grad(want, exact, dy.double())
    torch.testing.assert_close(dx.double() * deviation, want * deviation, rtol=1e-5, atol=1e-5)


# -- derivatives of any order ------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_derivatives_of_any_order_are_exact(mean):
    x = (torch.randn(4, 2, 2, dtype=torch.float64) + mean).requires_grad_()
    weight, bias = torch.randn(2, 2, dtype=torch.float64).requires_grad_().unbind()
    inputs = x, weight.detach().requires_grad_(), bias.detach().requires_grad_()
    assert gradcheck(normalized, inputs)
    assert gradgradcheck(normalized, inputs)

    def second(x: Tensor, weight: Tensor) -> Tensor:
        y = normalized(x, weight).exp().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        (again,) = torch.autograd.grad(dx.square().sum(), x, create_graph=True)
        return again

    assert gradcheck(second, inputs[:2], atol=1e-4, rtol=1e-4)
