"""Reports of how long replicas wait for each other."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from replication.diagnosis.table import table
from replication.sync.observation import open_reports

__all__ = ["WaitReport", "wait_report"]

#: Layers in the table.
_ROWS = 20


class Waits(NamedTuple):
    path: str
    #: Of the replica that called the layer most often.
    calls: int
    seconds: dict[int, float]


class WaitReport:
    """How long each replica waited for the others in each layer (see `wait_report`).

    It prints as a table, in milliseconds per forward.
    """

    def __init__(self) -> None:
        # No lock: a finalizer that interrupts a thread may run a forward, whose replicas add too.
        self._sizes: list[int] = []
        # By path, replica and thread, so that no other thread changes an entry: calls and seconds.
        self._waits: dict[tuple[str, int, int], tuple[int, float]] = {}

    def add_forward(self, size: int) -> None:
        self._sizes.append(size)

    def add(self, path: str, replica: int, seconds: float, calls: int = 1) -> None:
        key = path, replica, threading.get_ident()
        calls_before, seconds_before = self._waits.get(key, (0, 0.0))
        self._waits[key] = calls_before + calls, seconds_before + seconds

    @property
    def forwards(self) -> int:
        """The number of forwards."""
        return len(self._sizes)

    @property
    def replicas(self) -> range:
        """The replicas of the largest forward, including replicas that never waited."""
        return range(max(self._sizes, default=0))

    @property
    def layers(self) -> list[Waits]:
        """The ``path``, ``calls`` and ``seconds`` (by replica) of each layer, longest first."""
        calls_of: defaultdict[str, Counter[int]] = defaultdict(Counter)
        seconds_of: defaultdict[tuple[str, int], float] = defaultdict(float)
        for (path, replica, _), (calls, seconds) in self._waits.copy().items():
            calls_of[path][replica] += calls
            seconds_of[path, replica] += seconds
        layers = [
            Waits(path, max(calls.values()), {r: seconds_of[path, r] for r in self.replicas})
            for path, calls in calls_of.items()
        ]
        return sorted(layers, key=lambda layer: -sum(layer.seconds.values()))

    @property
    def straggler(self) -> int | None:
        """The replica that the others wait for, or None if no replica stands out.

        It waits less than half as long as any other, and these more than a millisecond per
        forward.
        """
        seconds = _added("all", self.layers).seconds
        order = sorted(seconds, key=seconds.__getitem__)
        least = 1e-3 * self.forwards  # waking up a thread takes about as long
        stands_out = len(order) > 1 and seconds[order[1]] > max(2 * seconds[order[0]], least)
        return order[0] if stands_out else None

    def __repr__(self) -> str:
        forwards = f"{self.forwards} forward{'s' * (self.forwards != 1)}"
        head = f"{forwards}; milliseconds per forward that a replica waits for others"
        layers, straggler = self.layers, self.straggler
        if not layers:
            return f"{head}: none (only replicas of a DataParallel are measured, not processes)"
        lines = [layer._replace(path=f"`{layer.path}`") for layer in layers[:_ROWS]]
        if others := layers[_ROWS:]:
            lines.append(_added(f"{len(others)} others", others))
        rows = []
        for name, calls, seconds in (*lines, _added("all", layers)):
            figures = (*seconds.values(), sum(seconds.values()))
            rows.append((name, str(calls), *(f"{1e3 * s / self.forwards:.3f}" for s in figures)))
        titles = ["layer", "calls", *(f"replica {r}" for r in layers[0].seconds), "together"]
        verdict = f"Replica {straggler} waits least: it is the one that the others wait for."
        if straggler is None:
            verdict = "No replica stands out as the one that the others wait for."
        last = f"Replicas wait longest in `{layers[0].path}`. {verdict}"
        return "\n".join((head, table(titles, rows, numbers_from=1), last))


def _added(name: str, layers: Sequence[Waits]) -> Waits:
    replicas = layers[0].seconds if layers else ()
    seconds = {replica: sum(w.seconds[replica] for w in layers) for replica in replicas}
    return Waits(name, sum(layer.calls for layer in layers), seconds)


@contextmanager
def wait_report(quiet: bool = False) -> Iterator[WaitReport]:
    """Measures how long replicas wait for each other in the forwards of a ``with`` block.

    A block that ends without an error prints a table of how long each replica waits in each layer,
    and names the replica that the others wait for. A wait lasts from the arrival of a replica at a
    synchronized layer until the last replica has arrived and merged. Slow code after the last such
    layer, or in backward, does not show. Measure forwards of one model, after a warm-up.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel, wait_report
    >>> from syncbn import SynchronizedBatchNorm1d
    >>> model = DataParallel(nn.Sequential(SynchronizedBatchNorm1d(3)), ["cpu"] * 2)
    >>> y = model(torch.randn(4, 3))  # the first forward is slow
    >>> with wait_report(quiet=True) as report:
    ...     y = model(torch.randn(4, 3))

    Args:
        quiet: Whether to print nothing at the end.
    """
    report = WaitReport()
    try:
        open_reports.add(report)
        yield report
    finally:
        open_reports.discard(report)
    if not quiet:
        print(report)
