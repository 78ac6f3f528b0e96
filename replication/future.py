"""`FutureResult`: hands one value at a time from one thread to another."""

from __future__ import annotations

import threading
from typing import Any

from replication.errors import ReplicationError
from replication.place import here
from replication.rendezvous import Rendezvous, Site, Wait

__all__ = ["FutureResult"]

_EMPTY: Any = object()


class FutureResult:
    """A mailbox for one value, between a thread that puts and a thread that gets.

    It can be used again once its result has been fetched. Any value passes, ``None`` included.
    Inside a replica's forward, `get` raises as every wait does (`ReplicaFailed`,
    `ReplicasDiverged`) when no other replica can put any more.
    """

    def __init__(self) -> None:
        # Held for a few assignments, inside which no other lock is taken and no foreign code runs.
        self._lock = threading.Lock()
        self._result = _EMPTY
        self._has_getter = False
        self._wait: Wait | None = None

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return FutureResult, ()  # a copy has no getter and holds nothing

    def put(self, result: Any) -> None:
        """Hands over ``result``.

        Raises:
            ReplicationError: The previous result has not been fetched.
        """
        with self._lock:
            is_free = self._result is _EMPTY
            if is_free:
                self._result = result
        if not is_free:
            raise ReplicationError(
                "a FutureResult holds one result at a time (put was called before the previous "
                "result was fetched); call get first"
            )
        wait = self._wait
        if wait is not None:
            with wait.rendezvous.lock:
                wait.rendezvous.end_wait(wait)

    def get(self) -> Any:
        """Returns the result, after waiting for it if it is not there yet.

        Raises:
            ReplicationError: Another thread is in `get`.
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: No replica can put the result any more.
        """
        with self._lock:
            is_alone, self._has_getter = not self._has_getter, True
        if not is_alone:
            raise ReplicationError(
                "a FutureResult serves one getter at a time (get was called while another thread "
                "is in it); give each thread that gets a FutureResult of its own"
            )
        try:
            self._await_result()
            with self._lock:
                result, self._result = self._result, _EMPTY
            return result
        finally:
            self._wait = None
            self._has_getter = False

    def _await_result(self) -> None:
        place = here()
        rendezvous = place.rendezvous if place else Rendezvous(None)
        # While this lock is held no replica can end, so a replica that puts counts as running.
        with rendezvous.lock:
            if self._result is not _EMPTY:
                return
            replica = place.replica if place else 0
            wait = rendezvous.begin_wait(replica, (), Site("FutureResult", 1), {})
            self._wait = wait
            # A put between the two looks has not seen the wait.
            if self._result is not _EMPTY:
                rendezvous.end_wait(wait)
        wait.block()
