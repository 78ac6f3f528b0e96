"""The kernels of the CPU: against their contract in float64, and against torch's layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncbn import SynchronizedBatchNorm2d, kernels
from syncbn.channels import in_format_of
from syncbn.kernels import ON_CPU, kernels_for
from syncbn.statistics import moments
from tests.kit import stand_in_kernels as contract
from tests.kit.properties import pairwise
from tests.kit.shards import LAYOUTS, batch_of, channels_last, run_sharded

EPS = 1e-5

# -- each kernel against its contract ----------------------------------------------------------


def same(got: Any, expected: Any, dtype: torch.dtype) -> None:
    rounding = {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(
        [None if t is None else t.double() for t in got],
        [None if t is None else t.double() for t in expected],
        rtol=rounding,
        atol=rounding,
    )


@pairwise(
    layout=LAYOUTS,
    dtype=[torch.float64, torch.float32, torch.float16, torch.bfloat16],
    mean=[0, 60],
    affine=[False, True],
)
def test_passes_over_a_shard_are_those_of_the_contract(layout, dtype, mean, affine):
    x = LAYOUTS[layout](batch_of((4, 5, 6, 7), mean, dtype=dtype))
    dy = in_format_of(torch.randn(4, 5, 6, 7).to(dtype), x)
    accumulates = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = torch.randn(2, 5, dtype=accumulates) if affine else (None, None)
    own = ON_CPU.stats(x, EPS)
    rows = [vector[None] for vector in own]
    of_batch = ON_CPU.gather_stats(x, *rows, None, None, 0.1, EPS, torch.ones(1).double())
    assert of_batch[0].dtype == (torch.float64 if mean else accumulates)
    y = ON_CPU.elemt(x, weight, bias, *of_batch, EPS)
    assert y.dtype == dtype
    same([y], [contract.batch_norm_elemt(x, weight, bias, *own, EPS)], dtype)
    given = torch.full_like(x, 7.0)
    assert ON_CPU.elemt(x, weight, bias, *of_batch, EPS, out=given) is given
    assert torch.equal(given, y)
    args = dy, x, *of_batch, weight, True, affine, affine
    sums = ON_CPU.backward_reduce(*args)
    exact = contract.batch_norm_backward_reduce(*args)
    same(sums, exact, torch.float32)
    count = torch.tensor([168], dtype=torch.int32)
    dx = ON_CPU.backward_elemt(dy, x, *of_batch, weight, *sums[:2], count)
    assert dx.dtype == dtype
    args = dy, x, *own, weight, *exact[:2], count
    same([dx], [contract.batch_norm_backward_elemt(*args)], dtype)


@pytest.mark.parametrize("momentum", [0.1, 1])
@pytest.mark.parametrize("counts", [[4.0], [3.0, 5.0], [1e-300, 6.0, 1.0], [2.0, 1e-300]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_moments_are_merged_and_buffers_updated_as_in_the_contract(dtype, counts, momentum):
    means, inverses = torch.randn(len(counts), 3).double(), 1 + torch.rand(len(counts), 3).double()
    found = []
    for kernel in (ON_CPU.gather_stats, contract.batch_norm_gather_stats_with_counts):
        is_ours = kernel is ON_CPU.gather_stats
        buffers = [torch.full((3,), v, dtype=dtype if is_ours else torch.float64) for v in (2, 3)]
        like = means.to(torch.float64)
        args = (
            like,
            means,
            inverses,
            *buffers,
            momentum,
            EPS,
            torch.tensor(counts, dtype=torch.float64),
        )
        found.append([*kernel(*args), *buffers])
    same(found[0], found[1], dtype)


def test_buffers_change_unseen_by_autograd():
    """A forward on one device may have saved them."""
    buffers = torch.zeros(3), torch.ones(3)
    rows = torch.randn(1, 3).double(), torch.ones(1, 3).double()
    ON_CPU.gather_stats(rows[0], *rows, *buffers, 0.1, EPS, torch.full((1,), 4.0).double())
    assert buffers[0].all()
    assert [buffer._version for buffer in buffers] == [0, 0]


# -- against torch's layer ---------------------------------------------------------------------


def plain(x: Tensor, dy: Tensor) -> list[Tensor]:
    kind = nn.BatchNorm1d if x.dim() == 3 else nn.BatchNorm2d
    layer = kind(x.size(1), eps=EPS, dtype=x.dtype)
    leaf = x.clone().requires_grad_()
    layer(leaf).backward(dy)
    return [leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_var]


def ours(x: Tensor, dy: Tensor) -> list[Tensor]:
    """Of two shards."""
    parts, dys = x.tensor_split(2), dy.tensor_split(2)
    of_parts = [ON_CPU.stats(part, EPS) for part in parts]
    own = [torch.stack(vectors) for vectors in zip(*of_parts, strict=True)]
    counts = torch.tensor([len(part) * part[0, 0].numel() for part in parts])
    buffers = torch.zeros(x.size(1)), torch.ones(x.size(1))
    batch = ON_CPU.gather_stats(x, *own, *buffers, 0.1, EPS, counts.double())
    of_parts = [
        ON_CPU.backward_reduce(*both, *batch, torch.ones(x.size(1)), True, True, True)
        for both in zip(dys, parts, strict=True)
    ]
    plain, along, dweight, dbias = (a + b for a, b in zip(*of_parts, strict=True))
    dx = [
        ON_CPU.backward_elemt(*both, *batch, None, plain, along, counts.int())
        for both in zip(dys, parts, strict=True)
    ]
    return [torch.cat(dx), dweight, dbias, buffers[1]]


@pytest.mark.parametrize("mean", [0, 15, 17, 1e2, 1e4, -1e6])
@pytest.mark.parametrize("shape", [(64, 3, 8), (16, 3, 8, 4), (12, 5, 90, 70)], ids=str)
@pytest.mark.parametrize("layout", [torch.clone, channels_last])
def test_errors_are_at_most_twice_those_of_torchs_layer(layout, shape, mean):
    """Clause 1d: at most twice the error of `nn.BatchNorm`."""
    x, dy = layout(batch_of(shape, mean)), layout(torch.randn(shape))
    found = [ours(x, dy), plain(x, dy), plain(x.double(), dy.double())]
    for own, theirs, exact in zip(*found, strict=True):
        ulp = torch.finfo(torch.float32).eps * exact.abs().max()
        assert (own - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 2 * ulp


def test_devices_without_the_kernels_have_none():
    assert kernels_for("cpu") is ON_CPU
    assert kernels_for("mps") is None
    assert kernels_for("cuda") in (
        None,
        kernels.Kernels(*[getattr(torch, n) for n in contract.KERNELS]),
    )


# -- found by random trials --------------------------------------------------------------------


def two_shards(layer: nn.Module, *shards: Tensor) -> list[Tensor]:
    """The outputs of replicas whose shards differ in size, so that they are not joined."""
    return run_sharded(layer, [shard.requires_grad_() for shard in shards])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_default_dtype_and_device_do_not_matter(dtype):
    shards = [torch.randn(2, 3, 4, w).to(dtype) for w in (4, 5)]
    big = torch.randn(40_000, 3).to(dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            layer = SynchronizedBatchNorm2d(3, device="cpu", dtype=torch.float32)
            ys = two_shards(layer, *shards)
            assert moments(big)[0].device.type == "cpu"
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(
        layer.running_mean, 0.1 * torch.cat([s.flatten(2) for s in shards], 2).float().mean((0, 2))
    )
    assert [y.dtype for y in ys] == [dtype] * 2


@pytest.mark.parametrize("momentum", [0.1, 0.0])
def test_a_variance_beyond_half_precision_is_averaged_before_it_is_rounded(momentum):
    layer = SynchronizedBatchNorm2d(2, momentum=momentum).half()
    shards = [(torch.randn(2, 2, 3, w) * 400).half() for w in (4, 5)]
    two_shards(layer, *shards)
    var = torch.cat([s.double().flatten(2) for s in shards], 2).var((0, 2))
    assert (var > torch.finfo(torch.half).max).all()
    expected = (1 - momentum + momentum * var).half()
    torch.testing.assert_close(layer.running_var, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("deviation", "eps"), [(0, 1e-38), *[(d, 1e-30) for d in (1e-15, 1e12, 1e15, 1e17)]]
)
def test_gradients_at_extreme_deviations(deviation, eps):
    shards = [torch.randn(2, 2, 3, w) * deviation for w in (4, 5)]
    dys = [torch.randn_like(shard) for shard in shards]
    layer = SynchronizedBatchNorm2d(2, eps=eps)
    exact = nn.BatchNorm1d(2, eps=eps, dtype=torch.float64)
    for each in (layer, exact):
        nn.init.constant_(each.weight, 10)
    torch.autograd.backward(two_shards(layer, *shards), dys)
    x = torch.cat([s.detach().flatten(2) for s in shards], 2).double().requires_grad_()
    exact(x).backward(torch.cat([dy.flatten(2) for dy in dys], 2).double())
    got = torch.cat([shard.grad.flatten(2) for shard in shards], 2)
    torch.testing.assert_close(got.double() * deviation, x.grad * deviation, rtol=1e-4, atol=1e-6)


def test_a_small_variance_counts_fully_in_a_cumulative_average():
    shards = [torch.randn(2, 2, 3, w) * 0.03 for w in (4, 5)]
    layer = SynchronizedBatchNorm2d(2, momentum=None, eps=1.0)
    two_shards(layer, *shards)
    expected = torch.cat([s.detach().flatten(2) for s in shards], 2).double().var((0, 2))
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-6, atol=0)


def test_an_empty_shard_has_no_weight_at_large_means():
    layer = SynchronizedBatchNorm2d(2, momentum=1.0)
    two_shards(layer, torch.full((2, 2, 3, 4), 1.1e13), torch.zeros(0, 2, 3, 4))
    assert layer.running_var.tolist() == [0, 0]


# -- what CUDA's kernels refuse ----------------------------------------------------------------

#: Shapes and layouts for which CUDA has one kind of kernels or the other.
SHARDS = {
    "contiguous": torch.randn(4, 5, 3, 3),
    "channels_last": torch.randn(4, 5, 3, 3).contiguous(memory_format=torch.channels_last),
    "features": torch.randn(4, 5),
    "one value each": torch.randn(4, 5, 1, 1),
    "one channel": torch.randn(4, 1, 3, 3),
    "rows": torch.randn(4, 5, 3),
}


def described(call: Any) -> list[Any] | str:
    """Shapes and dtypes of what a kernel returns, or that it refuses."""
    try:
        result = call()
    except (RuntimeError, NotImplementedError, AssertionError):
        return "refused"
    results = result if isinstance(result, tuple) else (result,)
    return [None if t is None else (tuple(t.shape), t.dtype) for t in results]


def both(kernel: str, *args: Any) -> list[Any] | str:
    """What the kernel of the CPU does with arguments, which is what the stand-in does."""
    ours, theirs = (described(lambda k=k: getattr(k, kernel)(*args)) for k in (ON_CPU, STAND_IN))
    assert ours == theirs
    return ours


STAND_IN = contract.AS_ON_ACCELERATORS


@pytest.mark.parametrize("wants", list(itertools.product((True, False), repeat=3)), ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", SHARDS)
def test_what_is_asked_of_a_sum_is_returned_refused_or_ignored_as_by_cuda(layout, dtype, wants):
    x = SHARDS[layout].half()
    vector = torch.ones(x.size(1))
    weight = None if dtype is None else vector.to(dtype)
    found = both("backward_reduce", x, x, vector, vector, weight, *wants)
    shape = tuple(vector.shape)
    sums = [(shape, torch.float32)] * 2
    if layout in ("contiguous", "rows"):
        if weight is None and (wants[1] or wants[2]):
            assert found == "refused"
            return
        expected = [s if wants[0] else None for s in sums]
        expected += [(shape, dtype) if wanted else None for wanted in wants[1:]]
    else:
        gradient = ((0,), torch.float32) if weight is None else (shape, dtype)
        expected = [*sums, gradient, gradient]
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", SHARDS)
def test_parameters_are_taken_in_the_dtypes_that_cuda_takes(layout, dtype):
    x = SHARDS[layout].half()
    vector, one = torch.ones(x.size(1)), torch.ones(1, dtype=torch.int32)
    given = vector.to(dtype)
    y = [(tuple(x.shape), torch.float16)]
    taken = "refused" if dtype == torch.float64 else y
    for weight, bias in ((given, given), (given, None), (None, given)):
        assert both("elemt", x, weight, bias, vector, vector, EPS) == taken
    assert both("elemt", x, vector, given, vector, vector, EPS) == (
        y if dtype == vector.dtype else "refused"
    )
    if layout in ("contiguous", "rows") and dtype == torch.float16:
        taken = "refused"
    assert both("backward_elemt", x, x, vector, vector, given, vector, vector, one) == taken


BAD_SHARDS: dict[str, Any] = {
    "short mean": lambda k, x, v: k.elemt(x, None, None, v[1:], v, EPS),
    "half mean": lambda k, x, v: k.elemt(x, None, None, v.half(), v.half(), EPS),
    "short weight": lambda k, x, v: k.elemt(x, v[1:], None, v, v, EPS),
    "half weight": lambda k, x, v: k.elemt(x, v.half(), None, v, v, EPS),
    "no values": lambda k, x, v: k.elemt(x[:0], None, None, v, v, EPS),
    "no values to measure": lambda k, x, v: k.stats(x[:0], EPS),
    "integers": lambda k, x, v: k.stats(x.int(), EPS),
    "short dy": lambda k, x, v: k.backward_reduce(x[1:], x, v, v, None, True, False, False),
    "half dy": lambda k, x, v: k.backward_reduce(x.half(), x, v, v, None, True, False, False),
    "long sums": lambda k, x, v: k.backward_elemt(x, x, v, v, None, v.repeat(2), v, ONE),
    "long counts": lambda k, x, v: k.backward_elemt(x, x, v, v, None, v, v, ONE.long()),
    "counts in float": lambda k, x, v: k.backward_elemt(x, x, v, v, None, v, v, ONE.float()),
}
ONE = torch.ones(1, dtype=torch.int32)


@pytest.mark.parametrize("case", BAD_SHARDS)
@pytest.mark.parametrize("layout", SHARDS)
def test_a_shard_that_cuda_refuses_is_refused(layout, case):
    x = SHARDS[layout]
    for kernels_of in (ON_CPU, STAND_IN):
        assert described(lambda k=kernels_of: BAD_SHARDS[case](k, x, torch.ones(x.size(1)))) == (
            "refused"
        )


@pytest.mark.parametrize("counts", [torch.float16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("buffers", [None, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("like", [torch.float16, torch.float32], ids=str)
def test_counts_are_in_the_dtype_of_the_buffers(like, buffers, counts):
    rows, given = torch.ones(2, 5), torch.full((2,), 4.0).to(counts)
    x = torch.ones(1, 5, dtype=like)
    running = None if buffers is None else torch.ones(5, dtype=buffers)
    merged = [((5,), torch.float32)] * 2
    found = both("gather_stats", x, rows, rows, running, running, 0.1, EPS, given)
    assert found == (merged if counts == (buffers or like) else "refused")
    for args in ((rows[0], rows[0]), (rows, rows[:1]), (rows.half(),) * 2):
        assert (
            both("gather_stats", x, *args, None, None, 0.1, EPS, torch.ones(2, dtype=like))
            == "refused"
        )
