"""How many kernels a synchronized layer launches on accelerators, and that no host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import launches


def counted(launch: int, **others: int) -> dict[str, int]:
    """What one forward or backward counts: two launches always have the size of the input."""
    return {"launch": launch, "large": 2, **others}


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_launches_of_a_layer(replicas):
    others = replicas - 1
    first, other = launches.ours(replicas)
    assert first == (counted(6, copy=2 * others), counted(min(4 + others, 6), copy=others))
    assert other == (counted(2, copy=2), counted(3, copy=1))


def test_launches_of_torchs_layer():
    forward, backward = launches.torchs(2)
    assert backward == counted(3, collective=1)
    # Older versions of torch also make other vectors.
    assert forward == counted(forward["launch"], collective=1, wait=3)
    assert forward["launch"] >= 14


VECTOR = torch.ones(3)
OPERATIONS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "arithmetic": (lambda: VECTOR + 1, {"launch": 1}),
    "in place": (lambda: VECTOR.mul_(1), {"launch": 1}),
    "large": (lambda: torch.zeros(launches.SHAPE), {"launch": 1, "large": 1}),
    "view": (lambda: VECTOR.view(1, 3).expand(2, 3).unbind(), {}),
    "allocation": (lambda: torch.empty_like(VECTOR), {}),
    "other device": (lambda: VECTOR.to("meta"), {"copy": 1}),
    "back": (lambda: VECTOR.to("meta").to("cpu"), {"copy": 2}),
    "item": (lambda: VECTOR.sum().item(), {"launch": 1, "wait": 1}),
    "mask": (lambda: VECTOR[VECTOR > 0], {"launch": 3, "wait": 1}),
    "numbers": (lambda: torch.tensor([1.0, 2.0]), {"from host": 1}),
    "fused kernel": (
        lambda: torch.batch_norm_stats(torch.ones(launches.SHAPE), 1e-5),
        {"launch": 2, "large": 2},  # the tensor and its moments
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_kinds_of_operations(name):
    function, expected = OPERATIONS[name]
    made: list[launches.Operation] = []
    with launches.Recorder(made):
        function()
    assert launches.counts(made) == expected


def test_table_has_all_layers():
    rows = [line for line in launches.lines() if line.startswith("|")]
    assert len(rows) == 2 + 3 * len(launches.REPLICAS)
    assert len({row.count("|") for row in rows}) == 1
