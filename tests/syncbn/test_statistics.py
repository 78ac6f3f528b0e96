"""The parts' moments are merged to the batch's, and running statistics are updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncbn.statistics import Moments, RunningStatistics

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
