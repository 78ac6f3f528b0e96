"""Draws how the time of a layer grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.growth import AXES, USUAL, Point

LABELS = {
    "replicas": "replicas",
    "channels": "channels",
    "elements": "elements per replica",
}


def draw(points: Sequence[Point], path: Path) -> None:
    """One panel for each axis."""
    figure = Figure(figsize=(12, 4))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        own = [point for point in points if point.axis == axis]
        where = [point.at for point in own]
        panel.plot(where, [p.plain / p.floor for p in own], "o-", color="0.6", label="plain")
        panel.plot(where, [p.ours / p.floor for p in own], "o-", color="C0", label="ours")
        panel.axhline(1, color="black", linewidth=0.8, linestyle="dotted")
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        if axis == "replicas":
            panel.set_xticks(where)
        else:
            panel.set_xscale("log", base=2)
        panel.set_xlabel(f"{LABELS[axis]} ({_fixed(axis)})")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time, in multiples of the floor")
    panels[0].legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)


def _fixed(axis: str) -> str:
    """What is not varied, for the label of an axis."""
    names = {
        "replicas": "{} replicas",
        "channels": "{} channels",
        "elements": "{} elements per replica",
    }
    return ", ".join(names[name].format(f"{at:,}") for name, at in USUAL.items() if name != axis)
