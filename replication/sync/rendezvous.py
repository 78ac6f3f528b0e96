"""The rendezvous of one forward: replicas exchange messages, and no wait outlives its chances.

    replica 0    message ──┐
    replica 1    message ──┼──▶ the last to arrive merges them ──▶ one reply for each
    replica 2    message ──┘

Problem: a replica waits for a message that may never come, because the other replica has raised,
has ended, or waits itself. A thread that waits forever hangs the program.

The obvious way is a time limit for each wait. But a replica may compute for any time before it
sends, so every limit is too short for some forwards and too long for all errors.

Idea: the rendezvous knows what each replica does, and which waits are open: who waits, for whom,
and at which call. One rule, `Rendezvous.check`, then decides that a wait can't succeed, because it
misses a replica that has ended or doesn't take part, or because every replica that has not ended
waits. Then the forward is aborted: all of its waits raise at once, and no new one begins. So a
wait ends with its value, with `ReplicasDiverged` (the rule has decided), or with `ReplicaFailed`
(a replica has raised, or the caller was interrupted).

A replica waits in its own thread only (see `lifecycle.calling_replica`), so one that waits neither
computes nor sends. The rule can't decide one case, in which waits fail after `STALL_TIMEOUT`: a
replica has not begun. It may be about to run, or its turn may come after the waiting replica in
the same thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from replication._torch import named_range
from replication.errors import ReplicaFailed, ReplicasDiverged, ReplicationError, describe_error
from replication.texts import listed

#: Seconds after which a wait fails if it is unknown whether its value will arrive.
STALL_TIMEOUT = 20.0

#: Seconds after which a waiting thread looks for itself, because an interrupt can lose the
#: notification that should wake it.
LOOK_AGAIN = 1.0

_DIVERGED = (
    "the replicas have diverged. Every replica must make the same calls in the same order: look "
    "for branches that depend on data, and for layers in eval() in one replica only."
)

#: The path of a layer, and the ordinal of the call, counted from 1 in each forward.
Place = tuple[str, int]


def site(place: Place) -> str:
    return f"`{place[0]}`, call {place[1]}"


class State(Enum):
    """What a replica does, in the words of messages."""

    NEW = "has not begun"
    RUNS = "runs"
    ENDED = "has ended"
    ABSENT = "does not run"


_GONE = (State.ENDED, State.ABSENT)


class Wait:
    """The wait of a replica. It is open until ``is_over()``.

    Args:
        place: The call at which it waits.
        missing: The replicas whose messages it needs, which shrink as messages arrive. Empty if
            any replica can end the wait, as with `FutureResult.get`.
    """

    def __init__(
        self, replica: int, place: Place, missing: Collection[int], is_over: Callable[[], object]
    ) -> None:
        self.replica, self.place, self.missing, self.is_over = replica, place, missing, is_over


class Abort(NamedTuple):
    """Why every wait of a forward fails."""

    kind: type[ReplicationError]
    reason: str
    cause: BaseException | None

    def error(self, replica: int, place: Place) -> ReplicationError:
        """Makes the error of a replica that is at a call."""
        # Each replica raises its own error: the traceback of a shared one would grow with each.
        reason = self.reason
        if self.kind is ReplicaFailed:  # the other reasons say where each replica is
            reason += f" Replica {replica} was at {site(place)}."
        error = self.kind(reason)
        error.__cause__ = self.cause
        return error


class Rendezvous:
    """The replicas of one forward and their waits for each other.

    Args:
        in_backward: Whether the whole forward is inside a backward, which runs in the caller's
            thread.
    """

    def __init__(self, size: int, *, in_backward: bool = False) -> None:
        self.size, self.in_backward = size, in_backward
        #: Guards all of this, and the rounds of exchanges.
        self.lock = threading.RLock()
        #: Notified when a wait may be over. Code locks `lock` itself, because an interrupt between
        #: the lines of the condition's `__enter__` would leave it locked.
        self.condition = threading.Condition(self.lock)
        #: Lets waiting threads look whether their waits are over. The lock is held.
        self.wake = self.condition.notify_all
        #: The waits that have begun and whose threads have not gone on.
        self.waits: list[Wait] = []
        #: The exchange of each object that makes one by itself, a `SyncMaster`, in this forward.
        self.exchanges: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.aborted: Abort | None = None
        self._states = [State.NEW] * size
        self._failure: BaseException | None = None

    # -- the life of a replica -----------------------------------------------------------------

    def expect_only(self, replicas: Collection[int]) -> None:
        """Records that these replicas are about to run, and no others."""
        with self.lock:
            self._states = [
                State.NEW if replica in replicas else State.ABSENT for replica in range(self.size)
            ]

    def begin(self, replica: int) -> None:
        """Records that a forward begins."""
        with self.lock:
            self._states[replica] = State.RUNS

    def end(self, replica: int) -> None:
        """Records that a forward ends, by returning or by raising (see `fail`)."""
        with self.lock:
            self._states[replica] = State.ENDED
            self.check()

    def has_ended(self, replica: int) -> bool:
        return self._states[replica] is State.ENDED

    def fail(self, replica: int, error: BaseException) -> None:
        """Records that a replica has raised."""
        with self.lock:
            # A `ReplicaFailed` only follows from the first failure.
            if self._failure is None and not isinstance(error, ReplicaFailed):
                self._failure = error
        # The lock is not held, because the error's own code makes its text.
        self.abort(f"replica {replica} of {self.size} failed with {describe_error(error)}.", error)

    def take_failure(self) -> BaseException | None:
        """Returns the first failure and forgets it, because its frames refer to the replicas."""
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
        kind: type[ReplicationError] = ReplicaFailed,
    ) -> None:
        """Lets all waits fail, now and later, for the reason of the first call."""
        with self.lock:
            self.aborted = self.aborted or Abort(kind, reason, cause)
            self.wake()

    def wait(self, wait: Wait) -> None:
        """Blocks until a wait is over, or raises. The lock is held before and after."""
        self.waits.append(wait)
        late = time.monotonic() + STALL_TIMEOUT
        try:
            while not wait.is_over():
                self.check(is_late=time.monotonic() >= late)
                if self.aborted is not None:
                    raise self.aborted.error(wait.replica, wait.place)
                self.condition.wait(LOOK_AGAIN)
        finally:
            self.waits.remove(wait)

    def check(self, *, is_late: bool = False) -> None:
        """Aborts the forward if one of its waits can't succeed.

        Called with the lock held, when a replica ends, and by each wait when it begins or wakes.
        """
        states = self._states
        all_take_part = State.ENDED not in states and State.ABSENT not in states
        if all_take_part and len(self.waits) < self.size and not is_late:
            return  # nearly always: a replica computes
        open_waits = [wait for wait in self.waits if not wait.is_over()]
        if not open_waits:
            return
        # A replica that has not begun may still do so. After some time it counts as gone.
        without = (*_GONE, State.NEW) if is_late else _GONE
        gone = {replica for replica in range(self.size) if states[replica] in without}
        waiting = {wait.replica for wait in open_waits}
        missing = {replica for wait in open_waits for replica in wait.missing}
        if missing & gone or len(waiting | gone) == self.size:
            self.abort(self._reason(missing, open_waits), kind=ReplicasDiverged)

    def _reason(self, missing: set[int], open_waits: list[Wait]) -> str:
        """Says why a wait can't succeed, with a line for each replica."""
        states = self._states
        new = [replica for replica in sorted(missing) if states[replica] is State.NEW]
        reason = _DIVERGED
        if new and not any(states[replica] in _GONE for replica in missing):
            reason = (
                f"{listed(new)} did not begin within {STALL_TIMEOUT:g} s. Replicas that "
                "communicate must run at the same time, each in its own thread."
            )
        positions = [state.value for state in states]
        for wait in open_waits:
            positions[wait.replica] = f"waits at {site(wait.place)}"
        lines = [f"\n  replica {replica}: {text}" for replica, text in enumerate(positions)]
        return reason + "".join(lines)


