"""Where the time goes: named ranges for `torch.profiler`, and reports of who waits for whom.

A forward asks once, when its replicas are made, whether somebody looks; else nothing is noted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.autograd.profiler import record_function

from replication._torch import is_profiling

__all__ = ["WaitReport", "wait_report"]

#: What is done (``"exchange"``, ``"wait"``), by which replica, at which path.
Observe = Callable[[str, int, str], AbstractContextManager[object]]

#: Of a printed or drawn report.
_ROWS = 20


class Waits(NamedTuple):
    """How long the copies of one layer have waited for each other."""

    path: str
    #: Number of waits of the replica that has waited most often.
    calls: int
    #: By replica.
    seconds: dict[int, float]

    @property
    def total(self) -> float:
        """Seconds of all replicas together."""
        return sum(self.seconds.values())


class WaitReport:
    """How long each replica has waited for the others in each layer; see `wait_report`.

    ``str(report)`` is a table, in milliseconds per forward.

    Attributes:
        forwards: Number of forwards.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self._size = 0
        self._renew_lock()
        # By path and replica.
        self._counts: dict[tuple[str, int], int] = defaultdict(int)
        self._seconds: dict[tuple[str, int], float] = defaultdict(float)

    def _renew_lock(self) -> None:
        # Re-entrant: a signal handler or a finalizer may interrupt the thread that holds it.
        self._lock = threading.RLock()

    def add_forward(self, size: int) -> None:
        """Notes a forward of so many replicas."""
        with self._lock:
            self.forwards += 1
            self._size = max(self._size, size)

    def add(self, path: str, replica: int, seconds: float) -> None:
        """Notes a wait."""
        with self._lock:
            self._counts[path, replica] += 1
            self._seconds[path, replica] += seconds

    @property
    def replicas(self) -> range:
        """Those of the largest forward, whether they have waited or not."""
        return range(self._size)

    @property
    def layers(self) -> list[Waits]:
        """One entry for each layer, the one that was waited in most first."""
        with self._lock:
            layers = [
                Waits(
                    path,
                    max(self._counts.get((path, r), 0) for r in self.replicas),
                    {r: self._seconds.get((path, r), 0.0) for r in self.replicas},
                )
                for path in dict.fromkeys(path for path, _ in self._counts)
            ]
        return sorted(layers, key=lambda layer: -layer.total)

    @property
    def total(self) -> Waits:
        """All layers together."""
        return self._together("all", self.layers)

    def _together(self, name: str, layers: Sequence[Waits]) -> Waits:
        seconds = {r: sum(layer.seconds[r] for layer in layers) for r in self.replicas}
        return Waits(name, sum(layer.calls for layer in layers), seconds)

    @property
    def straggler(self) -> int | None:
        """The replica that the others wait for: it has waited less than half as long as any other,
        and these more than a millisecond per forward. None if no replica stands out so."""
        seconds = self.total.seconds
        order = sorted(seconds, key=seconds.__getitem__)
        least = 1e-3 * self.forwards  # below that it is the time to wake up a thread
        stands_out = len(order) > 1 and seconds[order[1]] > max(2 * seconds[order[0]], least)
        return order[0] if stands_out else None

    def __str__(self) -> str:
        forwards = f"{self.forwards} forward{'' if self.forwards == 1 else 's'}"
        head = f"{forwards}; milliseconds per forward that a replica waits for others"
        layers = self.layers
        if not layers:
            return f"{head}: none (it sees the replicas of a DataParallel, not processes)"
        listed = [layer._replace(path=f"`{layer.path}`") for layer in layers[:_ROWS]]
        others = layers[_ROWS:]
        if others:
            listed.append(self._together(f"{len(others)} others", others))
        rows = [self._cells(waits) for waits in (*listed, self._together("all", layers))]
        titles = ["layer", "calls", *(f"replica {r}" for r in self.replicas), "together"]
        widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in (titles, *rows)
        ]
        straggler = self.straggler
        verdict = (
            "No replica stands out as the one that the others wait for."
            if straggler is None
            else f"Replica {straggler} waits least: it is the one that the others wait for."
        )
        return "\n".join([head, *lines, f"Most is waited in {listed[0].path}. {verdict}"])

    def _per_forward(self, seconds: float) -> float:
        """In milliseconds."""
        return 1e3 * seconds / max(self.forwards, 1)

    def _cells(self, waits: Waits) -> list[str]:
        seconds = (*waits.seconds.values(), waits.total)
        return [waits.path, str(waits.calls), *(f"{self._per_forward(s):.3f}" for s in seconds)]

    def plot(self, axes: Any) -> None:
        """Draws the report: a bar for each layer, with a part for each replica.

        Args:
            axes: Of matplotlib, as of ``figure, axes = matplotlib.pyplot.subplots()``.
        """
        layers = self.layers[:_ROWS][::-1]
        left = [0.0] * len(layers)
        for replica in self.replicas:
            widths = [self._per_forward(layer.seconds[replica]) for layer in layers]
            axes.barh([w.path for w in layers], widths, left=left, label=f"replica {replica}")
            left = [sum(pair) for pair in zip(left, widths, strict=True)]
        axes.set_xlabel("waits, ms per forward")
        if layers:
            axes.legend()


