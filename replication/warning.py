"""Warnings that point at the user's line, and an answer that is True once for an object."""

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


#: The answers that `once_for` has left, by the id of the owner: a dictionary has no hash.
_answers: dict[int, dict[str, bool]] = {}


def once_for(owner: object) -> bool:
    """Returns True on the first call for an object, in any thread."""
    # Beside the object instead of in an attribute, which would be copied and pickled.
    if id(owner) not in _answers:
        finalize(owner, _answers.pop, id(owner), None)
    # Atomic. A signal handler could interrupt the thread that holds a lock.
    return _answers.setdefault(id(owner), {"first": True}).pop("first", False)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of torch and this toolkit, if this thread has one."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _SKIPPED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level if frame else 2)
