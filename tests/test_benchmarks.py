"""The benchmarks run; what they measure is nobody's business here."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_python
from torch import distributed

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_layer_between_processes():
    script = str(BENCHMARKS / "processes.py")
    done = run_python(script, "--ranks", "2", "--steps", "1", "--channels", "4")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(ranks, way, calls) for ranks, way, _, _, calls, _ in rows] == [
        ("2", "plain", "0"),
        ("2", "ours", "2"),
        ("2", "reduce", "2"),
        ("2", "gather", "2"),
    ]


def test_layer_in_replicas():
    done = run_python(str(BENCHMARKS / "layer.py"), "--replicas", "2", "--steps", "2")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[2:]
    assert [row[:26].strip() for row in rows] == [
        "8 x 64 x 56 x 56",
        "4 x 256 x 28 x 28",
        "8 x 64 x 56 x 56, cl",
        "2 x 256 x 14 x 14",
        "2 x 64 x 8 x 8",
    ]
    assert all(0 < float(row[26:]) < 100 for row in rows)


def test_delays_of_failures():
    done = run_python(str(BENCHMARKS / "failures.py"), "--replicas", "2", "--forwards", "2")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    ways = ["before", "in", "between", "after", "skips", "twice", "order"]
    assert [row[:3] for row in rows] == [["2", way, copy] for way in ways for copy in "01"]
    assert all(0 < float(median) <= float(p99) < 1e3 for *_, median, p99 in rows)
