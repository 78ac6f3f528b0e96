"""Run all benchmarks, print their tables, and write them into the pages beside this file.

    python -m benchmarks
    python -m benchmarks --only step layer
    python -m benchmarks --write

``--write`` also draws the picture, which needs matplotlib.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import host, layer, overhead, processes, step
from benchmarks.measuring import Row, Table, line, lines, parser, ratio, replaced, show
from tests.cuda.environment import TORCH

figure = import_module("benchmarks.figure") if find_spec("matplotlib") else None

PARTS: dict[str, Callable[[float], Iterable[Table]]] = {
    "step": lambda seconds: [step.table(seconds), step.table_of_defaults(seconds)],
    "processes": processes.tables,
    "host": host.tables,
    "layer": layer.tables,
    "overhead": overhead.tables,
}

#: The tables in the first table of the page: where one trains, and what the figures mean.
SUMMARY = {
    "Training steps": (
        "replicas on the CPU",
        "Replicas wait for each other in each layer, but only in forward.",
    ),
    "Between processes": (
        "processes on the CPU",
        "Every layer waits for two gloo collectives, and each takes longer than a small layer. "
        "The worst case has 100 tiny layers and more processes than cores.",
    ),
    "Without communication": (
        "a process, without communication",
        "This is what a rank computes for itself. Wide layers hide it, small ones don't.",
    ),
    "Accelerators: the host's time": (
        "accelerators, the host's time",
        "This is not GPU time. It is the CPU time of launching a network that consists only of "
        "BatchNorm layers, on simulated GPUs.",
    ),
    "Accelerators: the host's time of a rank": (
        "accelerators, the host's time of a rank",
        "The same for a process of `torch.distributed`, beside `nn.SyncBatchNorm` itself.",
    ),
}

PAGE = Path(__file__).with_name("README.md")
DETAILS = PAGE.with_name("details.md")
PICTURE = PAGE.with_name("steps.png")


def span(rows: Sequence[Row], way: str, phase: int = 0) -> str:
    """The least and the largest ratio of a way, as the table prints them."""
    texts = [ratio(row, way, phase) for row in rows]
    least, largest = min(texts, key=float), max(texts, key=float)
    return least if least == largest else f"{least} to {largest}"


def summary(tables: Mapping[str, Sequence[Table]]) -> str:
    """The first table: a line for some tables, with their least and largest ratios.

    What they mean is a list below it, because a table of four columns does not fit a phone.
    """
    rows_of_page = [
        line(["training on", "`syncbn`, plain BatchNorm = 1", "others"]),
        line(["---"] * 3),
    ]
    meanings = []
    for table in (table for part in tables.values() for table in part if table.title in SUMMARY):
        (where, meaning), rows = SUMMARY[table.title], list(table.rows)
        *_, other = rows[0].figures
        link = f"[{where}]({DETAILS.name}#{slug(table.title)})"
        rows_of_page.append(line([link, span(rows, "syncbn"), f"{other}: {span(rows, other)}"]))
        meanings.append(f"- *{where}*: {meaning}")
    return "\n".join([*rows_of_page, "", *meanings])


def slug(title: str) -> str:
    """What a heading is called in links to it."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def block(tables: Mapping[str, Sequence[Table]]) -> str:
    """The first table, the machine, and the picture."""
    machine = f"torch {torch.__version__} on {os.cpu_count()} cores"
    measured = (
        f"Measured in {date.today():%B %Y} with {machine}, and simulated GPUs with torch {TORCH}."
    )
    picture = f"![Steps with one torch thread, in units of plain BatchNorm]({PICTURE.name})"
    return "\n\n".join([summary(tables), measured, picture])


def details(tables: Mapping[str, Sequence[Table]]) -> str:
    """All tables."""
    texts = ["\n".join(lines(table)).strip() for part in tables.values() for table in part]
    return "\n\n".join(["## Tables", *texts])


def main() -> None:
    options = parser(__doc__, seconds=4)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--write", action="store_true", help="write all tables into the pages")
    given = options.parse_args()
    if given.write and given.only != list(PARTS):
        options.error("--write needs all parts: leave out --only")
    if given.write and figure is None:
        options.error("--write draws the picture, which needs matplotlib: pip install matplotlib")
    tables = {name: [show(table) for table in PARTS[name](given.seconds)] for name in given.only}
    if given.write:
        figure.draw(list(tables["step"][0].rows), PICTURE)
        for page, name, text in (
            (PAGE, "summary", block(tables)),
            (DETAILS, "figures", details(tables)),
        ):
            page.write_text(replaced(page.read_text("utf-8"), name, text), "utf-8")


if __name__ == "__main__":
    main()
