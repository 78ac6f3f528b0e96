"""The picture: a bar per network and way, as long as the time of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measuring import Row

COLORS = "#AAAAAA", "#D55E00", "#0072B2"
#: The background of texts, which hides the line at 1.
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw steps with one torch thread, in multiples of the first way, with a panel per count."""
    threads = min(row.threads for row in rows)
    counts = sorted({row.count for row in rows})
    unit, *ways = rows[0].figures
    # Small enough to be legible on a phone, and white in dark pages too.
    figure = Figure(figsize=(4.8, 4.2 * len(counts)), facecolor="white")
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False)[:, 0]
    for panel, replicas in zip(panels, counts, strict=True):
        own = [row for row in rows if (row.threads, row.count) == (threads, replicas)]
        group = len(ways) + 1.8  # the bars of a case, and its name above them
        for number, row in enumerate(own):
            panel.text(0.02, number * group - 1.2, row.case, fontsize=9, va="center", bbox=PLAIN)
        for number, (way, color) in enumerate(zip(ways, COLORS, strict=True)):
            places = [case * group + number for case in range(len(own))]
            lengths = [row.figures[way][0] / row.figures[unit][0] for row in own]
            bars = panel.barh(places, lengths, 0.9, label=way, color=color)
            panel.bar_label(bars, fmt="%.2f", fontsize=9, padding=3, bbox=PLAIN)
        panel.axvline(1, color="black", linewidth=0.8, linestyle="dotted")
        title = f"{replicas} replicas, torch threads: {threads}"
        panel.set_title(title, fontsize=10, fontweight="bold", loc="left")
        panel.set_yticks([])
        panel.set_ylim(len(own) * group - 1.5, -2)  # downwards
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"step, in multiples of {unit}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", frameon=False)
    figure.savefig(path, format="png", dpi=120)
