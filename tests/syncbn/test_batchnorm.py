"""The layers: the numbers of one device, torch's own when alone, errors before any waiting."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from replication import DataParallel, execute_replication_callbacks, parallel_apply, replicate
from syncbn import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
)
from tests.kit import oracle
from tests.kit.devices import several
from tests.kit.layers import LAYERS
from tests.kit.properties import examples, pairwise
from tests.kit.shards import assert_reads_no_value, randomized, run_sharded

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("joined_or_not")]

PAIRS = [
    (nn.BatchNorm1d, SynchronizedBatchNorm1d, (6, 3)),
    (nn.BatchNorm1d, SynchronizedBatchNorm1d, (6, 3, 4)),
    (nn.BatchNorm2d, SynchronizedBatchNorm2d, (6, 3, 4, 5)),
    (nn.BatchNorm3d, SynchronizedBatchNorm3d, (6, 3, 2, 4, 5)),
]
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.0},
    {"momentum": 1.0},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
    {"eps": 0.5},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"device": "cpu", "dtype": torch.float16},
]


def plain_with(layer: type[nn.Module], **options) -> nn.Module:
    """torch's layer, where it has the ``bias`` argument and where it has not."""
    bias = options.pop("bias", True)
    module = layer(3, **options)
    if not bias:
        module.register_parameter("bias", None)
    return module


# -- alone -------------------------------------------------------------------------------------


@pytest.mark.cpu("has a device among its options")
@pairwise(pair=PAIRS, options=OPTIONS, replicated=[False, True])
def test_unreplicated_layer_equals_torchs_layer_bit_for_bit(pair, options, replicated):
    """Clause 2a: the bits of `nn.BatchNorm` when alone."""
    plain, synchronized, shape = pair
    reference = randomized(plain_with(plain, **options))
    layer = synchronized(3, **options)
    layer.load_state_dict(reference.state_dict(), strict=True)
    reference.load_state_dict(layer.state_dict(), strict=True)
    assert layer.state_dict()._metadata == reference.state_dict()._metadata
    model = DataParallel(layer, several(4)) if replicated else layer
    for training in (True, True, False):
        reference.train(training)
        model.train(training)
        # A single sample is a single shard, whatever the number of devices.
        x = torch.randn(1, 3, *(shape[2:] or (4,))) if replicated else torch.randn(shape)
        x = x.to(options.get("dtype", torch.float32))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ya, yb = reference(a), model(b)
        dy = torch.randn_like(ya)
        ya.backward(dy)
        yb.backward(dy)
        assert torch.equal(ya, yb)
        assert torch.equal(a.grad, b.grad)
        for p, q in zip(reference.parameters(), layer.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert_close(dict(layer.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize(("plain", "synchronized", "shape"), PAIRS)
def test_it_is_an_instance_of_torchs_class_and_prints_like_it(plain, synchronized, shape):
    layer = synchronized(3, momentum=None, affine=False)
    assert isinstance(layer, plain)
    assert repr(layer) == repr(plain(3, momentum=None, affine=False)).replace(
        plain.__name__, synchronized.__name__
    )


# -- the numbers of one device -----------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 3), (4, 3)],
        [(5, 3), (1, 3), (2, 3)],
        [(1, 3), (1, 3)],
        [(0, 3), (3, 3)],
        [(3, 3), (0, 3), (1, 3)],
        [(2, 3, 4), (1, 3, 7)],
        [(2, 3, 5, 4), (1, 3, 2, 9), (0, 3, 1, 1)],
        [(1, 3, 1, 1)] * 5,
        [(2, 3, 2, 3, 2), (1, 3, 4, 1, 1)],
        [(2, 3)] * 8,
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicas_compute_what_one_device_computes(shapes, dtype):
    """Clause 1a: any shards in replicas."""
    _, synchronized = LAYERS[max(1, len(shapes[0]) - 2)]
    layer = randomized(synchronized(3, dtype=dtype))
    shards = [torch.randn(s, dtype=dtype) * 2 + 5 for s in shapes]
    upstream = [torch.randn_like(shard) for shard in shards]
    expected = oracle.batch_norm(shards, upstream, layer.weight, layer.bias)
    close = partial(assert_close, check_dtype=False)
    for shard in shards:
        shard.requires_grad_()
    outputs = run_sharded(layer, shards)
    torch.autograd.backward(outputs, upstream)
    for output, y, shard, dx in zip(
        outputs, expected.outputs, shards, expected.input_grads, strict=True
    ):
        close(output, y)
        close(shard.grad, dx)
    close(layer.weight.grad, expected.weight_grad)
    close(layer.bias.grad, expected.bias_grad)
    close(layer.running_mean, expected.running_mean)
    close(layer.running_var, expected.running_var)
    assert layer.num_batches_tracked == 1


@examples(0.4)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(lambda s: sum(s) > 1),
    extent=st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 3)]),
    channels=st.integers(1, 4),
    momentum=st.sampled_from([None, 0.0, 0.1, 1.0]),
    affine=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    channels_last=st.booleans(),
)
def test_any_split_of_any_batch_gives_the_numbers_of_torchs_layer(
    sizes, extent, channels, momentum, affine, dtype, channels_last
):
    """Clause 1a: any shards in replicas."""
    plain, synchronized = LAYERS[max(1, len(extent))]
    options = {"momentum": momentum, "affine": affine, "dtype": dtype}
    reference, layer = randomized(plain(channels, **options)), synchronized(channels, **options)
    layer.load_state_dict(reference.state_dict())
    for _ in range(2):
        whole = torch.randn(sum(sizes), channels, *extent, dtype=dtype)
        if channels_last and len(extent) == 2:
            whole = whole.contiguous(memory_format=torch.channels_last)
        shards = [s.clone().requires_grad_() for s in whole.split(sizes)]
        whole.requires_grad_()
        y, outputs = reference(whole), run_sharded(layer, shards)
        dy = torch.randn_like(y)
        y.backward(dy)
        torch.autograd.backward(outputs, dy.split(sizes))
        tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {}
        torch.testing.assert_close(torch.cat(outputs), y, **tolerance)
        # Two values that nearly agree are normalized by nearly nothing: gradients are large there.
        scale = whole.grad.abs().max().clamp(min=1)
        grads = torch.cat([s.grad for s in shards])
        torch.testing.assert_close(grads / scale, whole.grad / scale, **tolerance)
        assert_close(dict(layer.named_buffers()), dict(reference.named_buffers()), **tolerance)


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_the_host_waits_for_no_device(second):
    layer = SynchronizedBatchNorm2d(3, momentum=None, device="meta")
    x = torch.randn(5, 3, 2, 2, device="meta", requires_grad=True)
    assert_reads_no_value(DataParallel(layer, ["meta"] * 3), layer.weight, x, second)


