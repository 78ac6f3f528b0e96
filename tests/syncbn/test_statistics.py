"""A shard is measured, the parts' moments are merged, and running statistics are updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncbn import statistics as measuring
from syncbn.statistics import Moments, RunningStatistics, moments
from tests.kit.properties import pairwise
from tests.kit.shards import batch_of, channels_last, channels_of

# -- moments of a shard ------------------------------------------------------------------------

#: Few values, rows of many, and many values in no such rows.
SHAPES = [(40, 3), (2, 3, 5, 4), (3, 5, 90, 70), (4, 2100, 3, 3), (70_000, 1)]


@pairwise(
    shape=SHAPES,
    layout=[torch.clone, channels_last],
    dtype=[torch.float32, torch.float64, torch.float16, torch.bfloat16],
    mean=[0, 15, 1e3],
)
def test_moments_are_those_of_float64(shape, layout, dtype, mean):
    x = layout(batch_of(shape, mean, dtype=dtype))
    exact = channels_of(x)
    got = moments(x)
    assert {vector.dtype for vector in got} == {torch.float64}
    # torch's kernel adds 70,000 values one by one.
    torch.testing.assert_close(got[0], exact.mean(1), rtol=1e-12, atol=3e-5)
    torch.testing.assert_close(got[1], exact.var(1, correction=0), rtol=2e-5, atol=0)


@pytest.mark.parametrize("mean", [1e4, -1e6])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_large_mean_keeps_the_digits_that_its_merge_needs(shape, mean):
    x = batch_of(shape, mean)
    exact = channels_of(x)
    torch.testing.assert_close(moments(x)[0], exact.mean(1), rtol=0, atol=3e-6)
    torch.testing.assert_close(moments(x)[1], exact.var(1, correction=0), rtol=1e-6, atol=0)


def test_rows_are_measured_in_chunks_of_any_size(monkeypatch):
    x = batch_of((3, 5, 90, 70))
    whole = moments(x)
    for chunk in (1, 6300, 3 * 6300, 4 * 6300 + 1):
        monkeypatch.setattr(measuring, "_CHUNK", chunk)
        for got, expected in zip(moments(x), whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e4, 1e11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_constant_channel_has_no_deviation(shape, dtype, value):
    x = torch.full(shape, value, dtype=dtype)
    mean, var = moments(x)
    assert mean.tolist() == [x.flatten()[0].double()] * shape[1]
    assert not var.any()


@pytest.mark.parametrize("first", [0.0, 1e3])
def test_a_first_value_far_from_the_others_costs_no_digits(first):
    x = torch.randn(5000, 3) + 1e4
    x[0] += first
    mean, var = moments(x)
    values = channels_of(x)
    torch.testing.assert_close(mean, values.mean(1), rtol=1e-12, atol=1e-5)
    torch.testing.assert_close(var, values.var(1, correction=0), rtol=1e-5, atol=0)


def test_large_half_precision_values_do_not_overflow():
    x = torch.full((1 << 15, 1, 32), 6e4, dtype=torch.float16)
    x[::2] *= -1
    mean, var = moments(x)
    assert abs(mean.item()) < 1e-3
    assert var.item() == pytest.approx(float(x[0, 0, 0]) ** 2, rel=1e-6)


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
