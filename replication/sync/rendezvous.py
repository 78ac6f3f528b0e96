"""The rendezvous of one forward: replicas exchange messages, and no wait outlives its chances.

    replica 0    message ──┐
    replica 1    message ──┼──▶ the last to arrive merges them ──▶ one reply for each
    replica 2    message ──┘

Problem: a replica waits for a message that may never come, because the other replica has raised,
has ended, or waits itself. A thread that waits for ever hangs the program.

The obvious way is a time limit for each wait. But a replica may compute for any time before it
sends, so every limit is too short for some forwards and too long for all errors.

Idea: the rendezvous knows which replicas are running, and for whom each wait waits. One rule,
`Rendezvous.check`, then decides that a wait can no longer end. All waits of the forward fail at
once, and no new one begins. A wait ends with its value, `ReplicaFailed` (a replica raised) or
`ReplicasDiverged` (no replica can send the value any more).

Two cases stay unknown. Then waits fail after `STALL_TIMEOUT`:

    * A replica has not begun. It may be about to run, or its turn may come after the waiting
      replica in the same thread.
    * A thread that a replica has started waits. The replica's own thread may be computing, or
      waiting for that one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from replication._torch import named_range
from replication.errors import (
    ReplicaFailed,
    ReplicasDiverged,
    ReplicationError,
    describe_error,
    listed,
)

#: The seconds after which a wait fails if it is unknown whether its value will arrive.
STALL_TIMEOUT = 20.0

#: What a replica does, in the words of messages.
NEW, RUNS, ENDED, ABSENT = "has not begun", "runs", "has ended", "does not run"

#: Returns one reply for each message, in order. Messages are in the order of the replicas.
Merge = Callable[[list[Any]], Iterable[Any]]


def site(path: str, call: int) -> str:
    return f"`{path}`, call {call}"


class Abort(NamedTuple):
    """The reason why every wait of a forward fails."""

    kind: type[ReplicationError]
    reason: str
    cause: BaseException | None

    def error(self, replica: int, place: str) -> ReplicationError:
        """Makes the error of a replica that is at a call."""
        # A new error each: the traceback of a shared one would grow with each replica.
        names_all = self.kind is ReplicasDiverged  # see `Rendezvous._positions`
        where = "" if names_all else f" Replica {replica} was at {place}."
        error = self.kind(self.reason + where)
        error.__cause__ = self.cause
        return error


# `missing` is the set of replicas that it waits for, which shrinks as messages arrive, or () if
# any replica may end the wait.
class Wait:
    """The wait of a replica, until ``is_over()``."""

    def __init__(
        self, replica: int, missing: Collection[int], place: str, is_over: Callable[[], object]
    ) -> None:
        self.replica, self.missing, self.place, self.is_over = replica, missing, place, is_over
        self.thread = threading.get_ident()


class Rendezvous:
    """The replicas of one forward and their waits for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: Guards all of this and the rounds of exchanges.
        self.lock = threading.RLock()
        #: Notified when a wait may be over. It has methods in Python, so `lock` is locked.
        self.condition = threading.Condition(self.lock)
        self.waits: list[Wait] = []
        self.aborted: Abort | None = None
        #: Whether all of this forward is inside a backward, which runs in the caller's thread.
        self.in_backward = False
        #: The channel of each `SyncMaster` in this forward.
        self.channels: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        #: The rendezvous of the outer forward, if this forward runs inside one of its replicas.
        self.outer: Rendezvous | None = None
        self._states = [NEW] * size
        self._threads = [0] * size
        self._failure: BaseException | None = None

    # -- the life of a replica -----------------------------------------------------------------

    def expect_only(self, replicas: Collection[int]) -> None:
        """Reports that these replicas are about to run, and no others."""
        with self.lock:
            self._states = [NEW if r in replicas else ABSENT for r in range(self.size)]

    def begin(self, replica: int) -> bool:
        """Reports that a forward begins. Returns False if the replica runs already."""
        with self.lock:
            if self._states[replica] == RUNS:
                return False
            self._states[replica], self._threads[replica] = RUNS, threading.get_ident()
            return True

    def end(self, replica: int) -> None:
        """Reports that a forward ends, by returning or by raising (see `fail`)."""
        with self.lock:
            self._states[replica] = ENDED
            self.check()

    def has_ended(self, replica: int) -> bool:
        return self._states[replica] == ENDED

    def fail(self, replica: int, error: BaseException) -> None:
        """Reports that a replica has raised."""
        with self.lock:
            if self._failure is None and not isinstance(error, ReplicaFailed):
                self._failure = error
        # The error's own code makes its text, so the lock is not held.
        reason = f"replica {replica} of {self.size} failed with {describe_error(error)}."
        self.abort(reason, error, kind=ReplicaFailed)

    def take_failure(self) -> BaseException | None:
        """Drops the first failure, because its frames refer to the replicas, and returns it."""
        with self.lock:
            failure, self._failure = self._failure, None
            if self.aborted is not None:
                self.aborted = self.aborted._replace(cause=None)
            return failure

    # -- waiting -------------------------------------------------------------------------------

    def abort(
        self,
        reason: str,
        cause: BaseException | None = None,
        *,
        kind: type[ReplicationError] = ReplicationError,
    ) -> None:
        """Fails all waits, now and later, for the reason of the first call."""
        with self.lock:
            self.aborted = self.aborted or Abort(kind, reason, cause)
            self.condition.notify_all()

    def wait(self, wait: Wait) -> None:
        """Blocks until the wait is over, or raises. The lock is held before and after."""
        self.waits.append(wait)
        late = time.monotonic() + STALL_TIMEOUT
        try:
            while not wait.is_over():
                self.check(is_late=time.monotonic() >= late)
                if self.aborted is not None:
                    raise self.aborted.error(wait.replica, wait.place)
                # An interrupt may lose a notification, so it looks once a second.
                self.condition.wait(min(1.0, STALL_TIMEOUT))
        finally:
            self.waits.remove(wait)

    def check(self, *, is_late: bool = False) -> None:
        """Aborts the forward if one of its waits can no longer end."""
        # The lock is held, and a wait has begun or gone on, or a replica has ended.
        waits = [wait for wait in self.waits if not wait.is_over()]
        some_are_over = ENDED in self._states or ABSENT in self._states
        if not (some_are_over or is_late) and len(waits) < self.size:
            return  # nearly always: a replica runs
        is_merging = any(wait.missing == set() for wait in waits)  # all messages are there
        if not waits or is_merging or self.aborted is not None:
            return
        missing = {replica for wait in waits for replica in wait.missing}
        over = {r for r, state in enumerate(self._states) if state in (ENDED, ABSENT)}
        # The own thread of a replica may be computing while another of its threads waits.
        waiting = {w.replica for w in waits if is_late or w.thread == self._threads[w.replica]}
        new = sorted(r for r in missing if self._states[r] == NEW)
        if missing & over or len(waiting | over) == self.size:
            reason = (
                "the replicas have diverged. Every replica must make the same calls in the same "
                "order: look for branches that depend on data, and for layers in eval() in one "
                "replica only."
            )
        elif is_late and new:
            reason = (
                f"{listed(new)} did not begin within {STALL_TIMEOUT:g} s. Replicas that "
                "communicate must run at the same time, each in a thread of its own."
            )
        else:
            return
        self.abort(reason + self._positions(waits), kind=ReplicasDiverged)

    def _positions(self, waits: list[Wait]) -> str:
        """A line for each replica."""
        texts = self._states[:]
        for wait in waits:
            texts[wait.replica] = f"waits at {wait.place}"
            if self._states[wait.replica] != RUNS:
                texts[wait.replica] += (
                    ", outside the forward (in a recomputation, by another method, or through a "
                    "part of the replica)"
                )
        return "".join(f"\n  replica {r}: {text}" for r, text in enumerate(texts))