class Round:
    """One call of an exchange."""

    def __init__(self, replicas: Iterable[int]) -> None:
        self.missing = set(replicas)
        self.messages: dict[int, Any] = {}
        self.replies: dict[int, Any] = {}


class Exchange:
    """The calls that some replicas of one forward make together, one after the other.

    Keeps no reference to its rendezvous, which keeps the exchanges of pipes: a cycle would keep
    the forward until the next garbage collection.

    Args:
        path: The name of the calls in messages.
    """

    def __init__(self, path: str, replicas: Iterable[int]) -> None:
        self.path = path
        #: How often each replica has called.
        self.calls = dict.fromkeys(replicas, 0)
        self._round = Round(self.calls)

    def add(self, replica: int) -> None:
        """Lets a replica take part from the current call on. The lock is held."""
        self.calls[replica] = 0
        self._round.missing.add(replica)

    def merge(self, messages: list[Any]) -> Iterable[Any]:
        """Returns one reply for each message. Both are in the order of the replicas."""
        raise NotImplementedError

    def __call__(self, rendezvous: Rendezvous, replica: int, message: Any) -> Any:
        """Sends a message, and returns the reply once the messages of all are merged."""
        with named_range(f"exchange {self.path}, replica {replica}"):
            with rendezvous.lock:
                current = self._round
                self.calls[replica] += 1
                place = self.path, self.calls[replica]
                if rendezvous.aborted is not None:
                    raise rendezvous.aborted.error(replica, place)
                current.messages[replica] = message
                current.missing.remove(replica)
                if current.missing:
                    self._await_reply(rendezvous, replica, current, place)
                    return current.replies.pop(replica)
                self._round = Round(self.calls)
            try:
                return self._answer_all(rendezvous, replica, current)
            except BaseException as error:
                rendezvous.fail(replica, error)  # the others wait for their replies
                raise

    def _await_reply(
        self, rendezvous: Rendezvous, replica: int, current: Round, place: Place
    ) -> None:
        is_over = partial(current.replies.__contains__, replica)
        try:
            with named_range(f"wait {self.path}, replica {replica}"):
                rendezvous.wait(Wait(replica, place, current.missing, is_over))
        except BaseException:
            # Unless another thread merges, the message is taken back, because it may refer to this
            # exchange, and only the garbage collector would free the two.
            if current.missing:
                del current.messages[replica]
                current.missing.add(replica)
            raise

    def _answer_all(self, rendezvous: Rendezvous, replica: int, current: Round) -> Any:
        replicas = sorted(current.messages)
        # No variable holds the messages, because the traceback of an error refers to this frame.
        replies = self.merge(list(map(current.messages.pop, replicas)))
        with rendezvous.lock:
            current.replies.update(zip(replicas, replies, strict=True))
            rendezvous.wake()
            return current.replies.pop(replica)
