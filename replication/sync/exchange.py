"""Exchanges between replicas: every replica sends a message and receives a reply.

    replica 0    message ──┐
    replica 1    message ──┼──▶ one thread merges them ──▶ one reply for each
    replica 2    message ──┘

By default the last replica to arrive merges: one thread switch fewer than waiting for a fixed
replica. The state of one call lives in a `Round`, and only the participants refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from replication.errors import ReplicationError
from replication.sync.positions import site
from replication.sync.rendezvous import Rendezvous, Wait

_UNOBSERVED = nullcontext()

#: Returns one reply for each message, in order. Messages are in the order of the replicas.
Merge = Callable[[list[Any]], Iterable[Any]]


class Round:
    def __init__(self, replicas: Iterable[int]) -> None:
        self.messages: dict[int, Any] = {}
        self.missing = set(replicas)
        self.replies: dict[int, Any] = {}
        self.waits: dict[int, Wait] = {}


# `path` names the calls in messages. A `master` merges, if there is one.
class Exchange:
    """The sequence of calls that some replicas of one forward make together."""

    def __init__(self, path: str, replicas: Iterable[int], master: int | None = None) -> None:
        self.path = path
        self.calls = dict.fromkeys(replicas, 0)
        self.master = master
        self._round = Round(self.calls)

    def add(self, replica: int) -> None:
        """Lets a replica take part from the current call on. The lock is held."""
        self.calls[replica] = 0
        self._round.missing.add(replica)

    def __call__(
        self, rendezvous: Rendezvous, replica: int, message: Any, merge: Merge | None
    ) -> Any:
        """Sends a message, and returns the reply once the messages of all are merged."""
        # The rendezvous is not kept, as it may refer to the exchange. `merge` is None if the
        # replica is not the master.
        observe = rendezvous.observe
        with observe("exchange", replica, self.path) if observe else _UNOBSERVED:
            wait = None
            with rendezvous.lock:
                current = self._round
                if replica in current.messages:
                    raise ReplicationError(
                        f"`{self.path}`: replica {replica} calls it in several threads at a time"
                    )
                self.calls[replica] += 1
                call = self.calls[replica]
                if rendezvous.abort is not None:
                    raise rendezvous.abort.error(replica, site(self.path, call))
                current.messages[replica] = message
                current.missing.remove(replica)
                is_complete = not current.missing
                merges = is_complete if self.master is None else replica == self.master
                if is_complete:
                    self._round = Round(self.calls)
                if not (is_complete and merges):
                    missing = current.missing  # the same set: it shrinks as messages arrive
                    if not merges and self.master is not None:
                        missing = {self.master}
                        # The master waits for this message only. Before the wait of this slave
                        # begins, because then all would seem to be blocked.
                        if is_complete:
                            rendezvous.end_waits([current.waits[self.master]])
                    wait = rendezvous.begin_wait(replica, missing, self.path, call)
                    current.waits[replica] = wait
                    # The master may be faster. It sets the replies and then looks for waits, so
                    # one of both sees the other.
                    if current.replies:
                        rendezvous.end_waits([wait])
            try:
                if wait is not None:
                    with observe("wait", replica, self.path) if observe else _UNOBSERVED:
                        wait.block()
                if merges and merge is not None:
                    self._reply(rendezvous, current, merge)
            except BaseException as error:
                with rendezvous.lock:
                    is_pending = current is self._round
                    if is_pending:  # the message is taken back, so that the replica can call again
                        del current.messages[replica], current.waits[replica]
                        current.missing.add(replica)
                if merges and not is_pending:  # the others wait for replies
                    rendezvous.fail(replica, error)
                raise
            return current.replies[replica]

    def _reply(self, rendezvous: Rendezvous, current: Round, merge: Merge) -> None:
        replicas = sorted(current.messages)
        # Not in a variable: graphs in the messages may hold the replicas.
        replies = list(merge(list(map(current.messages.pop, replicas))))
        current.replies = dict(zip(replicas, replies, strict=True))
        rendezvous.end_waits(list(current.waits.values()))  # the last slave may yet add its own
