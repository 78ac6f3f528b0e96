"""What each thread is busy with: a replica's forward, or one of its callbacks."""

from __future__ import annotations

import threading
from typing import NamedTuple

from replication.rendezvous import Rendezvous

__all__: list[str] = []


class Place(NamedTuple):
    """What a thread is busy with: a replica's forward, or one callback of it."""

    rendezvous: Rendezvous
    replica: int
    #: The backward that the thread was in when it came here; see
    #: `replication.torch_internals.current_backward`.
    backward: int
    #: Path of the module whose callback runs; empty in a forward.
    path: str = ""


class _Here(threading.local):
    place: Place | None = None


_here = _Here()


def here() -> Place | None:
    """The innermost replica's forward or callback that this thread runs, if any."""
    return _here.place


class standing_at:
    """Makes `here` return ``place`` inside the ``with`` block.

    A class: `contextlib.contextmanager` sets attributes of an exception that passes, which not
    every exception takes.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        self._outer, _here.place = _here.place, self._place

    def __exit__(self, *exc_info: object) -> None:
        _here.place = self._outer
