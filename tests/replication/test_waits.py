"""Where the time goes: reports of waits, and ranges in profiles."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from replication import DataParallel, ReplicaAware, WaitReport, wait_report
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


@pytest.mark.parametrize("straggler", [0, 2])
def test_a_report_names_the_straggler_and_the_layer_that_is_waited_in(straggler, capsys):
    model = DataParallel(network(straggler), ["cpu"] * 3)
    model(torch.randn(6, 2))  # is not in it
    with wait_report() as report:
        for _ in range(2):
            model(torch.randn(6, 2))
    assert report.forwards == 2
    assert report.straggler == straggler
    first, second = report.layers
    assert (first.path, second.path) == ("0.0", "1")
    assert first.calls == 2
    assert list(report.replicas) == [0, 1, 2]
    for replica in {0, 1, 2} - {straggler}:
        assert first.seconds[replica] > 2 * 0.8 * LATE
    assert first.seconds.get(straggler, 0.0) < 0.5 * LATE
    text = capsys.readouterr().out
    assert text == f"{report}\n"
    assert f"Replicas wait longest in `0.0`. Replica {straggler} waits least" in text
    head, titles, *rows = text.splitlines()
    assert head.startswith("2 forwards; milliseconds per forward")
    assert " ".join(titles.split()) == "layer calls replica 0 replica 1 replica 2 together"
    assert [row.split()[0] for row in rows[:3]] == ["`0.0`", "`1`", "all"]
    assert {len(row) for row in rows[:3]} == {len(titles)}  # numbers are aligned to the right
    figures = [float(figure) for figure in rows[0].split()[2:]]
    assert figures[3] == pytest.approx(sum(figures[:3]), abs=2e-3)
    assert figures[3] == pytest.approx(1e3 * sum(first.seconds.values()) / 2, abs=2e-3)


def report_of(*waits: tuple[str, int, float], size: int = 2, forwards: int = 1) -> WaitReport:
    """A report of waits, each with its path, replica and seconds."""
    report = WaitReport()
    for _ in range(forwards):
        report.add_forward(size)
    for wait in waits:
        report.add(*wait)
    return report


@pytest.mark.parametrize(
    ("first", "second", "forwards", "straggler"),
    [
        (0.6, 1.0, 1, None),
        (0.6, 2.0, 1, 0),
        (0.0001, 0.0019, 2, None),  # less than a millisecond per forward
        (0.0001, 0.0021, 2, 0),
    ],
)
def test_the_straggler_waits_much_less_than_the_others(first, second, forwards, straggler):
    report = report_of(("a", 0, first), ("a", 1, second), forwards=forwards)
    assert report.straggler == straggler
    assert ("No replica stands out" in str(report)) == (straggler is None)


def test_many_layers_are_cut_and_added_up():
    report = report_of(*((f"layer{i}", 0, 0.001 * (i + 1)) for i in range(30)), size=1)
    lines = str(report).splitlines()
    assert len(lines) == 2 + 20 + 2 + 1
    assert lines[2].split()[0] == "`layer29`"
    assert lines[-3].split() == ["10", "others", "10", "55.000", "55.000"]
    assert lines[-2].split() == ["all", "30", "465.000", "465.000"]
    assert lines[-1].startswith("Replicas wait longest in `layer29`.")


def test_without_waits_a_report_says_so(capsys):
    with wait_report() as report:
        DataParallel(nn.Linear(2, 2), ["cpu"] * 2)(torch.randn(4, 2))
    assert capsys.readouterr().out.endswith(
        "waits for others: none (only replicas of a DataParallel are measured, not processes)\n"
    )
    assert (report.forwards, report.straggler, report.layers) == (1, None, [])


def test_reports_may_be_nested_end_in_errors_and_be_silent(capsys):
    model = DataParallel(network(1), ["cpu"] * 2)
    with pytest.raises(KeyError), wait_report(quiet=True) as outer:
        with wait_report(quiet=True) as inner:
            model(torch.randn(4, 2))
        model(torch.randn(4, 2))
        raise KeyError
    assert (outer.forwards, inner.forwards) == (2, 1)
    model(torch.randn(4, 2))
    assert outer.forwards == 2
    assert capsys.readouterr().out == ""


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