@pytest.mark.cpu("the layers to compare with compute in float64 there")
@pairwise(
    mean=[0.0, 7.0, 1e2, 1e3, 1e4],
    drift=[0.0, 1e3],
    samples=[12, 120],  # joined, and not
    replicas=[2, 3, 4],
    order=["first", "first, exact edges", "second"],
)
def test_large_means_are_as_accurate_as_in_torchs_layer(mean, drift, samples, replicas, order):
    """Clause 1d: at most twice the error of `nn.BatchNorm`."""
    torch.manual_seed(replicas)
    whole = torch.randn(samples, 16, 9, 9) + mean
    whole += torch.linspace(-drift, drift, samples).view(-1, 1, 1, 1)
    reference, layer = nn.BatchNorm2d(16), SynchronizedBatchNorm2d(16)
    randomized(reference)
    layer.load_state_dict(reference.state_dict())
    exact = copy.deepcopy(reference).double()
    dy, direction = torch.randn_like(whole), torch.randn_like(whole)

    def step(model, dtype):
        module = getattr(model, "module", model)
        x = whole.to(dtype).requires_grad_()
        inputs = [x, module.weight, *([] if order == "second" else [module.bias])]
        y = model(x)
        grads = torch.autograd.grad(y, inputs, dy.to(dtype), create_graph=order != "first")
        if order == "second":
            grads = torch.autograd.grad(grads[0], inputs, direction.to(dtype))
        names = ("y", "running_mean", "running_var", "x.grad", "weight.grad", "bias.grad")
        tensors = (y.detach(), module.running_mean, module.running_var, *grads)
        return dict(zip(names, tensors, strict=False))

    truth = step(exact, torch.float64)
    theirs = step(reference, torch.float32)
    ours = step(DataParallel(layer, several(replicas)), torch.float32)
    for name, true in truth.items():
        # For a mean near zero, the ulp of the values that it is the mean of counts.
        scale = whole if name == "running_mean" else true
        ulp = scale.abs().max() * torch.finfo(torch.float32).eps
        allowed = 2 * (theirs[name] - true).abs().max() + ulp
        assert (ours[name] - true).abs().max() <= allowed, name


# -- running statistics ------------------------------------------------------------------------


