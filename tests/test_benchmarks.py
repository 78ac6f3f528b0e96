"""The benchmarks run; what they measure is nobody's business here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from processes import run_python
from torch import distributed

HAS_GLOO = distributed.is_available() and distributed.is_gloo_available()
needs_gloo = pytest.mark.skipif(not HAS_GLOO, reason="this torch has no gloo")

LAYERS = [
    "4 x 4 x 4 x 4",
    "4 x 4 x 4 x 4",
    *["4 x 4 x 4 x 4, channels_last"] * 2,
    "2 x 4 x 4 x 4",
    "2 x 4 x 4 x 4",
    "4 x 4 x 4 x 4, float64",
    "4 x 4 x 4 x 4, bfloat16",
    "4 x 4",
    "4 x 4 x 4",
    "2 x 4 x 4 x 4 x 4",
]
KEPT = ["kept for backward, to the input: ours", "kept for backward, to the input: plain"]
CASES = {
    "layer": LAYERS,
    "rendezvous": [
        f"{way}, {where}, {figure}{how}"
        for how in ("", ", back to back")
        for way in ("SyncMaster", "exchange")
        for where in ("master", "all")
        for figure in ("p50", "p99")
    ],
    "replicate": ["ResNet-50, to torch's way", "callbacks of 10 modules"],
    "step": [
        "converted, to plain BatchNorm",
        "converted, to plain BatchNorm, width 64",
        *["plain replicas"] * 2,
        "control",
    ],
    "gpu": (
        [*["kernels"] * 4, "step, converted, to plain BatchNorm"]
        if torch.cuda.is_available()
        else ["no CUDA device here"]
    ),
    "memory": [*KEPT, "peak of a step, to plain BatchNorm"],
    "growth": [
        *(
            f"{value} {axis}, to {other}"
            for axis, values in (("channels", ("16", "64")), ("elements", ("1,024", "4,096")))
            for value in values
            for other in ("plain BatchNorm", "the floor")
        ),
        "replicas, to plain BatchNorm",
        "replicas, to the floor",
    ],
    **(
        {"processes": ["4 channels, to plain BatchNorm", "4 channels, to the gather"]}
        if HAS_GLOO
        else {}
    ),
}


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of a table in Markdown, below its header."""
    table = [[c.strip() for c in row.split("|")[1:-1]] for row in lines if row.startswith("|")]
    assert table[0] == ["part", "case", *(f"{n} replicas" for n in (2, 4, 8)), "goal", "met"]
    assert {len(row) for row in table} == {len(table[0])}
    return table[2:]


def measured(*arguments: str) -> list[list[str]]:
    """The rows of some parts, measured as quickly as can be."""
    done = run_python("-m", "benchmarks", "--quick", "--steps", "2", *arguments)
    assert done.returncode == 0, done.stderr
    return cells(done.stdout.splitlines())


@pytest.fixture(scope="module")
def figure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it goes."""
    return tmp_path_factory.mktemp("benchmarks") / "growth.png"


@pytest.fixture(scope="module")
def table(figure: Path) -> list[list[str]]:
    """All parts."""
    return measured("--only", *CASES, "--output", str(figure))


def test_parts_come_in_the_order_asked_for(table):
    assert list(dict.fromkeys(part for part, *_ in table)) == list(CASES)


@pytest.mark.parametrize("part", CASES)
def test_part_fills_its_rows(table, part):
    rows = [row for of, *row in table if of == part]
    # Some cases name the number of the machine's threads.
    cases = [case.split(", backward")[0].split(": one replica")[0] for case, *_ in rows]
    assert cases == CASES[part]
    # A system that does not tell the peak of memory leaves it empty.
    excused = ("peak", "no CUDA")
    figures = [two for case, two, *_ in rows if not (case.startswith(excused) and two == "")]
    # Whatever they are: on a busy machine a ratio may be next to nothing.
    assert all(0 <= float(two.removesuffix(" ms")) < math.inf for two in figures), rows
    # A quick run has two replicas only.
    assert all((four, eight) == ("", "") for _, _, four, eight, *_ in rows)
    # Nor goals, which are for other shapes.
    assert all((goal, met) == ("", "") for *_, goal, met in rows)


def test_layer_keeps_its_input_and_nothing_else_of_that_size(table):
    figures = {case: two for _, case, two, *_ in table}
    assert [figures[case] for case in KEPT] == ["1.00", "1.00"]


def test_figure_is_drawn(table, figure):
    pytest.importorskip("matplotlib")
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_part_runs_by_itself():
    done = run_python("-m", "benchmarks.layer", "--quick", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert [case for _, case, *_ in cells(done.stdout.splitlines())] == LAYERS


@needs_gloo
def test_layer_between_processes():
    arguments = ("--ranks", "2", "--steps", "1", "--channels", "4")
    done = run_python("-m", "benchmarks.processes", *arguments)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(ranks, way, calls) for ranks, way, _, _, calls, _ in rows] == [
        ("2", "plain", "0"),
        ("2", "ours", "2"),
        ("2", "reduce", "2"),
        ("2", "gather", "2"),
    ]


def test_delays_of_failures():
    done = run_python("-m", "benchmarks.failures", "--replicas", "2", "--forwards", "2")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    ways = ["before", "in", "between", "after", "skips", "twice", "order"]
    assert [row[:3] for row in rows] == [["2", way, copy] for way in ways for copy in "01"]
    assert all(0 <= float(median) <= float(p99) < math.inf for *_, median, p99 in rows)
