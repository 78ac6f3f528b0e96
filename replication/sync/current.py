"""What each thread is busy with: a replica's forward, or one of its callbacks."""

from __future__ import annotations

import threading
from typing import NamedTuple

from replication._torch import NO_BACKWARD, current_backward
from replication.sync.rendezvous import Rendezvous

__all__: list[str] = []


class CurrentReplica(NamedTuple):
    """What a thread is busy with: a replica's forward, or one callback of it."""

    rendezvous: Rendezvous
    replica: int
    #: The backward that the thread was in when it came here; see
    #: `replication._torch.current_backward`.
    backward: int
    #: Path of the module whose callback runs; empty in a forward.
    path: str = ""


class _Here(threading.local):
    place: CurrentReplica | None = None


_here = _Here()


def current_replica() -> CurrentReplica | None:
    """The innermost replica's forward or callback that this thread runs, if any."""
    return _here.place


class set_current_replica:
    """Makes `current_replica` return ``place`` inside the ``with`` block.

    A class: `contextlib.contextmanager` sets attributes of an exception that passes, which not
    every exception takes.
    """

    def __init__(self, place: CurrentReplica) -> None:
        self._place = place

    def __enter__(self) -> None:
        self._outer, _here.place = _here.place, self._place

    def __exit__(self, *exc_info: object) -> None:
        _here.place = self._outer


def is_recomputation() -> bool:
    """Whether this thread recomputes: in a backward, or in a replica whose caller is in one."""
    place = current_replica()
    return current_backward() != NO_BACKWARD or (
        place is not None and place.rendezvous.in_backward
    )
