"""The cost of a synchronized layer in a network, as calls in Python: no clock, so no chance."""

from __future__ import annotations

import sys
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


def calls_by_thread(function: Callable[[], Any]) -> Counter[str]:
    """Counts the calls of Python functions in each thread, by the name of the thread."""
    calls: Counter[str] = Counter()
    names: dict[int, str] = {}

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            ident = threading.get_ident()
            if ident not in names:
                names[ident] = next(
                    (t.name for t in threading.enumerate() if t.ident == ident), ""
                )
            calls[names[ident]] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def network(layers: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def calls_of_a_layer(convert: Callable[[nn.Module], nn.Module]) -> dict[str, float]:
    """The calls of each replica's thread in a forward, for each further layer."""
    x = torch.randn(8, 4, 8, 8)
    counts = []
    for layers in (5, 15):
        model = DataParallel(convert(network(layers)), ["cpu"] * 2)
        for _ in range(2):
            model(x).sum().backward()
        counts.append(calls_by_thread(lambda model=model: model(x)))
    few, many = counts
    return {f"replica-{i}": (many[f"replica-{i}"] - few[f"replica-{i}"]) / 10 for i in (0, 1)}


@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
def test_a_layer_makes_few_calls_beyond_those_of_batch_norm():
    """At most 50 where the replica merges, and 25 where it waits; which one merges is chance."""
    plain, ours = calls_of_a_layer(lambda net: net), calls_of_a_layer(convert_model)
    beyond = [ours[name] - plain[name] for name in plain]
    assert len(beyond) == 2
    assert sum(beyond) <= 50 + 25
    assert max(beyond) <= 50
