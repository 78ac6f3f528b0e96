"""Where the time goes: ranges in profiles."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from replication import DataParallel, ReplicaAware
from syncbn import SynchronizedBatchNorm1d

#: Seconds that the straggler is late.
LATE = 0.05


class Late(ReplicaAware, nn.Module):
    """Comes late in one replica, then meets the others."""

    def __init__(self, straggler: int) -> None:
        super().__init__()
        self.straggler = straggler

    def forward(self, x: Tensor) -> Tensor:
        if self.group.rank == self.straggler:
            time.sleep(LATE)
        self.group.barrier()
        return x


def network(straggler: int) -> nn.Module:
    return nn.Sequential(nn.Sequential(Late(straggler)), SynchronizedBatchNorm1d(2))


@pytest.mark.parametrize("all_threads", [False, True])
def test_replicas_exchanges_and_waits_are_ranges_of_a_profile(all_threads):
    model = DataParallel(network(1), ["cpu"] * 2)
    try:
        config: Any = _ExperimentalConfig(profile_all_threads=all_threads)
    except TypeError:
        pytest.skip("this torch profiles one thread only")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        model(torch.randn(4, 2))
    ranges = {event.name for event in seen.events()}
    expected = {
        *("replica 0", "replica 1"),
        *(f"exchange {path}, replica {i}" for path in ("0.0", "1") for i in (0, 1)),
        "wait 0.0, replica 0",
    }
    assert "DataParallel.forward" in ranges
    assert expected <= ranges if all_threads else not expected & ranges
