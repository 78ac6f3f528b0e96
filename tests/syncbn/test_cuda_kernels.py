"""How the kernels of CUDA are called, with stand-ins for them that compute on the CPU.

What they compute is written down here as `torch.nn.SyncBatchNorm` relies on it; that CUDA does so
`tests/test_cuda.py` shows where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncbn import channels, cuda_kernels, kernels
from syncbn import moments as statistics


def shaped(vector: Tensor | None, like: Tensor, default: float) -> Tensor:
    vector = torch.full((like.size(1),), default) if vector is None else vector
    return vector.double().view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = channels.reduced_dims(x)
    var = x.double().var(dims, correction=0)
    assert eps > 0  # else the inverse of no deviation is zero
    dtype = channels.accumulation_dtype(x.dtype)
    return x.double().mean(dims).to(dtype), (var + eps).rsqrt().to(dtype)


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    eps: float,
) -> Tensor:
    hat = (x.double() - shaped(mean, x, 0)) * shaped(inverse, x, 0)
    return (hat * shaped(weight, x, 1) + shaped(bias, x, 0)).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    assert dy.stride() == x.stride()
    assert wanted == (True, False, False)
    dims = channels.reduced_dims(x)
    along_x = (dy.double() * (x.double() - shaped(mean, x, 0))).sum(dims)
    return dy.double().sum(dims).to(mean), along_x.to(mean), None, None


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    plain: Tensor,
    along_x: Tensor,
    count: Tensor,
) -> Tensor:
    assert dy.stride() == x.stride()
    assert count.dtype == torch.int32
    total = int(count.sum())
    s = shaped(inverse, x, 0)
    centered = x.double() - shaped(mean, x, 0)
    dx = (
        dy.double() - shaped(plain, x, 0) / total - centered * s**2 * shaped(along_x, x, 0) / total
    )
    return (dx * s * shaped(weight, x, 1)).to(x.dtype)


STAND_INS: list[Any] = [
    batch_norm_stats,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in STAND_INS:
        assert hasattr(torch, stand_in.__name__)
        monkeypatch.setattr(torch, stand_in.__name__, stand_in)


SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 6), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_they_give_the_numbers_of_the_cpu(shape, last, dtype):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    x, dy = torch.randn(2, *shape).to(dtype)
    if last and layout is not None:
        x = x.contiguous(memory_format=layout)
    acc = channels.accumulation_dtype(dtype)
    mean, var = moments = statistics.moments(x)
    torch.testing.assert_close(cuda_kernels.moments(x), moments, rtol=1e-5, atol=1e-6)

    weight, bias, slope, offset = torch.randn(4, 3, dtype=acc)
    weight[0] = slope[0] = offset[0] = 0  # a channel that is switched off
    center = kernels.center_of(mean, x, is_large=False)
    inverse = (var + 1e-5).rsqrt().to(acc)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {}
    for w, b in ((weight, bias), (None, None)):
        y = cuda_kernels.normalize(x, center.head, inverse, w, b)
        expected = kernels.normalize(x, center, var, 1e-5, w, b)
        torch.testing.assert_close(y, expected, **tolerance)
    sums = cuda_kernels.reduce(dy, x, center.head, inverse)
    expected_sums = kernels.reduce(dy, x, center, var, 1e-5)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-4)
    dx = cuda_kernels.input_gradient(dy, x, center.head, weight, slope, offset)
    expected = kernels.input_gradient(dy, x, center, weight, slope, offset)
    torch.testing.assert_close(dx, expected, **tolerance)


def test_a_constant_channel_has_no_variance():
    mean, var = cuda_kernels.moments(torch.full((10, 2, 3), 0.5))
    assert mean.tolist() == [0.5, 0.5]
    assert var.tolist() == pytest.approx([0, 0], abs=1e-36)
