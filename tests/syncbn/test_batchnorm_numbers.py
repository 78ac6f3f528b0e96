"""Statistics, memory layouts and dtypes of a layer. References are to reports by users."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d
from tests.kit import oracle
from tests.kit import shards as of_kit
from tests.kit.devices import several
from tests.kit.layers import LAYERS
from tests.kit.properties import pairwise
from tests.kit.shards import eps_mode, randomized, run_sharded
from tests.kit.threads import outcome_of
from tests.kit.wrappers import WRAPS

pytestmark = pytest.mark.accelerator


def in_float64(layer: nn.Module) -> nn.Module:
    """torch's layer of the same parameters and buffers, in float64."""
    plain = next(plain for plain, ours in LAYERS.values() if type(layer) is ours)
    twin = plain(
        layer.num_features,
        momentum=layer.momentum,
        affine=layer.affine,
        track_running_stats=layer.track_running_stats,
        dtype=torch.float64,
    )
    twin.load_state_dict(layer.state_dict())
    return twin.train(layer.training)


# -- statistics --------------------------------------------------------------------------------


@pytest.mark.usefixtures("not_joined")  # joined, it is as near as in torch's layer
@pytest.mark.cpu("the fused merge rounds a mean in float64")
@pairwise(
    dtype=[torch.float16, torch.float32, torch.float64],
    value=[0.0, 0.1, -3.7, 1e4, 3e4],
    samples=[[4, 4], [3, 1, 2], [1, 0, 1]],
)
def test_constant_channel_gives_the_bias(dtype, value, samples):
    """The other channels are not constant."""
    layer = randomized(SynchronizedBatchNorm2d(3, dtype=dtype))
    shards = [torch.randn(n, 3, 3, 5, dtype=dtype) for n in samples]
    for shard in shards:
        shard[:, 1] = value
    leaves = [shard.requires_grad_() for shard in shards]
    outputs = run_sharded(layer, leaves)
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    for y, leaf in zip(outputs, leaves, strict=True):
        assert torch.equal(y[:, 1], layer.bias[1].expand_as(y[:, 1]))
        assert y.isfinite().all()
        assert leaf.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad[1] == 0


@pytest.mark.parametrize("half_width", [0.05, 0.4, 0.6, 5.0])
@pytest.mark.parametrize("mode", ["plus", "clamp"])
def test_eps_enters_as_the_mode_says(half_width, mode):
    """vacancy#43. Variances below and above ``eps``. At the kink, releases of torch differ."""
    layer = randomized(SynchronizedBatchNorm1d(3, eps=0.25, dtype=torch.float64))
    shards = [half_width * torch.tensor([[-1.0, 1, -1], [1, -1, 1]]).double() for _ in range(2)]
    upstream = [torch.randn_like(shard) for shard in shards]
    leaves = [shard.clone().requires_grad_() for shard in shards]
    with eps_mode(mode):
        outputs = run_sharded(layer, leaves)
        torch.autograd.backward(outputs, upstream)
    expected = oracle.batch_norm(
        shards, upstream, layer.weight, layer.bias, eps=0.25, clamps=mode == "clamp"
    )
    torch.testing.assert_close(outputs, expected.outputs)
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected.input_grads)
    torch.testing.assert_close(layer.weight.grad, expected.weight_grad)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("momentum", [None, 0.0, 0.1, 1.0])
def test_buffers_keep_their_identity_and_have_the_numbers_of_one_device(wrap, momentum):
    """Clause 7a: running buffers keep their identity.

    Views see every step (averages, DDP).
    """
    layer = SynchronizedBatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    twin = in_float64(layer)
    buffers = dict(layer.named_buffers())
    pointers = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    view = layer.running_var[1:]
    run = wrap(layer)
    for samples in (7, 3, 1, 8):
        x = torch.randn(samples, 3, 4, dtype=torch.float64) * 3 + 1
        torch.testing.assert_close(run(x), twin(x))
    for name, buffer in layer.named_buffers():
        assert buffer is buffers[name]
        assert buffer.data_ptr() == pointers[name]
        torch.testing.assert_close(buffer, twin.get_buffer(name), rtol=1e-12, atol=1e-13)
    assert torch.equal(view, layer.running_var[1:])
    assert layer.num_batches_tracked == 4


# -- layouts -----------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **of_kit.LAYOUTS,
    "channels_last": of_kit.channels_last,
    "rows and columns exchanged": lambda x: x.mT.contiguous().mT,
    "expanded over rows": lambda x: x[:, :, :1].expand_as(x),
}


