"""The cost of a synchronized layer in a network, as calls in Python: no clock, so no chance."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from replication import DataParallel
from syncbn import convert_model
from tests.layers import knows_hooks


def calls_beside(function: Callable[[], Any]) -> int:
    """Counts the calls of Python functions in all threads but this one."""
    calls: Counter[int] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            calls[threading.get_ident()] += 1

    threading.setprofile(count)
    try:
        function()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    calls.pop(threading.get_ident(), None)
    return calls.total()


def network(layers: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def calls_of_a_layer(convert: Callable[[nn.Module], nn.Module]) -> float:
    """The calls in the threads of two replicas, in a forward, for each further layer."""
    x = torch.randn(8, 4, 8, 8)
    counts = []
    for layers in (5, 15):
        model = DataParallel(convert(network(layers)), ["cpu"] * 2)
        for _ in range(2):
            model(x).sum().backward()
        # A finalizer may run in a thread of a replica.
        counts.append(min(calls_beside(lambda model=model: model(x)) for _ in range(5)))
    few, many = counts
    return (many - few) / 10


@knows_hooks
@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
def test_a_layer_makes_few_calls_beyond_those_of_batch_norm():
    """Together in a replica that merges and one that waits; which one merges is chance."""
    assert calls_of_a_layer(convert_model) - calls_of_a_layer(lambda net: net) <= 55
