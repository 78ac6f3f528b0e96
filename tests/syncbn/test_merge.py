"""The statistics of the whole batch from the moments of its shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncbn.kernels import KERNELS, PLAIN
from syncbn.merge import (
    Denominator,
    RunningStatistics,
    all_match,
    kernel_statistics,
    merge_moments,
)
from tests.sharded import shard_of


def running(dtype: torch.dtype = torch.float32, momentum: Any = 0.25) -> RunningStatistics:
    return RunningStatistics(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), momentum)


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("clamps", [False, True], ids=["plus", "clamp"])
@pytest.mark.parametrize("sizes", [[3], [2, 0, 5], [0, 1, 1], [0, 4]], ids=str)
@pytest.mark.parametrize(
    "buffers",
    [
        running(),
        running(torch.float64),
        running(momentum=torch.tensor(0.25)),
        running()._replace(mean=None),
        running()._replace(var=None),
        RunningStatistics(),
    ],
    ids=["usual", "float64", "tensor", "no mean", "no var", "none"],
)
def test_moments_are_those_of_the_whole_batch(sizes, clamps, buffers):
    x = torch.randn(sum(sizes), 3, 2) * torch.tensor([0.1, 1, 3]).view(3, 1) + 2
    denominator = Denominator(0.25, clamps)
    shards = [shard_of(part, denominator) for part in x.split(sizes)]
    total, own = 2 * len(x), RunningStatistics(*map(copied, buffers))
    merge_moments(shards, False, lambda: own)
    var, mean = torch.var_mean(x.double(), (0, 2), correction=0)
    divisor = var.clamp(min=0.25) if clamps else var + 0.25
    for shard in shards:
        assert shard.stats.total == total
        expected = mean.float(), divisor.rsqrt().float()
        torch.testing.assert_close(shard.stats[1:3], expected)
        torch.testing.assert_close(shard.batch_mean_and_var(), (mean, var), rtol=1e-5, atol=1e-6)
    unbiased = var * total / (total - 1)
    for buffer, new in zip(own[:2], (mean, unbiased), strict=True):
        if buffer is not None:
            torch.testing.assert_close(buffer.double(), 0.75 + new / 4, rtol=1e-6, atol=1e-6)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_a_rounded_variance_is_never_negative():
    inverse = torch.tensor([1e-5]).rsqrt() * (1 + 1e-6)
    assert Denominator(1e-5).variance(inverse) == 0


@pytest.mark.parametrize("total", [0, 1, 2, 8])
def test_a_total_that_the_host_does_not_know(total):
    """The buffers stay without a variance, which needs two values."""
    own, mean, var = running(), torch.full((3,), 3.0).double(), torch.full((3,), 4.0).double()
    own.update(mean, var * (total > 1), torch.tensor(float(total)))
    expected = [1.0, 1.0]
    if total > 1:
        expected = [0.75 + 3 / 4, 0.75 + total / (total - 1)]
    assert own.mean is not None and own.var is not None
    torch.testing.assert_close(own.mean, torch.full((3,), expected[0]))
    torch.testing.assert_close(own.var, torch.full((3,), expected[1]))


def test_a_momentum_may_be_too_large_for_float32():
    own = running(momentum=1e39)
    own.update(torch.full((3,), 1 + 1e-38).double(), torch.ones(3).double(), 2)
    assert own.mean is not None and own.mean.isfinite().all()


@pytest.mark.parametrize("mean", [7.9, -8.1, 1e4, torch.nan])
def test_the_error_of_a_large_mean_is_kept(mean, monkeypatch):
    x, means = torch.randn(4, 2), torch.tensor([mean, 0.1], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    stats = kernel_statistics(8, means, ones, shard_of(x, Denominator(1e-5)))
    assert (stats.mean_error is None) == (mean == 7.9)
    monkeypatch.setitem(KERNELS, "cpu", PLAIN)  # which may be asynchronous
    stats = kernel_statistics(8, means, ones, shard_of(x, Denominator(1e-5)))
    assert stats.mean_error is not None and stats.mean_error.dtype == torch.float32
    exact = stats.mean.double() + stats.mean_error.double()
    torch.testing.assert_close(exact, means, rtol=1e-12, atol=1e-14, equal_nan=True)


LEAF, FROZEN = torch.randn(6, requires_grad=True), torch.randn(6)
META, OTHER = torch.randn(6, requires_grad=True).to("meta"), torch.randn(6, device="meta")


@pytest.mark.parametrize(
    ("one", "other", "alike"),
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
def test_parameters_are_alike_if_they_are_copies(one, other, alike, first):
    x, denominator = torch.randn(2, 6), Denominator(1e-5)
    pairs = [(p, None) if first else (None, p) for p in (one, one, other)]
    assert all_match([(x, *pair, denominator) for pair in pairs]) is alike


def test_copies_of_one_broadcast_are_alike():
    one, other = Broadcast.apply(LEAF)
    assert one.device != other.device
    assert all_match([(torch.randn(2, 6), w, None, Denominator(1e-5)) for w in (one, other)])


class Broadcast(torch.autograd.Function):
    """Makes copies on two devices by one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), torch.empty_like(x, device="meta")


@pytest.mark.parametrize("other", [Denominator(0.5), Denominator(1e-5, clamps=True)], ids=repr)
def test_calls_with_other_denominators_do_not_match(other):
    calls = [(torch.randn(2, 6), None, None, Denominator(1e-5))] * 2
    assert all_match(calls)
    assert not all_match([*calls, (torch.randn(2, 6), None, None, other)])


def test_a_shard_knows_what_needs_a_gradient():
    x, w, b = (torch.randn(2, 2) for _ in range(3))
    for needed in ((), (x,), (w,), (b,), (x, w, b)):
        for tensor in (x, w, b):
            tensor.requires_grad_(any(tensor is one for one in needed))
        for records in (True, False):
            with torch.set_grad_enabled(records):
                shard = shard_of(x, Denominator(1e-5), w, b)
            assert shard.records_graph is records
            assert shard.needs_dx is (records and x.requires_grad)


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize(
    ("shape", "values"),
    [((4, 2, 3), 12), ((0, 2), 0), ((2, 3, 0, 4), 0), ((0, 3, 0, 0, 0), 0), ((4, 0, 3), 0)],
)
def test_a_shard_counts_the_values_of_a_channel(shape, values):
    shard = shard_of(torch.randn(shape), Denominator(1e-5))
    assert shard.values == values
    assert shard.dtype == torch.float32
    assert shard_of(torch.randn(shape).double(), Denominator(1e-5)).dtype == torch.float64
    mean, var = shard.mean_and_var()
    assert mean.isfinite().all() and var.isfinite().all()
