"""One forward's meeting place: who runs, who waits for whom, who has ended.

The problem. The replicas of one forward run in threads and wait for each other's messages. If one
of them raises, returns early or waits elsewhere, a message that the others wait for never comes.

Guarantees
    * Every wait ends: in its value, in `ReplicaFailed` (a replica raised), in `ReplicasDiverged`
      (nobody can send the value any more) or, where a limit is set, in `ReplicasTimedOut`.
    * When one wait fails all fail, at once, and no later wait in the same forward begins.
    * Nothing outlives the forward: a new forward has a new `Rendezvous`.

This code assumes that the beginning and the end of each replica's forward are reported
(`enter`, `leave`), whoever runs it, so that no wait needs a time limit, but in two cases, where
nobody can say whether anything will come. A replica that has not begun may be run after the others
in the same thread, or may wait for a thread. And a replica whose own thread goes on while another
thread of it waits may be computing, or waiting for that thread. Both are given `GRACE`.
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
)
from replication.wording import described, listed

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
        self.error: Verdict | None = None
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
                self._sleep(rendezvous.timeout)
        except BaseException:  # KeyboardInterrupt, where a replica runs in the main thread
            rendezvous.forget(self)
            raise
        error, self.error = self.error, None
        if error is not None:
            error.raise_at(self)

    def _sleep(self, timeout: float | None) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._gate.acquire(timeout=max(0.0, min(GRACE, end - time.monotonic()))):
            if time.monotonic() < end:
                self.rendezvous.expect_progress(self)
            else:
                self.rendezvous.time_out(self)
                end = math.inf


class Verdict(NamedTuple):
    """Why no wait of this forward can be met any more."""

    kind: type[ReplicationError]
    reason: str
    cause: BaseException | None

    def raise_at(self, wait: Wait | None = None, later: str = "") -> NoReturn:
        """Raises an error of its own for each waiting replica: a shared one would grow."""
        where = f" Replica {wait.replica} waited at {wait.site}." if wait and self.cause else ""
        raise self.kind(self.reason + where + later) from self.cause


class Failure(NamedTuple):
    """A replica and what it raised."""

    replica: int
    error: BaseException


class Rendezvous:
    """The replicas of one forward and their waits for each other.

    Args:
        size: Number of replicas. ``None`` where nobody reports when a participant begins or ends
            (pipes used by hand, outside any forward): waits then end in a value, or when a
            participant fails, only.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        #: Seconds that a wait may take; None for any number.
        self.timeout: float | None = None
        #: Whether all of this forward is inside a backward, whose thread is that of the caller.
        self.in_backward = False
        #: Says of a replica, and the thread that runs it, where in its code it is.
        self.locate: Callable[[int, int], str] = lambda replica, thread: ""
        #: Around exchanges and waits, with which it is, the replica and the path; None if nobody
        #: looks, as a rule.
        self.observe: Callable[[str, int, str], AbstractContextManager[object]] | None = None
        self.lock = threading.Lock()
        #: What the pipes of this forward keep for its duration, by the object that owns it.
        self.channels: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
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
        self._verdict: Verdict | None = None
        self._is_closed = False

    def observed(self, what: str, replica: int, path: str) -> AbstractContextManager[object]:
        """What is around an exchange or a wait, for those who look."""
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
        """Only these are about to run; whoever waits for another one waits in vain."""
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
            if self._is_closed:  # nobody would ask for it, or forget it
                return
            follow_up = issubclass(type(error), ReplicaFailed)
            if not follow_up and not any(error is failure.error for failure in self._failures):
                self._failures.append(Failure(replica, error))
            if self._verdict is None:
                self._give_up(ReplicaFailed, reason, error)

    def close(self, reason: str) -> list[Failure]:
        """Ends all waits, now and later; returns the replicas' failures, the first one first."""
        with self.lock:
            self._is_closed = True
            if self._verdict is None:
                self._give_up(ReplicationError, reason, None)
        return self.forget_failures()

    def forget_failures(self) -> list[Failure]:
        """Returns the replicas' failures, for the last time.

        An exception refers to the frames that it passed, and these to the replicas: kept here, it
        would make a cycle.
        """
        with self.lock:
            if self._verdict is not None:
                self._verdict = self._verdict._replace(cause=None)
            failures, self._failures = self._failures, []
            return failures

    # -- waiting -------------------------------------------------------------------------------

    def begin_wait(
        self, replica: int, needs: Collection[int], site: Site, calls: dict[int, int]
    ) -> Wait:
        """Registers a wait of ``replica`` for the replicas in ``needs`` (empty: for anyone).

        The lock is held. The caller releases it and then calls `Wait.block`.
        """
        self.refuse_if_over(replica, site)
        wait = Wait(self, replica, needs, site, calls)
        self._waits.append(wait)
        self._check()
        return wait

    def refuse_if_over(self, replica: int, site: Site) -> None:
        """Raises if no wait can be met any more. The lock is held."""
        if self._verdict is not None:
            self._verdict.raise_at(later=f" Replica {replica} came to {site} after that.")

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
        """Wakes everybody if some wait can no longer be met. The lock is held.

        Called wherever that can come about: a wait begins, a replica ends.
        """
        if self.size is None or not self._waits or self._verdict is not None:
            return
        if not self._some_are_over and len(self._waits) < self.size:
            return  # somebody runs
        in_vain = any(
            self._is_over(needed, wait.replica) for wait in self._waits for needed in wait.needs
        )
        if in_vain or not self._somebody_runs(self._stopped()):
            self._give_up(ReplicasDiverged, self._who_is_where(), None)

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

    def _somebody_runs(self, stopped: set[int]) -> bool:
        latest = max((wait.replica for wait in self._waits), key=self._entries.__getitem__)
        return any(
            replica not in stopped and not self._is_over(replica, latest)
            for replica in range(len(self._entries))
        )

    def _give_up(
        self, kind: type[ReplicationError], reason: str, cause: BaseException | None
    ) -> None:
        self._verdict = Verdict(kind, reason, cause)
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.error = self._verdict
            wait.wake()

    def expect_progress(self, wait: Wait) -> None:
        """Gives up where nothing tells for sure that a wait is in vain, but it has been `GRACE`.

        A replica counts as waiting then if any of its threads waits.
        """
        with self.lock:
            if self.size is None or wait not in self._waits:
                return
            late = [
                replica
                for replica in sorted(wait.needs)
                if not self._inside[replica]
                and self._entries[replica] < self._entries[wait.replica]
            ]
            if not self._somebody_runs({wait.replica for wait in self._waits}):
                self._give_up(ReplicasDiverged, self._who_is_where(), None)
            elif late:
                self._give_up(
                    ReplicasDiverged,
                    f"{wait.site}: replica {wait.replica} waits, and {listed(late)} did not begin "
                    f"within {GRACE:g} s. Replicas that talk to each other must run at the same "
                    "time, each in a thread of its own.",
                    None,
                )

    def time_out(self, wait: Wait) -> None:
        """Gives up on a wait that has been too long."""
        with self.lock:
            threads = dict(enumerate(self._thread))
        # Without the lock, as it asks the replicas' modules.
        spots = {replica: self.locate(replica, thread) for replica, thread in threads.items()}
        with self.lock:
            if wait not in self._waits:
                return
            waiting = {wait.replica: wait for wait in self._waits}
            rows = [
                f"waits at {waiting[replica].site}"
                if replica in waiting
                else f"{self._state(replica, None)} {spots[replica] * bool(inside)}".rstrip()
                for replica, inside in enumerate(self._inside)
            ]
            table = "".join(f"\n  replica {replica}: {row}" for replica, row in enumerate(rows))
            self._give_up(
                ReplicasTimedOut,
                f"{wait.site}: replica {wait.replica} has waited for {self.timeout:g} s, the "
                f"timeout:{table}",
                None,
            )

    # -- messages ------------------------------------------------------------------------------

    def _name(self, replica: int) -> str:
        return f"replica {replica} of {self.size}" if self.size else f"replica {replica}"

    def _who_is_where(self) -> str:
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
            if replica not in waiting:
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
