"""Nothing is used before it is there, or after it was freed, on any stream of any device.

With lazy streams (`SIMULATED_LAZY=1`) what a stream is given is done only when somebody waits for
it, so that a missing wait, or a missing `record_stream`, gives wrong numbers. All tests of this
folder run so as well. These here also free and reuse memory between the steps.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware
from syncbn import SynchronizedBatchNorm2d, convert_model
from tests.cuda import runtime
from tests.cuda.matrix import (
    DEVICES,
    Samples,
    assert_close,
    batch,
    convolutions,
    gradients_of,
    side_streams,
    skip_file_without,
    state_of,
)

skip_file_without(1)
pytestmark = pytest.mark.gpu

#: Their first device is the one of the batch.
LISTS = {
    "all": DEVICES,
    "one twice": DEVICES[:1] * 2,
    "each twice": [device for device in DEVICES for _ in range(2)],
}

IMAGES = Samples((6, 4, 5))

lazy_only = pytest.mark.skipif(not runtime.LAZY, reason="needs lazy streams: SIMULATED_LAZY=1")


@lazy_only
def test_lazy_streams_show_a_missing_wait():
    """A control: the sum is made of memory in which nothing was written yet."""
    stream = torch.cuda.Stream()
    x = torch.full((1000,), 3.0, device="cuda")
    with torch.cuda.stream(stream):
        y = 2 * x  # without `stream.wait_stream`
    assert y.cpu().unique().tolist() != [6.0]
    torch.cuda.synchronize()


@lazy_only
@pytest.mark.parametrize("records", [False, True])
def test_lazy_streams_show_memory_that_is_freed_too_early(records):
    """A control: without `record_stream` the memory is taken for another tensor."""
    stream = torch.cuda.Stream()
    x = torch.full((100_000,), 1.0, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x + 1
    if records:
        x.record_stream(stream)
    del x
    other = torch.full((100_000,), 50.0, device="cuda")
    torch.cuda.current_stream().synchronize()
    stream.synchronize()
    assert (y.cpu().unique().tolist() == [2.0]) == records
    assert other.unique().tolist() == [50]


# -- streams of the caller -----------------------------------------------------------------------


@contextlib.contextmanager
def one_side_stream(device: str) -> Iterator[None]:
    """Computes on a new stream of one device, as a program does that prefetches."""
    stream = torch.cuda.Stream(device)
    for other in DEVICES:
        stream.wait_stream(torch.cuda.current_stream(other))
    with torch.cuda.stream(stream), torch.cuda.device(DEVICES[0]):
        yield
    for other in DEVICES:
        torch.cuda.current_stream(other).wait_stream(stream)


STREAMS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "default streams": contextlib.nullcontext,
    "a side stream of the first": lambda: one_side_stream(DEVICES[0]),
    "a side stream of the last": lambda: one_side_stream(DEVICES[-1]),
    "side streams of all": side_streams,
}


def reuse_memory() -> None:
    """Writes NaN into whatever memory is free on each device."""
    junk = [
        torch.full((size,), float("nan"), device=device)
        for device, size in product(DEVICES, (64, 200, 800, 3000, 9000, 100_000))
    ]
    for device in DEVICES:
        torch.cuda.default_stream(device).synchronize()
    del junk


@pytest.mark.parametrize("where", LISTS)
@pytest.mark.parametrize("backward_outside", [False, True])
@pytest.mark.parametrize("streams", STREAMS)
def test_training_while_memory_is_reused(where, streams, backward_outside):
    plain = convolutions()
    net = convert_model(copy.deepcopy(plain)).to(DEVICES[0])
    model = DataParallel(net, LISTS[where])
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.05) for n in (net, plain)]
    found, expected = [], []
    for _ in range(3):
        x, dy = batch(IMAGES, 4 * len(LISTS[where]) - 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        there, upstream = x.to(DEVICES[0]).requires_grad_(), dy.to(DEVICES[0])
        with STREAMS[streams]():
            y = model(there)
            if not backward_outside:
                y.backward(upstream)
        if backward_outside:
            y.backward(upstream)
        grad = there.grad
        kept = y.detach() * 1
        del there, y
        reuse_memory()
        found.append({"y": kept, "x.grad": grad, **gradients_of(net), **state_of(net)})
        x.requires_grad_()
        right = plain(x)
        right.backward(dy)
        expected.append({"y": right, "x.grad": x.grad, **gradients_of(plain), **state_of(plain)})
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


# -- streams of layers ---------------------------------------------------------------------------


class OnOwnStream(nn.Module):
    """Computes on a stream of its own, for which the caller's waits before the next exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = SynchronizedBatchNorm2d(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self.norm(2 * x) + 1
        own, outer = torch.cuda.Stream(x.device), torch.cuda.current_stream(x.device)
        own.wait_stream(outer)
        with torch.cuda.stream(own):
            y = 2 * x
        outer.wait_stream(own)
        x.record_stream(own)
        y.record_stream(outer)
        return self.norm(y) + 1


class Communicates(ReplicaAware, nn.Module):
    """A layer of a user with two collectives: centered, plus a tenth of all values' sum."""

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        total = group.all_reduce(x.sum(0))
        parts = group.all_gather(x.sum(0, keepdim=True))
        count = group.all_reduce(torch.full((), len(x), dtype=x.dtype, device=x.device))
        return x - total / count + torch.cat(list(parts)).sum(0) / 10


def _alone(x: Tensor) -> Tensor:
    return x - x.mean(0) + x.sum(0) / 10


def _norm(x: Tensor) -> Tensor:
    return nn.functional.batch_norm(2 * x, None, None, training=True) + 1


@pytest.mark.parametrize("where", LISTS)
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize(
    ("make", "functions"),
    [
        (lambda: nn.Sequential(OnOwnStream(), nn.Tanh(), OnOwnStream()), [_norm, _norm]),
        (lambda: nn.Sequential(Communicates(), nn.Tanh(), Communicates()), [_alone, _alone]),
    ],
    ids=["own streams", "collectives"],
)
def test_layers_while_memory_is_reused(where, streams, make, functions):
    model = DataParallel(make().to(DEVICES[0]), LISTS[where])
    for _ in range(3):
        x, dy = batch(IMAGES, 3 * len(LISTS[where]) - 1)
        there, upstream = x.to(DEVICES[0]).requires_grad_(), dy.to(DEVICES[0])
        with STREAMS[streams]():
            y = model(there)
            y.backward(upstream)
        kept, grad = y.detach() * 1, there.grad
        del there, y
        reuse_memory()
        first, second = functions
        right = second(first(x.requires_grad_()).tanh())
        right.backward(dy)
        assert_close({"y": kept, "x.grad": grad}, {"y": right, "x.grad": x.grad})


@pytest.mark.parametrize("where", LISTS)
def test_pinned_memory_of_an_input_is_not_reused_too_early(where):
    plain = convolutions()
    model = DataParallel(convert_model(copy.deepcopy(plain)).to(DEVICES[0]), LISTS[where])
    for _ in range(4):
        x, _ = batch(IMAGES, 2 * len(LISTS[where]))
        pinned = x.pin_memory()
        y = model(pinned)
        del pinned
        torch.full_like(x, float("nan")).pin_memory()  # may take the same memory
        assert_close({"y": y}, {"y": plain(x)})
