"""One forward's meeting place: who runs, who waits for whom, who has ended.

The problem. The replicas of one forward run in threads and wait for each other's messages. If one
of them raises, returns early or waits elsewhere, a message that the others wait for never comes.

Guarantees
    * Every wait ends: in its value, in `ReplicaFailed` (a replica raised), in `ReplicasDiverged`
      (no replica can send the value any more) or, where a deadline is set, in `ReplicasTimedOut`.
    * When one wait fails all fail, at once, and no later wait in the same forward begins.
    * Nothing outlives the forward: a new forward has a new `Rendezvous`, and from `close` on the
      replicas of the old one write nothing (`commit`).

The beginning and the end of each replica's forward are reported (`enter`, `leave`), so waits need
no time limit except in two cases, where it is unknown whether the value will come. A replica that
has not begun may be run after the others in the same thread, or may wait for a thread. And a
replica whose own thread goes on while another thread of it waits may be computing, or waiting for
that thread. Both are given `GRACE`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from replication.errors import (
    ReplicaFailed,
    ReplicasDiverged,
    ReplicasTimedOut,
    ReplicationError,
    described,
    listed,
)

__all__: list[str] = []


#: Seconds.
GRACE = 20.0

_NOBODY: AbstractContextManager[object] = nullcontext()


class Site(NamedTuple):
    """Where a wait takes place, for messages: a channel's name and the number of the call."""

    path: str
    call: int

    def __str__(self) -> str:
        return f"`{self.path}`, call {self.call}"


class Wait:
    """One replica's wait: begun and ended under the rendezvous' lock, blocked on outside it."""

    __slots__ = ("_gate", "calls", "error", "needs", "rendezvous", "replica", "site", "thread")

    def __init__(
        self,
        rendezvous: Rendezvous,
        replica: int,
        needs: Collection[int],
        site: Site,
        calls: dict[int, int],
    ) -> None:
        self.rendezvous = rendezvous
        self.replica = replica
        #: Replicas whose message is still missing; the channel shrinks it as messages arrive.
        self.needs = needs
        self.site = site
        #: How often each replica has called this channel, for messages.
        self.calls = calls
        self.error: Abort | None = None
        self.thread = threading.get_ident()
        # A bare lock is the cheapest thing that a thread can sleep on.
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        """Lets `block` return. The rendezvous' lock is held."""
        self._gate.release()

    def block(self) -> None:
        """Sleeps until the wait has ended; raises if it has ended without a value."""
        rendezvous = self.rendezvous
        try:
            with rendezvous.observed("wait", self.replica, self.site.path):
                while not self._gate.acquire(timeout=rendezvous.patience()):
                    rendezvous.expect_progress(self)
        except BaseException:  # KeyboardInterrupt, where a replica runs in the main thread
            rendezvous.forget(self)
            raise
        error, self.error = self.error, None
        if error is not None:
            error.raise_at(self)


class Abort(NamedTuple):
    """The reason why no wait of this forward can be met any more."""

    kind: type[ReplicationError]
    reason: str
    cause: BaseException | None

    def raise_at(self, wait: Wait | None = None, later: str = "") -> NoReturn:
        """Raises a new error in each waiting replica: the traceback of one for all would grow."""
        if self.kind is ReplicasDiverged:  # in which arriving later has no part
            later = ""
        where = f" Replica {wait.replica} waited at {wait.site}." if wait and self.cause else ""
        raise self.kind(self.reason + where + later) from self.cause


class Failure(NamedTuple):
    """A replica and what it raised."""

    replica: int
    error: BaseException


