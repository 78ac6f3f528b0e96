"""A step sends the same messages for any number of replicas and, beyond 8, of processes.

One process of many is simulated. torch's fake backend returns at once. The values are wrong, but a
real process makes the same calls.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn

from benchmarks import __main__ as suite
from benchmarks import scale
from replication import DataParallel
from syncbn import SynchronizedBatchNorm2d
from tests.ranks import recorded_collectives, run_ranks

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)
fake_pg = pytest.importorskip(
    "torch.testing._internal.distributed.fake_pg", reason="this torch has no fake backend"
)

#: Rank, number of processes, number of replicas (0 without `DataParallel`), and ``group_size``.
Case = tuple[int, int, int, "int | None"]


def traffic(_: int, cases: list[Case]) -> list[Any]:
    distributed.destroy_process_group()  # the group that connects the processes of the test
    return [traffic_of(*case) for case in cases]


def traffic_of(rank: int, processes: int, replicas: int, group_size: int | None) -> Any:
    """What a process sends in a step, forward and backward, and its new groups in two steps."""
    distributed.init_process_group(
        "fake", store=fake_pg.FakeStore(), rank=rank, world_size=processes
    )
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        SynchronizedBatchNorm2d(8, group_size=group_size),
        nn.Conv2d(8, 16, 1),
        SynchronizedBatchNorm2d(16, group_size=group_size),
    )
    model = DataParallel(net, ["cpu"] * replicas) if replicas else net
    x, new_groups = torch.randn(16, 3, 2, 2), []
    for _ in range(2):
        with mock.patch.object(distributed, "new_group", wraps=distributed.new_group) as new_group:
            with recorded_collectives() as forward:
                y = model(x)
            with recorded_collectives() as backward:
                y.backward(torch.randn_like(y))
        new_groups.append(new_group.call_count)
    distributed.destroy_process_group()
    # Parts of different replicas make their calls in any order.
    return sorted(forward), sorted(backward), new_groups


def messages(name: str, times: int = 1) -> tuple[list[Any], list[Any]]:
    """Of the network: one collective each way per layer, for a count and 4 float64 per channel."""
    forward, backward = ([(name, size) for size in sizes] for sizes in ((136, 264), (128, 256)))
    return sorted(times * forward), sorted(times * backward)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("all_gather", [(0, 2), (7, 8)]),
        ("all_reduce", [(8, 9), (0, 64), (63, 64), (999, 1_000), (9_999, 10_000)]),
    ],
)
def test_messages_depend_neither_on_replicas_nor_on_processes(name, ranks):
    cases = [(*rank, replicas, None) for rank in ranks for replicas in (0, 1, 4, 8)]
    (found,) = run_ranks(1, traffic, cases)
    for case, got in zip(cases, found, strict=True):
        # In the first step, replicas make one group of torch.distributed, for all layers.
        assert got == (*messages(name), [min(case[2], 1), 0]), case


def test_parts_of_64_processes_of_4_replicas():
    numbers = [("all_gather", 8)]  # of replicas in the processes, once per forward
    expected = {
        (1, 64, 4, 1): ([], [], []),
        (1, 64, 4, 4): (numbers, [], []),  # a process
        (1, 64, 4, 32): (numbers, *messages("all_gather")),  # 8 processes
        (1, 64, 4, 36): (numbers, *messages("all_reduce")),  # 9 processes
        (1, 64, 4, 6): (numbers, *messages("all_gather", 2)),  # this process is in two parts
        (1, 64, 0, 8): ([], *messages("all_gather")),
        (1, 64, 0, 9): ([], *messages("all_reduce")),
    }
    (found,) = run_ranks(1, traffic, list(expected))
    for (case, want), got in zip(expected.items(), found, strict=True):
        first, forward, backward = want
        assert got[:2] == (first + forward, backward), case
        assert got[2][1] == 0, case


def test_paper_counts_what_is_sent():
    assert [scale.message_bytes(channels) for channels in (8, 16)] == [(136, 128), (264, 256)]


def test_page_has_the_table_that_the_program_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale"])
    scale.main()
    assert f"\n\n{capsys.readouterr().out}\n" in suite.PAGE.read_text("utf-8")