def test_tracking_switched_off_later_leaves_the_buffers_alone():
    layer = SynchronizedBatchNorm1d(3)
    layer.track_running_stats = False
    DataParallel(layer, several(2))(torch.randn(8, 3))
    assert torch.equal(layer.running_mean, torch.zeros(3))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics_training_spans_the_replicas_and_evaluation_does_not(training):
    layer = SynchronizedBatchNorm1d(3, track_running_stats=False, dtype=torch.float64)
    layer.train(training)
    x = torch.randn(6, 3, dtype=torch.float64)
    y = DataParallel(layer, several(2))(x)
    local = torch.cat([nn.functional.batch_norm(s, None, None, training=True) for s in x.chunk(2)])
    whole = nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, training=True)
    torch.testing.assert_close(y, whole if training else local)


def test_all_shards_empty_is_torchs_empty_batch():
    reference, layer = nn.BatchNorm1d(3), SynchronizedBatchNorm1d(3)
    shards = [torch.randn(0, 3, requires_grad=True) for _ in range(3)]
    outputs = run_sharded(layer, shards)
    reference(torch.randn(0, 3))
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    assert [tuple(y.shape) for y in outputs] == [(0, 3)] * 3
    assert [tuple(s.grad.shape) for s in shards] == [(0, 3)] * 3
    assert torch.equal(layer.weight.grad, torch.zeros(3))
    assert_close(dict(layer.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("mean", [0, 20])
def test_a_frozen_layer_behind_takes_the_output_of_one_image_with_channels_last(mean):
    """torch's batch norm misreads a gradient and an input of formats that it mixes up."""
    net = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval()).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 256, 256, dtype=torch.float64) + mean  # too large to be joined
    dy = torch.randn_like(x)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = torch.autograd.grad(net(x), [x, *net.parameters()], dy)
    y = DataParallel(convert_model(net), several(2))(x)
    torch.testing.assert_close(torch.autograd.grad(y, [x, *net.parameters()], dy), expected)


# -- groups of some replicas -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3, 2, 4], [2, 2, 2, 0, 3], [4]], ids=str)
def test_groups_of_two_replicas_are_normalized_by_themselves(sizes):
    layer = SynchronizedBatchNorm1d(3, group_size=2, dtype=torch.float64)
    shards = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in sizes]
    upstream = [torch.randn_like(shard) for shard in shards]
    outputs = run_sharded(layer, shards)
    torch.autograd.backward(outputs, upstream)
    weight_grad = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(sizes), 2):
        some = slice(start, start + 2)
        expected = oracle.batch_norm(shards[some], upstream[some], layer.weight, layer.bias)
        torch.testing.assert_close(outputs[some], expected.outputs)
        torch.testing.assert_close([s.grad for s in shards[some]], expected.input_grads)
        weight_grad += expected.weight_grad
        if start == 0:
            torch.testing.assert_close(layer.running_mean, expected.running_mean)
            torch.testing.assert_close(layer.running_var, expected.running_var)
    torch.testing.assert_close(layer.weight.grad, weight_grad)


def test_group_size_is_printed_and_left_out_of_the_state():
    layer = SynchronizedBatchNorm2d(3, group_size=4)
    assert repr(layer).endswith("track_running_stats=True, group_size=4)")
    assert list(layer.state_dict()) == list(nn.BatchNorm2d(3).state_dict())
    assert copy.deepcopy(layer).group_size == 4


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [(0, ValueError, r"at least 1, .* \(got 0\)"), (2.0, TypeError, "an int .*2.0")],
)
def test_bad_group_size_is_refused(size, error, text):
    with pytest.raises(error, match=text):
        SynchronizedBatchNorm1d(3, group_size=size)
    with pytest.raises(error, match=text):
        convert_model(nn.BatchNorm1d(3), group_size=size)


class Counting(nn.Module):
    """A parametrization that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight


@pytest.mark.cpu("calls replicas with inputs of one device")
@pytest.mark.parametrize("training", [True, False])
def test_a_replica_asks_for_its_weight_once(training):
    """As `nn.BatchNorm` does: each time a parametrized one is computed, and may learn."""
    layer = SynchronizedBatchNorm1d(3).train(training)
    nn.utils.parametrize.register_parametrization(layer, "weight", Counting())
    replicas = replicate(layer, several(2))
    execute_replication_callbacks(replicas)
    counters = [replica.parametrizations["weight"][0] for replica in replicas]
    before = [counter.calls for counter in counters]
    parallel_apply(replicas, [(torch.randn(4, 3),)] * 2)
    assert [counter.calls - b for counter, b in zip(counters, before, strict=True)] == [1, 1]
