"""Runs all benchmarks, prints one table, and draws how the time of a layer grows.

    python -m benchmarks
    python -m benchmarks --only layer rendezvous --steps 30

The figure needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import gpu, growth, layer, memory, processes, rendezvous, replicate, step
from benchmarks.measuring import Part, Row, add_options, header, keep_memory, show

figure = import_module("benchmarks.figure") if find_spec("matplotlib") else None

PARTS: dict[str, Part] = {
    "layer": layer.rows,
    "rendezvous": rendezvous.rows,
    "replicate": replicate.rows,
    "step": step.rows,
    "memory": memory.rows,
    "gpu": gpu.rows,
    "processes": processes.rows,
    "growth": growth.rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").split("\n", 1)[0]
    )
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    parser.add_argument(
        "--output",
        type=Path,
        help="where the figure goes (default: beside the program, unless it is a quick run)",
    )
    options = parser.parse_args()
    output = options.output or (None if options.quick else Path(__file__).parent / "growth.png")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header(options.steps))
    for name in options.only:
        if name == "growth" and figure is not None and output is not None:
            points = list(growth.points(options.steps, options.quick))
            rows: Iterable[Row] = growth.rows_of(points)
            figure.draw(points, output)
        else:
            rows = PARTS[name](options.steps, options.quick)
        show(rows, options.quick)
    return 0


if __name__ == "__main__":
    keep_memory()
    raise SystemExit(main())
