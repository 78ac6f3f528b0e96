"""How all parts measure: functions that take turns, medians, and rows of one table."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

WARM_UP = 5

#: Of all parts that vary them.
REPLICAS = (2, 4, 8)

#: Else what the system has to do for fresh memory drowns the figures.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "100000000",
}


class Row(NamedTuple):
    """One line of the table; a figure says how many times as long, or as much, as the other."""

    part: str
    case: str
    #: By the number of replicas.
    figures: dict[int, float]
    #: What the figures should not exceed.
    goal: float | None = None
    #: The number of replicas that the goal is for; None: all.
    goal_at: int | None = None
    #: Of a figure that is no ratio.
    unit: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the figures, as they are printed, keep to the goal; None without one."""
        if self.goal is None:
            return None
        figures = [v for n, v in self.figures.items() if self.goal_at in (None, n)]
        return all(round(figure, 2) <= self.goal for figure in figures)


class Part(Protocol):
    """Measures; ``quick`` is for tests, with tiny shapes and few replicas."""

    def __call__(self, steps: int, quick: bool = False) -> Iterable[Row]: ...


def replica_counts(quick: bool) -> tuple[int, ...]:
    return REPLICAS[:1] if quick else REPLICAS


def keep_memory() -> None:
    """Begins the program anew, unless `KEEP_MEMORY` was there when it began."""
    if not os.environ.items() >= KEEP_MEMORY.items():
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEP_MEMORY})


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes; what it returns is freed after that."""
    begin = time.perf_counter()
    result = function()
    end = time.perf_counter()
    del result
    return end - begin


def alternating(functions: Sequence[Callable[[], object]], steps: int) -> list[float]:
    """The median seconds of each function; they take turns, so that all see the same machine."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(WARM_UP + steps):
        for function, own in zip(functions, times, strict=True):
            taken = seconds(function)
            if turn >= WARM_UP:
                own.append(taken)
    return [statistics.median(own) for own in times]


def p99(values: Iterable[float]) -> float:
    """The 99th percentile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[-(len(ordered) // 100) - 1]


def header(steps: int) -> str:
    """Above the rows."""
    columns = " | ".join(f"{n} replicas" for n in REPLICAS)
    return (
        f"Medians of {steps} steps that take turns.\n\n"
        f"| part | case | {columns} | goal | met |\n"
        f"|---|---|{'---|' * len(REPLICAS)}---|---|"
    )


def line(row: Row) -> str:
    """A row in Markdown."""
    unit = f" {row.unit}" if row.unit else ""
    figures = (f"{row.figures[n]:.2f}{unit}" if n in row.figures else "" for n in REPLICAS)
    goal = "" if row.goal is None else f"<= {row.goal:g}{unit}"
    if row.goal_at is not None:
        goal += f" with {row.goal_at}"
    met = {None: "", True: "yes", False: "no"}[row.is_met]
    return f"| {' | '.join((row.part, row.case, *figures, goal, met))} |"


def show(rows: Iterable[Row], quick: bool) -> None:
    """Prints rows as they come; goals are for the shapes of a full run."""
    for row in rows:
        print(line(row._replace(goal=None, goal_at=None) if quick else row), flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the suite and of each part."""
    parser.add_argument("--steps", type=int, default=60, help="of each way, after warm-up")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")


def run(part: Part, description: str | None) -> int:
    """The program of one part."""
    keep_memory()
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(options.steps))
    show(part(options.steps, options.quick), options.quick)
    return 0
