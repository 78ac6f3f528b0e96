"""Run all benchmarks, print their tables, and write them into the page beside this file.

    python -m benchmarks
    python -m benchmarks --only step layer
    python -m benchmarks --write

``--write`` also draws the picture, which needs matplotlib.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import host, layer, overhead, processes, step
from benchmarks.measuring import Row, Table, lines, parser, ratio, show

figure = import_module("benchmarks.figure") if find_spec("matplotlib") else None

PARTS: dict[str, Callable[[float], Iterable[Table]]] = {
    "step": lambda seconds: [step.table(seconds)],
    "processes": processes.tables,
    "host": host.tables,
    "layer": layer.tables,
    "overhead": overhead.tables,
}

PAGE = Path(__file__).with_name("README.md")
PICTURE = PAGE.with_name("steps.png")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def span(rows: Sequence[Row], way: str, phase: int = 0) -> str:
    """The least and the largest ratio of a way, as the table prints them."""
    texts = [ratio(row, way, phase) for row in rows]
    return f"{min(texts, key=float)} to {max(texts, key=float)}"


def paragraph(rows: Sequence[Row]) -> str:
    """Say what the table of training steps shows."""
    unit = next(iter(rows[0].figures))
    texts = [
        f"On CPU replicas, steps take {span(rows, 'ours')} times as long with `syncbn` as with "
        f"{unit}, and {span(rows, 'older toolkits')} times with the older toolkits' algorithm. "
        f"Measured in {date.today():%B %Y} with torch {torch.__version__} on "
        f"{os.cpu_count()} cores."
    ]
    for threads in dict.fromkeys(row.threads for row in rows):
        own = [row for row in rows if row.threads == threads]
        least, most = (pick(own, key=lambda r: float(ratio(r, "ours"))) for pick in (min, max))
        texts.append(
            f"With torch threads set to {threads}, a training step takes {span(own, 'ours')} "
            f"times as long with `syncbn` (forward {span(own, 'ours', 1)}, backward "
            f"{span(own, 'ours', 2)}) and {span(own, 'older toolkits')} with the older toolkits' "
            f"algorithm. `syncbn` costs least in {least.case}, with {least.count} replicas, and "
            f"most in {most.case}, with {most.count}."
        )
    return " ".join(texts)


def block(tables: Sequence[Table]) -> str:
    """All that the page shows of one run. The first table has the training steps."""
    picture = f"![Steps with one torch thread, in units of plain BatchNorm]({PICTURE.name})"
    parts = [paragraph(list(tables[0].rows)), picture]
    return "\n\n".join([*parts, *("\n".join(lines(table)).strip() for table in tables)])


def replaced(page: str, figures: str) -> str:
    """The page with other figures between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def main() -> None:
    options = parser(__doc__, seconds=4)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--write", action="store_true", help="write all tables into the page")
    given = options.parse_args()
    if given.write and given.only != list(PARTS):
        options.error("--write needs all parts: leave out --only")
    if given.write and figure is None:
        options.error("--write draws the picture, which needs matplotlib: pip install matplotlib")
    tables = [show(table) for name in given.only for table in PARTS[name](given.seconds)]
    if given.write:
        figure.draw(list(tables[0].rows), PICTURE)
        PAGE.write_text(replaced(PAGE.read_text("utf-8"), block(tables)), "utf-8")


if __name__ == "__main__":
    main()
