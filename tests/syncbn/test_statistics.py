"""Moments of the whole batch from those of its parts, and the running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncbn.formula import with_derivatives
from syncbn.statistics import (
    Denominator,
    LayerCall,
    Moments,
    RunningStatistics,
    all_match,
    merge,
)


def moments_of(x: Tensor) -> Moments:
    """The moments of values ``(n, C)``, of which there may be none."""
    mean = x.double().sum(0) / max(1, len(x))
    return Moments(len(x), mean, (x.double() - mean).square().sum(0) / max(1, len(x)))


def merged(parts: list[Moments]) -> Moments:
    n = sum(part.n for part in parts)
    shares = torch.tensor([part.n / max(1, n) for part in parts], dtype=torch.float64)
    means, variances = (torch.stack(column) for column in list(zip(*parts, strict=True))[1:])
    return Moments(n, *merge(shares, means, variances))


SIZES = [[3], [2, 0, 5], [0, 1, 1], [0, 4], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_merging_the_moments_of_parts_gives_the_moments_of_the_whole(sizes, mean):
    x = torch.randn(sum(sizes), 4, dtype=torch.float64) * torch.tensor([1e-2, 1, 5, 0]) + mean
    batch, whole = merged([moments_of(part) for part in x.split(sizes)]), moments_of(x)
    assert batch.n == whole.n
    torch.testing.assert_close(batch.mean, whole.mean, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(batch.var, whole.var, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("value", [0.1, 1e11, -3.7e-30])
def test_equal_means_stay_as_they_are(value):
    """Weighted by thirds, they would be off by a unit in the last place."""
    constant = torch.tensor([value]).double()
    parts = [Moments(n, constant, torch.zeros_like(constant)) for n in (0, 7, 11, 3)]
    assert merged(parts)[1:] == (constant, torch.zeros_like(constant))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_known_moments_get_the_derivatives_of_the_merge(sizes):
    """Of first and second order, also where some parts are constants."""
    parts = [moments_of(torch.randn(n, 2)) for n in sizes]
    directions = torch.randn(2, 2, dtype=torch.float64)

    def derivatives(own: list[Moments], batch: Moments) -> list[Tensor]:
        inputs = [t for part in own for t in part[1:]]
        value = (batch.mean * directions[0]).exp() + (batch.var * directions[1]).cos()
        first = torch.autograd.grad(value.sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    for known in {0, len(parts) - 1}:  # the number of parts that are constants
        leaves = [Moments(p.n, *(t.clone().requires_grad_() for t in p[1:])) for p in parts]
        own = leaves[known:]
        torch.testing.assert_close(
            derivatives(own, with_derivatives(merged(parts), own)),
            derivatives(own, merged([*parts[:known], *own])),
        )


# -- running statistics ------------------------------------------------------------------------


def running(dtype: torch.dtype = torch.float32, momentum: Any = 0.25) -> RunningStatistics:
    return RunningStatistics(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), momentum)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("momentum", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("total", [0, 2, 8, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(8)])
def test_buffers_move_towards_mean_and_unbiased_variance(total, momentum, dtype):
    """They stay without a variance, which needs two values."""
    own = running(dtype, momentum)
    batch = torch.tensor([[3.0] * 3, [4.0] * 3]).double()
    batch[1] *= total > 1
    own.update(Moments(total, *batch))
    expected = [1.0, 1.0]
    if total > 1:
        expected = [0.75 + 3 / 4, 0.75 + float(total / (total - 1))]
    for buffer, value in zip(own[:2], expected, strict=True):
        torch.testing.assert_close(buffer, torch.full((3,), value, dtype=dtype))


def test_a_buffer_may_be_missing():
    batch = Moments(4, *torch.ones(2, 3).double())
    for missing in ({"mean": None}, {"var": None}, {"mean": None, "var": None}):
        running()._replace(**missing).update(batch)


# -- calls that match --------------------------------------------------------------------------

LEAF, FROZEN = torch.randn(6, requires_grad=True), torch.randn(6)
META, OTHER = torch.randn(6, requires_grad=True).to("meta"), torch.randn(6, device="meta")


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        (LEAF, LEAF, True),
        (LEAF * 1, LEAF * 1, False),
        (LEAF.view_as(LEAF), LEAF.view_as(LEAF), True),
        (FROZEN[:3], FROZEN[:3], True),
        (FROZEN[:3], FROZEN[::2], False),
        (FROZEN[:3], FROZEN[3:], False),
        (FROZEN, None, False),
        (None, FROZEN, False),
        (None, None, True),
        (LEAF, LEAF.detach(), False),
        (FROZEN, OTHER, False),
        (LEAF, META, False),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["weight", "bias"])
def test_parameters_match_if_they_are_copies(one, other, match, first):
    x, denominator = torch.randn(2, 6), Denominator(1e-5)
    pairs = [(p, None) if first else (None, p) for p in (one, one, other)]
    assert all_match([LayerCall(x, *pair, denominator) for pair in pairs]) is match


@pytest.mark.parametrize("other", [Denominator(0.5), Denominator(1e-5, clamps=True)], ids=repr)
def test_calls_with_other_denominators_do_not_match(other):
    calls = [LayerCall(torch.randn(2, 6), None, None, Denominator(1e-5))] * 2
    assert all_match(calls)
    assert not all_match([*calls, LayerCall(torch.randn(2, 6), None, None, other)])