class Round:
    """The state of one call of an exchange. Only the participants refer to it."""

    def __init__(self, replicas: Iterable[int]) -> None:
        self.messages: dict[int, Any] = {}
        self.missing = set(replicas)
        self.replies: dict[int, Any] = {}


# `path` names the calls in messages.
class Exchange:
    """The sequence of calls that some replicas of one forward make together."""

    def __init__(self, path: str, replicas: Iterable[int]) -> None:
        self.path = path
        self.calls = dict.fromkeys(replicas, 0)
        self._round = Round(self.calls)

    def add(self, replica: int) -> None:
        """Lets a replica take part from the current call on. The lock is held."""
        self.calls[replica] = 0
        self._round.missing.add(replica)

    # The rendezvous is not kept, as it may refer to the exchange.
    def __call__(self, rendezvous: Rendezvous, replica: int, message: Any, merge: Merge) -> Any:
        """Sends a message, and returns the reply once the messages of all are merged."""
        with named_range(f"exchange {self.path}, replica {replica}"):
            with rendezvous.lock:
                current = self._round
                if replica in current.messages:
                    raise ReplicationError(
                        f"`{self.path}`: replica {replica} calls it in several threads at a time"
                    )
                self.calls[replica] += 1
                place = site(self.path, self.calls[replica])
                if rendezvous.aborted is not None:
                    raise rendezvous.aborted.error(replica, place)
                current.messages[replica] = message
                current.missing.remove(replica)
                if current.missing:
                    self._await_reply(rendezvous, replica, current, place)
                    return current.replies.pop(replica)
                self._round = Round(self.calls)
            try:
                return self._merge(rendezvous, replica, current, merge)
            except BaseException as error:
                rendezvous.fail(replica, error)  # the others wait for replies
                raise

    def _await_reply(
        self, rendezvous: Rendezvous, replica: int, current: Round, place: str
    ) -> None:
        is_over = partial(current.replies.__contains__, replica)
        wait = Wait(replica, current.missing, place, is_over)
        try:
            with named_range(f"wait {self.path}, replica {replica}"):
                rendezvous.wait(wait)
        except BaseException:  # the message is taken back, as it may refer to the exchange
            if current.messages.pop(replica, None) is not None:
                current.missing.add(replica)
            raise

    def _merge(self, rendezvous: Rendezvous, replica: int, current: Round, merge: Merge) -> Any:
        replicas = sorted(current.messages)
        # Not in a variable: graphs in the messages may hold the replicas.
        replies = merge(list(map(current.messages.pop, replicas)))
        with rendezvous.lock:
            current.replies.update(zip(replicas, replies, strict=True))
            rendezvous.condition.notify_all()
            return current.replies.pop(replica)
