"""`FutureResult`: hands one value from one thread to another."""

from __future__ import annotations

import threading
from typing import Any

from replication.errors import ReplicationError
from replication.place import here
from replication.rendezvous import Rendezvous, Site, Wait

__all__ = ["FutureResult"]

_EMPTY: Any = object()


class FutureResult:
    """A pipe of one slot, from one thread that puts to one thread that gets.

    It can be used again once its result has been fetched. Any value passes, ``None`` included.
    Inside a replica's forward, `get` raises as every wait does (`ReplicaFailed`,
    `ReplicasDiverged`) when no other replica can put any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._result = _EMPTY
        self._wait: Wait | None = None

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return FutureResult, ()  # a copy waits for nobody and holds nothing

    def put(self, result: Any) -> None:
        """Hands over ``result``.

        Raises:
            ReplicationError: The previous result has not been fetched.
        """
        with self._lock:
            if self._result is not _EMPTY:
                raise ReplicationError("the previous result has not been fetched")
            self._result = result
            wait = self._wait
            if wait is not None:
                with wait.rendezvous.lock:
                    wait.rendezvous.end_wait(wait)

    def get(self) -> Any:
        """Returns the result, after waiting for it if it is not there yet."""
        wait = None
        with self._lock:
            if self._result is _EMPTY:
                place = here()
                rendezvous = place.rendezvous if place else Rendezvous(None)
                with rendezvous.lock:
                    wait = self._wait = rendezvous.begin_wait(
                        place.replica if place else 0, (), Site("FutureResult", 1), {}
                    )
        if wait is not None:
            try:
                wait.block()
            finally:
                with self._lock:
                    self._wait = None
        with self._lock:
            result, self._result = self._result, _EMPTY
        return result
