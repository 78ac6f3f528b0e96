"""Observing waits: named ranges for `torch.profiler`, and reports of how long replicas wait."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

from torch.autograd.profiler import record_function

from replication._torch import is_profiling
from replication.diagnosis.table import Table
from replication.sync import lifecycle
from replication.sync.rendezvous import Observe

__all__ = ["WaitReport", "wait_report"]

#: Layers in the table.
_ROWS = 20


class Waits(NamedTuple):
    """How long the copies of one layer waited for each other, by replica."""

    path: str
    #: Of the replica that called the layer most often.
    calls: int
    seconds: dict[int, float]


class WaitReport:
    """How long each replica waited for the others in each layer (see `wait_report`).

    It prints as a table, in milliseconds per forward.

    Attributes:
        forwards: The number of forwards.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self._size = 0
        self._lock = threading.RLock()
        # By path: the calls and the seconds by replica.
        self._waits: dict[str, tuple[Counter[int], defaultdict[int, float]]] = {}

    def add_forward(self, size: int) -> None:
        with self._lock:
            self.forwards += 1
            self._size = max(self._size, size)

    def add(self, path: str, replica: int, seconds: float, calls: int = 1) -> None:
        with self._lock:
            calls_of, seconds_of = self._waits.setdefault(path, (Counter(), defaultdict(float)))
            calls_of[replica] += calls
            seconds_of[replica] += seconds

    @property
    def replicas(self) -> range:
        """The replicas of the largest forward, including replicas that never waited."""
        return range(self._size)

    @property
    def layers(self) -> list[Waits]:
        """The ``path``, ``calls`` and ``seconds`` (by replica) of each layer, longest first."""
        with self._lock:
            layers = [
                Waits(path, max(calls.values()), {r: seconds[r] for r in self.replicas})
                for path, (calls, seconds) in self._waits.items()
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
        after = f"Replicas wait longest in `{layers[0].path}`. {verdict}"
        return str(Table(titles, rows, [head], [after], numbers_from=1))


def _added(name: str, layers: Sequence[Waits]) -> Waits:
    replicas = layers[0].seconds if layers else ()
    seconds = {replica: sum(w.seconds[replica] for w in layers) for replica in replicas}
    return Waits(name, sum(layer.calls for layer in layers), seconds)


_reports: set[WaitReport] = set()


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
        # Both are atomic: other threads may open and close reports, and a Ctrl-C may come.
        _reports.add(report)
        yield report
    finally:
        _reports.discard(report)
    if not quiet:
        print(report)


def observer(size: int) -> Observe | None:
    """Returns the observer of a forward of ``size`` replicas, or None if it is not observed."""
    reports, profiles = list(_reports), is_profiling()
    if not reports and not profiles:
        return None
    for report in reports:
        report.add_forward(size)

    def observe(what: str, replica: int, path: str) -> AbstractContextManager[object]:
        # Not a `contextlib.contextmanager`, which sets attributes of an error that passes through.
        # Not every error class allows that.
        stack = ExitStack()
        if profiles:
            stack.enter_context(record_function(f"{what} {path}, replica {replica}"))
        begin = time.perf_counter()

        def end() -> None:
            # Only a part of an exchange is a wait.
            seconds = time.perf_counter() - begin if what == "wait" else 0.0
            for report in reports:
                report.add(path, replica, seconds, calls=int(what == "exchange"))

        stack.callback(end)
        return stack

    return observe


lifecycle.observer = observer
