"""The exchange between the replicas of a group: each leaves a message and gets a reply.

    replica 0    message ──┐
    replica 1    message ──┼──▶ the last to arrive merges them ──▶ one reply for each
    replica 2    message ──┘

The last to arrive merges: one thread switch fewer than waiting for a fixed replica. What a call
leaves behind lives in one `Round`, which its participants alone refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from replication.sync.rendezvous import Rendezvous, Site, Wait, two_at_once

__all__: list[str] = []

_EMPTY: Any = object()


class Round:
    """The messages and the replies of one call, by rank."""

    __slots__ = ("messages", "missing", "replies", "waits")

    def __init__(self, replicas: Sequence[int]) -> None:
        self.messages = [_EMPTY] * len(replicas)
        #: The replicas whose message has not arrived.
        self.missing = set(replicas)
        self.replies: list[Any] = []
        self.waits: dict[int, Wait] = {}


class Exchange:
    """The calls that some replicas of one forward make together, one after the other.

    Args:
        rendezvous: The rendezvous of the forward.
        path: The name of the calls in messages.
        replicas: The replicas that take part, by rank.
    """

    def __init__(self, rendezvous: Rendezvous, path: str, replicas: Sequence[int]) -> None:
        self.rendezvous = rendezvous
        self.path = path
        self.replicas = tuple(replicas)
        # How often each replica has called, for messages.
        self._calls = dict.fromkeys(replicas, 0)
        self._round = Round(replicas)

    def __call__(
        self, rank: int, message: Any, merge: Callable[[Site, list[Any]], Iterable[Any]]
    ) -> Any:
        """Leaves a message, and returns the reply once the messages of all ranks have arrived.

        Args:
            rank: The rank of the caller.
            message: Any object.
            merge: Called in the thread of the last to arrive, with the messages by rank. Returns
                the replies by rank.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: A message can no longer arrive.
        """
        rendezvous = self.rendezvous
        if rendezvous.observe is None:
            return self._exchanged(rank, message, merge)
        with rendezvous.observe("exchange", self.replicas[rank], self.path):
            return self._exchanged(rank, message, merge)

    def _exchanged(
        self, rank: int, message: Any, merge: Callable[[Site, list[Any]], Iterable[Any]]
    ) -> Any:
        rendezvous, replica = self.rendezvous, self.replicas[rank]
        wait = None
        with rendezvous.lock:
            current = self._round
            if current.messages[rank] is not _EMPTY:
                raise two_at_once(self.path, replica)
            self._calls[replica] += 1
            site = Site(self.path, self._calls[replica])
            rendezvous.refuse_if_over(replica, site)
            current.messages[rank] = message
            current.missing.remove(replica)
            if current.missing:
                wait = rendezvous.begin_wait(replica, current.missing, site, self._calls)
                current.waits[rank] = wait
            else:
                self._round = Round(self.replicas)
        if wait is None:
            self._reply(current, replica, lambda messages: merge(site, messages))
        else:
            try:
                wait.block()
            except BaseException:
                self._take_back(current, rank)
                raise
        return current.replies[rank]

    def _reply(
        self, current: Round, replica: int, merge: Callable[[list[Any]], Iterable[Any]]
    ) -> None:
        messages, current.messages = current.messages, []
        try:
            replies = list(merge(messages))
        except BaseException as error:
            self.rendezvous.fail(replica, error)
            raise
        finally:
            del messages  # graphs in them may hold the replicas
        with self.rendezvous.lock:
            current.replies = replies
            for wait in current.waits.values():
                self.rendezvous.end_wait(wait)

    def _take_back(self, current: Round, rank: int) -> None:
        """Removes a message that was not merged, so that the next call of its rank finds room."""
        with self.rendezvous.lock:
            if current is self._round:
                current.messages[rank] = _EMPTY
                current.missing.add(self.replicas[rank])
                current.waits.pop(rank, None)
