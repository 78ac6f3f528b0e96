"""`bn(x, mask=mask)` on CUDA devices: the numbers without padding, and no wait of the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from replication import DataParallel
from tests.cuda.matrix import DEVICES, skip_file_without
from tests.kit.padded import Masked, assert_same, expected, mask_of, padded, stepped

skip_file_without(1)
pytestmark = pytest.mark.gpu

TOLERANCES = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


@contextmanager
def no_host_waits() -> Iterator[None]:
    """torch raises where it would wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("devices", [None, DEVICES, DEVICES[:1] * 3], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_padding_takes_no_part_and_the_host_does_not_wait(devices, dtype, dims):
    extent = (6, 3, 2)[:dims]
    net = Masked(dims=dims)
    x, dy = torch.randn(2, 7, 3, *extent).to(dtype) * 3
    mask = mask_of(7, extent)
    wanted = expected(net.bn, x, mask, dy)
    net.to("cuda", torch.float32 if dtype is torch.float16 else dtype)
    model = net if devices is None else DataParallel(net, devices)
    batch = [t.cuda() for t in (padded(x, mask), mask, padded(dy, mask))]
    twin = [t.clone() for t in net.state_dict().values()]
    stepped(model, net.bn, *batch)  # makes constants
    for tensor, value in zip(net.state_dict().values(), twin, strict=True):
        tensor.copy_(value)
    with no_host_waits():
        found = stepped(model, net.bn, *batch)
    assert_same(found, wanted, **TOLERANCES[dtype])