#: Of the ``with`` blocks that are open, in any thread.
_reports: list[WaitReport] = []


def _renew_locks() -> None:
    """In a forked child, where the thread that holds a lock may be gone."""
    for report in _reports:
        report._renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


@contextmanager
def wait_report(quiet: bool = False) -> Iterator[WaitReport]:
    """Notes how long replicas wait for each other, in the forwards of a ``with`` block.

    At its end, unless that is an error, it prints a table of layers and replicas: in which layer
    most is waited, and which replica the others wait for. A wait is the time from a replica's
    coming to a layer that talks until the last one has come. What is slow behind the last such
    layer, or in backward, does not show. The forwards should be of one model, and warmed up. ::

        with wait_report() as report:
            for batch in batches:
                step(batch)
        figure, axes = matplotlib.pyplot.subplots()
        report.plot(axes)

    Args:
        quiet: Whether to leave the printing to you: ``print(report)``.
    """
    report = WaitReport()
    _reports.append(report)
    try:
        yield report
    finally:
        # By identity, as other threads may have added theirs.
        _reports[:] = [other for other in _reports if other is not report]
    if not quiet:
        print(report)


def observer(size: int) -> Observe | None:
    """What notes the exchanges and waits of a forward of so many replicas; None if nobody looks.

    Called when the forward begins.
    """
    reports, profiles = list(_reports), is_profiling()
    if not reports and not profiles:
        return None
    for report in reports:
        report.add_forward(size)

    arrivals = Arrivals(reports)

    def observe(what: str, replica: int, path: str) -> AbstractContextManager[object]:
        stack = ExitStack()
        if profiles:
            stack.enter_context(record_function(f"{what} {path}, replica {replica}"))
        if reports and what == "exchange":
            stack.enter_context(arrivals.of(replica, path))
        return stack

    return observe


class Arrivals:
    """Who has come when to which exchange of a forward."""

    def __init__(self, reports: list[WaitReport]) -> None:
        self._reports = reports
        self._lock = threading.RLock()
        # How often a replica has come to a path.
        self._calls: dict[tuple[str, int], int] = defaultdict(int)
        # By path and number of the call, for each replica.
        self._begun: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)

    def of(self, replica: int, path: str) -> ExitStack:
        """Around an exchange: when the first replica leaves it, the last one has come.

        Not by `contextlib.contextmanager`: it sets attributes of an error that passes, which not
        every error takes.
        """
        with self._lock:
            self._calls[path, replica] += 1
            call = path, self._calls[path, replica]
            self._begun[call][replica] = time.perf_counter()

        def leave(kind: type[BaseException] | None, *error: object) -> None:
            with self._lock:
                begun = self._begun.pop(call, {})
            end = max(begun.values(), default=0.0) if kind is None else time.perf_counter()
            for who, when in begun.items():
                for report in self._reports:
                    report.add(path, who, end - when)

        stack = ExitStack()
        stack.push(leave)
        return stack


def named_range(name: str) -> AbstractContextManager[object]:
    """A range in the profile of this thread, if there is one."""
    return record_function(name) if is_profiling() else nullcontext()
