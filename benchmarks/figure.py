"""The picture: a bar per network and way, as high as the time of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measuring import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw training steps, in multiples of the first way, with a panel per setting."""
    settings = sorted({(row.threads, row.count) for row in rows})
    figure = Figure(figsize=(12, 3.2 * len(settings)))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(settings), 1, sharex=True, sharey=True, squeeze=False)
    unit, *ways = rows[0].figures
    width = 0.8 / len(ways)
    for panel, (threads, replicas) in zip(panels[:, 0], settings, strict=True):
        own = [row for row in rows if (row.threads, row.count) == (threads, replicas)]
        for number, way in enumerate(ways):
            where = [x + (number - (len(ways) - 1) / 2) * width for x in range(len(own))]
            heights = [row.figures[way][0] / row.figures[unit][0] for row in own]
            bars = panel.bar(where, heights, width, label=way)
            panel.bar_label(bars, fmt="%.2f", fontsize=8)
        panel.axhline(1, color="black", linewidth=0.8, linestyle="dotted")
        panel.set_title(f"{replicas} replicas, torch threads: {threads}", fontsize=10)
        panel.set_ylabel(f"step, to {unit}", fontsize=8)
        panel.set_xticks(range(len(own)), [row.case for row in own], fontsize=8)
        panel.margins(y=0.15)
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png", dpi=110)
