"""A process sends messages of one size for any number of processes.

One process of many is simulated. torch's fake backend returns at once. The values are wrong, but a
real process makes the same calls.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn

from replication.groups.collective import Collective
from syncbn import SynchronizedBatchNorm2d
from tests.kit.ranks import recorded_collectives, run_ranks

pytestmark = pytest.mark.slow

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)
fake_pg = pytest.importorskip(
    "torch.testing._internal.distributed.fake_pg", reason="this torch has no fake backend"
)


def traffic(_: int, cases: list[tuple[int, int, int | None]]) -> list[Any]:
    distributed.destroy_process_group()  # the group that connects the processes of the test
    return [traffic_of(*case) for case in cases]


def traffic_of(rank: int, processes: int, group_size: int | None) -> Any:
    """What a process sends in its second step, and how many groups it makes in each."""
    store = fake_pg.FakeStore()
    distributed.init_process_group("fake", store=store, rank=rank, world_size=processes)
    layers = [SynchronizedBatchNorm2d(channels, group_size=group_size) for channels in (8, 16)]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), layers[0], nn.Conv2d(8, 16, 1), layers[1])
    x, new_groups = torch.randn(16, 3, 2, 2), []
    for _ in range(2):
        with mock.patch.object(distributed, "new_group", wraps=distributed.new_group) as new_group:
            with recorded_collectives() as forward:
                y = net(x)
            # The fake backend adds nothing, which looks as if the ranks' calls differed.
            same = mock.patch.object(Collective, "compare_lengths")
            with recorded_collectives() as backward, same:
                y.backward(torch.randn_like(y))
        new_groups.append(new_group.call_count)
    distributed.destroy_process_group()
    return [sorted(forward), sorted(backward)], new_groups


def messages(backward: str) -> list[Any]:
    """Of the network: one collective each way per layer, and the bytes that a process sends."""
    # On the CPU: the number that compares the calls, a count, and two vectors, in float64. In
    # backward the number and two vectors, in float32.
    gathers = [("all_gather", 8 * (2 + 2 * channels)) for channels in (8, 16)]
    return [gathers, [(backward, 4 * (1 + 2 * channels)) for channels in (8, 16)]]


#: How the layers add their sums in backward, by a process, their number, and the size of a part.
BACKWARD = {
    (0, 2, None): "all_gather",
    (7, 8, None): "all_gather",
    (8, 9, None): "all_reduce",
    (0, 64, None): "all_reduce",
    (63, 64, None): "all_reduce",
    (1_023, 1_024, None): "all_reduce",
    (1, 64, 8): "all_gather",
    (1, 64, 9): "all_reduce",
}


def test_messages_do_not_depend_on_the_number_of_processes():
    (found,) = run_ranks(1, traffic, [*BACKWARD])
    for (case, backward), (got, new_groups) in zip(BACKWARD.items(), found, strict=True):
        assert got == messages(backward), case
        first, second = new_groups  # parts are made in the first step
        assert second == 0 and bool(first) == (case[-1] is not None), case