class Rendezvous:
    """The replicas of one forward and their waits for each other.

    Args:
        size: Number of replicas. ``None`` where the beginning and the end of a participant are
            not reported (pipes used by hand, outside any forward). Waits then end only in a value
            or when a participant fails.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        #: The `time.monotonic` by which the forward must have ended.
        self.deadline = math.inf
        self._timeout = math.inf
        #: Whether all of this forward is inside a backward, which runs in the caller's thread.
        self.in_backward = False
        #: Returns where in its code a replica is, given the thread that runs it.
        self.locate: Callable[[int, int], str] = lambda replica, thread: ""
        #: Returns the context of an exchange or a wait, given which of them it is, the replica and
        #: the path; None unless waits are being reported or profiled.
        self.observe: Callable[[str, int, str], AbstractContextManager[object]] | None = None
        # Re-entrant: a signal handler or a finalizer may interrupt the thread that holds it.
        self.lock = threading.RLock()
        #: The state of this forward's pipes, by the object that owns it.
        self.channels: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._commits = threading.RLock()
        # A forward may be entered more than once (micro-batches): the k-th time of one replica
        # meets the k-th time of the others.
        self._entries = [0] * (size or 0)
        self._inside = [0] * (size or 0)
        self._thread = [0] * (size or 0)
        # Replicas that will not run at all.
        self._absent: set[int] = set()
        # Whether any of them may have ended, or will not run.
        self._some_are_over = False
        self._waits: list[Wait] = []
        self._failures: list[Failure] = []
        self._abort: Abort | None = None
        self._is_closed = False

    def observed(self, what: str, replica: int, path: str) -> AbstractContextManager[object]:
        """The context of an exchange or a wait, in which reports and profiles note it."""
        return _NOBODY if self.observe is None else self.observe(what, replica, path)

    # -- the life of a replica -----------------------------------------------------------------

    def enter(self, replica: int) -> bool:
        """A replica's forward begins. Returns whether it is the outermost call of the replica."""
        with self.lock:
            self._inside[replica] += 1
            outermost = self._inside[replica] == 1
            if outermost:
                self._entries[replica] += 1
                self._thread[replica] = threading.get_ident()
                self._absent.discard(replica)
            return outermost

    def expect_only(self, replicas: Collection[int]) -> None:
        """Only these are about to run: a wait for another one cannot be met."""
        with self.lock:
            self._absent = set(range(len(self._entries))).difference(replicas)
            self._some_are_over = self._some_are_over or bool(self._absent)
            self._check()

    def leave(self, replica: int) -> None:
        """A replica's forward ends, in a value or an error (see `fail`)."""
        with self.lock:
            self._inside[replica] -= 1
            self._some_are_over = True
            self._check()

    def has_left(self, replica: int) -> bool:
        """Whether a replica has been, and is no more, in its forward."""
        with self.lock:
            return self._entries[replica] > 0 and not self._inside[replica]

    def fail(self, replica: int, error: BaseException) -> None:
        """A replica failed: wakes all who wait; the first failure is the one they name."""
        reason = f"{self._name(replica)} failed with {described(error)}."
        with self.lock:
            if self._is_closed:  # the failures have been collected
                return
            follow_up = issubclass(type(error), ReplicaFailed)
            if not follow_up and not any(error is failure.error for failure in self._failures):
                self._failures.append(Failure(replica, error))
            if self._abort is None:
                self._abort_waits(ReplicaFailed, reason, error)

    def close(self, reason: str) -> list[Failure]:
        """Ends all waits and all writes, now and later; returns the failures, the first one first.

        A write in progress (see `commit`) is waited for.
        """
        self._is_closed = True
        with self.lock:
            if self._abort is None:
                self._abort_waits(ReplicationError, reason, None)
        with self._commits:
            pass
        return self.forget_failures()

    def commit(self, write: Callable[[], object]) -> None:
        """Calls ``write``, which changes the original module, unless the forward has been closed.

        A replica may run on after the caller has got its exception; the state that the caller
        then saves, or goes on with, must not change any more.
        """
        with self._commits:
            if not self._is_closed:
                write()

    def forget_failures(self) -> list[Failure]:
        """Returns the replicas' failures, for the last time.

        An exception refers to the frames that it passed, and these to the replicas: kept here, it
        would make a cycle.
        """
        with self.lock:
            verdict, failures = self._abort, self._failures
            self._failures = []
            if verdict is not None:
                self._abort = verdict._replace(cause=None)
        return failures  # the last reference to the cause, if it is none of them, goes here

    # -- waiting -------------------------------------------------------------------------------

    def begin_wait(
        self, replica: int, needs: Collection[int], site: Site, calls: dict[int, int]
    ) -> Wait:
        """Registers a wait of ``replica`` for the replicas in ``needs`` (empty: for any other).

        The lock is held. The caller releases it and then calls `Wait.block`.
        """
        self.refuse_if_over(replica, site)
        wait = Wait(self, replica, needs, site, calls)
        self._waits.append(wait)
        self._check()
        return wait

    def refuse_if_over(self, replica: int, site: Site) -> None:
        """Raises if no wait can be met any more. The lock is held."""
        if self._abort is not None:
            self._abort.raise_at(later=f" Replica {replica} came to {site} after that.")

    def end_wait(self, wait: Wait) -> None:
        """The value has come: from here on the replica counts as running. The lock is held."""
        if wait in self._waits:  # else it has been given up already
            self._waits.remove(wait)
            wait.wake()

    def forget(self, wait: Wait) -> None:
        """The waiting thread was interrupted."""
        with self.lock:
            if wait in self._waits:
                self._waits.remove(wait)

    def _check(self) -> None:
        """Wakes all waits if one of them can no longer be met. The lock is held.

        Called wherever that can come about: a wait begins, a replica ends.
        """
        if self.size is None or not self._waits or self._abort is not None:
            return
        if not self._some_are_over and len(self._waits) < self.size:
            return  # a replica runs
        in_vain = any(
            self._is_over(needed, wait.replica) for wait in self._waits for needed in wait.needs
        )
        if in_vain or not self._one_runs(self._stopped()):
            self._abort_waits(ReplicasDiverged, self._divergence(), None)

    def _is_over(self, replica: int, waiting: int) -> bool:
        """Whether ``replica`` has ended the forward that the ``waiting`` one is in."""
        return not self._inside[replica] and (
            replica in self._absent or self._entries[replica] >= self._entries[waiting]
        )

    def _stopped(self) -> set[int]:
        """The replicas whose own thread waits; another thread of theirs may do so beside it."""
        threads = {wait.thread for wait in self._waits}
        return {
            wait.replica
            for wait in self._waits
            if not self._inside[wait.replica] or self._thread[wait.replica] in threads
        }

    def _one_runs(self, stopped: set[int]) -> bool:
        latest = max((wait.replica for wait in self._waits), key=self._entries.__getitem__)
        return any(
            replica not in stopped and not self._is_over(replica, latest)
            for replica in range(len(self._entries))
        )

    def _abort_waits(
        self, kind: type[ReplicationError], reason: str, cause: BaseException | None
    ) -> None:
        self._abort = Abort(kind, reason, cause)
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.error = self._abort
            wait.wake()

    def expect_progress(self, wait: Wait) -> None:
        """Gives up at the deadline, or where a wait may be in vain and has taken `GRACE`.

        A replica counts as waiting then if any of its threads waits.
        """
        if time.monotonic() >= self.deadline:
            self.time_out()
        with self.lock:
            if self.size is None or wait not in self._waits:
                return
            late = [
                replica
                for replica in sorted(wait.needs)
                if not self._inside[replica]
                and self._entries[replica] < self._entries[wait.replica]
            ]
            if not self._one_runs({wait.replica for wait in self._waits}):
                self._abort_waits(ReplicasDiverged, self._divergence(), None)
            elif late:
                self._abort_waits(
                    ReplicasDiverged,
                    f"{wait.site}: replica {wait.replica} waits, and {listed(late)} did not begin "
                    f"within {GRACE:g} s. Replicas that talk to each other must run at the same "
                    "time, each in a thread of its own.",
                    None,
                )

    def limit_time(self, seconds: float) -> None:
        """Sets the deadline of the forward, so many seconds from now."""
        self._timeout, self.deadline = seconds, time.monotonic() + seconds

    def patience(self) -> float:
        """Seconds after which a wait asks `expect_progress`."""
        return max(0.0, min(GRACE, self.deadline - time.monotonic()))

    def time_out(self) -> Abort:
        """Gives up on a forward that has not ended by its deadline."""
        with self.lock:
            threads = dict(enumerate(self._thread))
        # Without the lock, as it asks the replicas' modules.
        spots = {replica: self.locate(replica, thread) for replica, thread in threads.items()}
        with self.lock:
            waiting = {wait.replica: wait for wait in self._waits}
            rows = [
                f"waits at {waiting[replica].site}"
                if replica in waiting
                else f"{self._state(replica, None)} {spots[replica] * bool(inside)}".rstrip()
                for replica, inside in enumerate(self._inside)
            ]
            table = "".join(f"\n  replica {replica}: {row}" for replica, row in enumerate(rows))
            if self._abort is None:
                self._abort_waits(
                    ReplicasTimedOut,
                    f"the replicas must end within {self._timeout:g} s, the timeout, which has "
                    f"passed:{table}",
                    None,
                )
            assert self._abort is not None
            return self._abort

    # -- messages ------------------------------------------------------------------------------

    def _name(self, replica: int) -> str:
        return f"replica {replica} of {self.size}" if self.size else f"replica {replica}"

    def _divergence(self) -> str:
        sites: dict[Site, list[Wait]] = {}
        for wait in self._waits:
            sites.setdefault(wait.site, []).append(wait)
        parts = []
        for site, waits in sites.items():
            who = sorted(wait.replica for wait in waits)
            parts.append(f"{site}: {listed(who)} {'waits' if len(who) == 1 else 'wait'}")
        waiting = {wait.replica for wait in self._waits}
        calls = self._waits[0].calls if len(sites) == 1 else None
        for replica in range(len(self._entries)):
            # A replica that runs, or has not begun, may still come.
            is_over = any(self._is_over(replica, wait.replica) for wait in self._waits)
            if replica not in waiting and is_over:
                parts.append(f"replica {replica} {self._state(replica, calls)}")
        outside = [replica for replica in sorted(waiting) if not self._inside[replica]]
        if outside:
            parts.append(
                f"{listed(outside)} called it outside the forward (in a recomputation, by another"
                " method, or through a part of the replica)"
            )
        return (
            "the replicas have diverged: "
            + "; ".join(parts)
            + ". Every replica must call the layers that talk to their copies equally often and"
            " in the same order: mind branches that depend on data, and layers in eval() in one"
            " replica only."
        )

    def _state(self, replica: int, calls: dict[int, int] | None) -> str:
        if self._inside[replica]:
            return "runs"
        if replica in self._absent:
            return "does not run"
        if not self._entries[replica]:
            return "has not begun"
        if calls is None:
            return "has ended"
        count = calls.get(replica, 0)
        return f"ended after call {count}" if count else "ended without calling it"


def two_at_once(path: str, replica: int) -> ReplicationError:
    """The error of a replica that makes two calls of one layer at once, in two threads."""
    return ReplicationError(
        f"`{path}`: replica {replica} calls it in one thread while it waits there in another; the "
        "calls of a replica come one after the other"
    )