@pairwise(channels=[1, 3, 65], dims=[2, 3], of_input=LAYOUTS, of_upstream=LAYOUTS)
def test_input_and_upstream_gradient_may_have_any_two_layouts(
    channels, dims, of_input, of_upstream
):
    """pytorch#62967, apex#1768."""
    layer = randomized(LAYERS[dims][1](channels))
    twin = in_float64(layer)
    shards, upstream = (
        [LAYOUTS[layout](torch.randn(n, channels, *(3, 4, 5)[-dims:])) for n in (3, 2)]
        for layout in (of_input, of_upstream)
    )
    leaves = [shard.detach().requires_grad_() for shard in shards]
    outputs = run_sharded(layer, leaves)
    torch.autograd.backward(outputs, upstream)

    whole = torch.cat(shards).double().requires_grad_()
    expected = twin(whole)
    expected.backward(torch.cat(upstream).double())
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.cat(outputs).double(), expected, **close)
    torch.testing.assert_close(
        torch.cat([leaf.grad for leaf in leaves]).double(), whole.grad, **close
    )
    torch.testing.assert_close(layer.weight.grad.double(), twin.weight.grad, **close)
    torch.testing.assert_close(layer.bias.grad.double(), twin.bias.grad, **close)
    for shard, y in zip(shards, outputs, strict=True):
        for form in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
            if form is torch.contiguous_format or dims == (3 if "3d" in str(form) else 2):
                assert y.is_contiguous(memory_format=form) >= shard.is_contiguous(
                    memory_format=form
                )


# -- dtypes ------------------------------------------------------------------------------------

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize(("of_input", "of_layer"), [*itertools.product(FLOATS, FLOATS)])
def test_every_pair_of_dtypes_is_accepted_or_refused_like_in_torchs_layer(
    of_input, of_layer, affine, track
):
    """apex#254, pytorch#61924, #96203."""
    options: dict[str, Any] = {"affine": affine, "track_running_stats": track, "dtype": of_layer}
    layer = randomized(SynchronizedBatchNorm1d(3, **options))
    plain = nn.BatchNorm1d(3, **options)
    plain.load_state_dict(layer.state_dict())
    exact = in_float64(layer)
    x, dy = torch.randn(2, 7, 3, 5).to(of_input)

    def step(model: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        return [y.detach(), leaf.grad]

    theirs, ours = (
        outcome_of(lambda m=m: step(m)) for m in (plain, DataParallel(layer, several(3)))
    )
    assert type(ours.error) is type(theirs.error)
    if ours.error is not None:
        for name, buffer in layer.named_buffers():
            assert torch.equal(buffer, exact.get_buffer(name)), name
        return
    leaf = x.double().requires_grad_()
    expected = exact(leaf)
    expected.backward(dy.double())
    rounding = 8 * torch.finfo(of_input).eps
    for actual, truth in zip(ours.value, (expected, leaf.grad), strict=True):
        assert actual.dtype == of_input
        torch.testing.assert_close(actual.double(), truth, rtol=rounding, atol=rounding)
    for (name, buffer), other in zip(layer.named_buffers(), plain.buffers(), strict=True):
        assert buffer.dtype == other.dtype, name
        eps = 4 * torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else 0
        torch.testing.assert_close(
            buffer.double(), exact.get_buffer(name).double(), rtol=eps, atol=eps
        )


@pytest.mark.parametrize("mean", [0.0, 3e4])
def test_a_million_large_values_in_half_precision_do_not_overflow(mean):
    """2^20 values of up to 6e4, whose sum is beyond float16 from the second value on."""
    x = (torch.randn(4, 1, 512, 512) * 1.5e4 + mean).clamp(-6e4, 6e4).half()
    dy = torch.randn(x.shape).half()
    layer = randomized(SynchronizedBatchNorm2d(1))
    twin = in_float64(layer)
    whole = x.double().requires_grad_()
    expected = twin(whole)
    expected.backward(dy.double())
    x.requires_grad_()
    y = DataParallel(layer, several(2))(x)
    y.backward(dy)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)
    assert x.grad.isfinite().all()
    # The mean is as exact as the values are that it is the mean of.
    exact_to = 6e4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        layer.running_mean.double(), twin.running_mean, rtol=0, atol=exact_to
    )
    torch.testing.assert_close(layer.running_var.double(), twin.running_var, rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.weight.grad.double(), twin.weight.grad, rtol=1e-4, atol=1e-2)


@pytest.mark.usefixtures("joined_or_not")
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_infinite_values_give_the_running_statistics_of_torchs_layer(mean):
    x = torch.randn(8, 3) + torch.tensor([mean, 0.0, 0.0])
    x[0, 1], x[5, 2] = float("inf"), float("nan")
    reference, synchronized = nn.BatchNorm1d(3), SynchronizedBatchNorm1d(3)
    reference(x)
    run_sharded(synchronized, x.split([4, 4]))
    for name in ("running_mean", "running_var"):
        one, other = getattr(synchronized, name), getattr(reference, name)
        torch.testing.assert_close(one, other, equal_nan=True)
