"""How many kernels a synchronized layer launches on accelerators, and that no host waits."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

from benchmarks import launches


def counted(launch: int, **others: int) -> dict[str, int]:
    """What one forward or backward counts: two launches always have the size of the input."""
    return {"launch": launch, "large": 2, **others}


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_launches_of_a_layer(replicas):
    others = replicas - 1
    first, other = launches.in_replicas(replicas)
    assert first == (counted(6, copy=2 * others), counted(min(4 + others, 6), copy=others))
    assert other == (counted(2, copy=2), counted(3, copy=1))


@pytest.mark.parametrize("processes", [2, 16])
def test_launches_of_a_layer_in_a_process(processes):
    forward, backward = launches.in_processes_of_syncbn(processes)
    assert forward == counted(6, collective=1)
    assert backward == counted(3, collective=1)


def test_launches_of_torchs_layer():
    forward, backward = launches.torchs(2)
    assert backward == counted(3, collective=1)
    # Older versions of torch also make other vectors.
    assert forward == counted(forward["launch"], collective=1, wait=3)
    assert forward["launch"] >= 14


def test_torchs_layer_refuses_the_cpu():
    """As the README says, once processes are connected."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=launches.FakeStore())
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            nn.SyncBatchNorm(3)(torch.randn(4, 3))
    finally:
        distributed.destroy_process_group()


def test_table_has_all_layers():
    rows = [line for line in launches.lines() if line.startswith("|")]
    assert len(rows) == 2 + 4 * len(launches.NUMBERS)
    assert len({row.count("|") for row in rows}) == 1
