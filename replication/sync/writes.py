"""Writes of one forward into the original module, such as running statistics.

Problem: replicas may still run after the forward has raised in the caller, who saves the module.

The obvious way is a lock around each write, which the caller takes to close the forward. But a
finalizer that interrupts a write may run a forward of its own, whose replicas would wait for it.

Idea: a write announces itself, then looks whether the forward is closed. The caller closes it,
then waits for what is announced. Both begin by adding to one set, so whichever comes second sees
the other, also without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from replication.errors import ReplicationError

T = TypeVar("T")

#: The seconds that the caller of a forward that failed waits for writes in progress.
LONGEST_WRITE = 1.0

_CLOSED = object()


class Writes:
    def __init__(self) -> None:
        #: An object for each write under way, and `_CLOSED`.
        self._entries: set[object] = set()
        self._end: float | None = None

    @property
    def are_closed(self) -> bool:
        return _CLOSED in self._entries

    def commit(self, write: Callable[[], T]) -> T:
        key = object()
        try:
            self._entries.add(key)
            if _CLOSED in self._entries:
                raise ReplicationError("the caller has ended the forward of this replica")
            return write()
        finally:
            self._entries.discard(key)

    def close(self) -> None:
        """Forbids writes from now on, waits for writes under way, and then raises interrupts."""
        self._entries.add(_CLOSED)
        # Called again, after an interrupt, it only waits for what is left of the time.
        self._end = end = self._end or time.monotonic() + LONGEST_WRITE
        interrupt: BaseException | None = None
        while len(self._entries) > 1 and time.monotonic() < end:
            try:
                time.sleep(0.001)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt
