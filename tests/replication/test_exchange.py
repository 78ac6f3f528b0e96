"""The cost of an exchange between replicas, in Python-level calls of a replica's thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware
from tests.layers import knows_hooks, until_others_wait

DEVICES = ["cpu"] * 2

#: The calls of `ReplicaAware.group` and `ReplicaGroup.exchange` together, in a replica that waits
#: and in the replica that merges.
WAITS, MERGES = 11, 13


def copies(messages: list[Tensor]) -> Iterable[Tensor]:
    return map(torch.clone, messages)


class Counted(ReplicaAware, nn.Module):
    """Exchanges its input and counts the calls by rank. The copy of rank 1 arrives last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.counts = [0, 0]

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        rank, counts = self.group.rank, self.counts
        if rank:
            until_others_wait(1)

        def count(frame: FrameType, event: str, arg: object) -> None:
            counts[rank] += event == "call"

        sys.setprofile(count)
        try:
            y = self.group.exchange("copy", x, copies, requires_grad=x.requires_grad)
        finally:
            sys.setprofile(None)
        return y


@knows_hooks
@pytest.mark.parametrize("grad", [True, False])
def test_an_exchange_takes_few_calls(grad):
    layer = Counted()
    with torch.set_grad_enabled(grad):
        DataParallel(layer, DEVICES)(torch.ones(2, 1))
    waits, merges = layer.counts
    assert 0 < waits <= WAITS
    assert 0 < merges - 1 <= MERGES  # without the call of `copies`


def test_group_follows_a_group_size_that_is_set_in_the_forward():
    class Grouped(ReplicaAware, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            before = self.group.size
            self.group_size = 1
            alone = self.group.size
            self.group_size = None
            return x.new_tensor([[before, alone, self.group.size]])

    assert DataParallel(Grouped(), DEVICES)(torch.ones(2, 1)).tolist() == [[2, 1, 2]] * 2


#: The calls of a replica's thread around the forward of its module, including Python's own.
AROUND = 45


def test_a_replicas_thread_takes_few_calls_around_the_forward():
    model, calls = DataParallel(nn.Identity(), DEVICES), []

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    threading.setprofile(count)
    try:
        model(torch.ones(2, 1))
    finally:
        threading.setprofile(None)
    assert 0 < len(calls) <= len(DEVICES) * AROUND
