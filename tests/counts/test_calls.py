"""The cost of a synchronized layer in a network, as calls in Python: no clock, so no chance."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel
from syncbn import convert_model
from tests.kit.layers import knows_hooks
from tests.kit.memory import no_garbage_collection
from tests.kit.threads import profiled


class Counted(nn.Module):
    """Counts the calls of Python functions in the forward of a network, in all replicas."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.calls: list[str] = []  # which the replicas share

    def forward(self, x: Tensor) -> Tensor:
        def count(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call":
                self.calls.append(frame.f_code.co_name)

        with profiled(count):
            return self.net(x)


#: Of several forwards the one with the fewest calls counts, because chance only adds some: a
#: replica may begin its next wait before the other one has left its last, or be woken too early.
FORWARDS = 30


def calls_of_a_layer(convert: Callable[[nn.Module], nn.Module]) -> float:
    """The calls of two replicas, in a forward, for each further layer."""
    x = torch.randn(8, 4, 8, 8)
    least = []
    for layers in (5, 15):
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(layers)]
        counted = Counted(nn.Sequential(*blocks))
        model = DataParallel(convert(counted), ["cpu"] * 2)
        model(x)  # makes what later forwards use again
        counts = []
        with no_garbage_collection():  # whose finalizers would be counted
            for _ in range(FORWARDS):
                counted.calls.clear()
                model(x)
                counts.append(len(counted.calls))
        least.append(min(counts))
    few, many = least
    return (many - few) / 10


@knows_hooks
@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
def test_a_layer_makes_few_calls_beyond_those_of_batch_norm():
    """Together in a replica that merges and one that waits; which one merges is chance."""
    plain = calls_of_a_layer(lambda net: net)
    assert plain > 0
    assert calls_of_a_layer(convert_model) - plain <= 60
