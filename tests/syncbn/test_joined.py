"""Small shards on the CPU: torch's own arithmetic, bit by bit, wherever every replica may join."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from replication import DataParallel
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, fused, joined
from tests.layers import knows_hooks
from tests.layouts import LAYOUTS
from tests.sharded import randomized, run_sharded

pytestmark = knows_hooks


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of shards of each call that is joined."""
    found: list[int] = []
    join = fused.joined

    def counted(shards: Any, count_batch: Any) -> Any:
        outputs = join(shards, count_batch)
        if outputs is not None:
            found.append(len(shards))
        return outputs

    monkeypatch.setattr(fused, "joined", counted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"momentum": 1}, {"eps": 0.5}], ids=str
)
def test_numbers_are_torchs_bit_by_bit(dtype, layout, options, joins):
    ours = randomized(SynchronizedBatchNorm2d(3, dtype=dtype, **options))
    plain = nn.BatchNorm2d(3, dtype=dtype, **options)
    plain.load_state_dict(ours.state_dict())
    x = LAYOUTS[layout](torch.randn(6, 3, 4, 5, dtype=dtype))
    dy, found = torch.randn_like(x), []
    for net in (plain, DataParallel(ours, ["cpu"] * 3)):
        leaf = x.clone().requires_grad_()
        y = net(leaf)
        grads = torch.autograd.grad(y, [leaf, *net.parameters()], dy)
        found.append([y.detach(), *grads, *net.buffers()])
    assert joins == [3]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [(2, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, repeat=2)], ids="-".join)
def test_outputs_have_the_layouts_that_plain_batch_norm_gives_them(layouts, sizes, joins):
    shards = [
        LAYOUTS[layout](torch.randn(n, 4, 3, 5)) for n, layout in zip(sizes, layouts, strict=True)
    ]
    outputs = run_sharded(SynchronizedBatchNorm2d(4), shards)
    assert [y.stride() for y in outputs] == [nn.BatchNorm2d(4)(x).stride() for x in shards]
    if layouts in (("contiguous",) * 2, ("channels_last",) * 2):
        assert joins == [2]


def test_single_values_are_joined_and_empty_shards_are_not(joins):
    layer = SynchronizedBatchNorm1d(2)
    for sizes in ([1, 1], [3, 1], [3, 0], [1, 1, 0]):
        x = torch.randn(sum(sizes), 2)
        y = torch.cat(run_sharded(layer, x.split(sizes)))
        torch.testing.assert_close(y, nn.functional.batch_norm(x, None, None, training=True))
    assert joins == [2, 2]


def test_large_shards_half_precision_and_steps_without_a_graph_are_not_joined(joins):
    layer = SynchronizedBatchNorm1d(2)
    for x in (torch.randn(joined.LARGEST, 2), torch.randn(4, 2).bfloat16()):
        DataParallel(layer, ["cpu"] * 2)(x.repeat(2, 1))
    with torch.no_grad():
        DataParallel(layer, ["cpu"] * 2)(torch.randn(4, 2))
    assert joins == []
    DataParallel(layer, ["cpu"] * 2)(torch.randn(joined.LARGEST, 2))  # of 2 shards, just small
    assert joins == [2]
