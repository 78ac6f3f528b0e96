"""Warnings that point at the user's line, and flags that return True once."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from weakref import finalize

__all__ = ["UnsynchronizedWarning"]

#: The packages whose frames lie between a warning and the user's line.
_SKIPPED = {"replication", "syncbn", "torch", "contextlib", "threading"}


class UnsynchronizedWarning(UserWarning):
    """A layer uses only its replica's part of the batch.

    If you want that, filter the category::

        warnings.filterwarnings("ignore", category=replication.UnsynchronizedWarning)
    """


class WarnOnce:
    """A flag that returns True on its first call, in any thread."""

    def __init__(self) -> None:
        self._answers = {"first": True}

    def __call__(self) -> bool:
        # Atomic. A signal handler could interrupt the thread that holds a lock.
        return self._answers.pop("first", False)


#: By the id of the owner, because a dictionary has no hash.
_flags: dict[int, WarnOnce] = {}


def once_for(owner: object) -> WarnOnce:
    """Returns the flag of an object. It is not an attribute, so it is not copied or pickled."""
    if id(owner) not in _flags:
        finalize(owner, _flags.pop, id(owner), None)
    return _flags.setdefault(id(owner), WarnOnce())


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of torch and this toolkit, if this thread has one."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _SKIPPED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level if frame else 2)
