"""Every deadline of the suite: where a hang is told apart from a slow machine.

A wait is hung when nothing computes while it lasts. On a busy machine a test computes slowly, yet
its processor time grows, and each second of it extends the deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

#: Seconds without progress after which a wait counts as hung.
STALLED = 20.0

#: Seconds without progress after which a whole test counts as hung. The helpers below come first:
#: they know what the test waits for.
TEST_STALLED = 60.0

#: Seconds that each second of processor time adds to a deadline. A test that gets less than a
#: tenth of a core is not told apart from one that polls.
PATIENCE = 10.0

#: Seconds for waits that only know wall-clock time (of locks, queues, process groups). Nothing
#: relies on their end, so they are far longer than any wait of a healthy test.
DEADLINE = 120.0

#: Seconds between two looks at a condition, at first and at most: polling is no progress.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class Deadline:
    """Passes after some seconds without progress of this process and its descendants."""

    def __init__(self, seconds: float = STALLED) -> None:
        self._ignored = _computed()
        self._first = self._end = time.monotonic() + seconds

    def has_passed(self) -> bool:
        if time.monotonic() > self._end:
            self._end = self._first + PATIENCE * (_computed() - self._ignored)
        return time.monotonic() > self._end

    def ignore(self, seconds: float) -> None:
        """Does not count so many seconds of processor time as progress."""
        self._ignored += seconds


class Joinable(Protocol):
    """A thread or a process."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float) -> object: ...


def soon(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true while there is progress."""
    deadline, pause, begun = Deadline(), _FIRST_PAUSE, time.thread_time()
    while not condition():
        # A condition that computes must not extend the deadline for ever.
        deadline.ignore(time.thread_time() - begun)
        if deadline.has_passed():
            return False
        begun = time.thread_time()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def ends(waited_for: Joinable, seconds: float = STALLED) -> bool:
    """Whether a thread or process that has been started ends while there is progress."""
    deadline = Deadline(seconds)
    while waited_for.is_alive() and not deadline.has_passed():
        waited_for.join(_LONGEST_PAUSE)
    return not waited_for.is_alive()


def _computed() -> float:
    """The processor seconds of this process and its descendants."""
    return sum(os.times()[:4]) + _computed_by_descendants()


def _computed_by_descendants() -> float:
    """The processor seconds of running descendants; 0 on systems without ``/proc``."""
    children: dict[int, list[tuple[int, int]]] = defaultdict(list)
    # A list at once: an iterator over a directory that a test's Ctrl-C interrupts stays open.
    for pid in filter(str.isdigit, os.listdir("/proc") if Path("/proc").exists() else ()):
        try:
            # The name of the program, in parentheses, can hold anything.
            stat = Path("/proc", pid, "stat").read_text(errors="replace")
        except OSError:  # it has ended
            continue
        fields = stat.rpartition(")")[2].split()
        children[int(fields[1])].append((int(pid), sum(map(int, fields[11:15]))))

    def ticks_below(parent: int) -> int:
        return sum(ticks + ticks_below(child) for child, ticks in children[parent])

    return ticks_below(os.getpid()) / os.sysconf("SC_CLK_TCK") if children else 0.0


def is_idle(thread: threading.Thread) -> bool:
    """Whether a thread of a replica waits for its next forward."""
    return thread.name.startswith("idle replica-")
