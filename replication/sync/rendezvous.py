"""The rendezvous of one forward: which replicas run and wait for each other, and when waits fail.

Problem: a replica waits for a message that may never come, because the other replica has raised,
has ended, or waits itself. A thread that waits for ever hangs the program.

The obvious way is a time limit for each wait. But a replica may compute for any time before it
sends, so every limit is too short for some forwards and too long for all errors.

Idea: each replica reports the beginning and the end of its forward (`enter`, `leave`), and each
wait says for whom it waits. Then it is known when a value can no longer arrive, and all waits fail
at once, and no new wait begins in the same forward. A wait ends with its value, `ReplicaFailed` (a
replica raised), `ReplicasDiverged` (no replica can send the value any more) or, if there is a
deadline, `ReplicasTimedOut`. Nothing outlives the forward.

Two cases stay unknown. Then waits fail after `STALL_TIMEOUT`:

    * A replica has not begun. It may be about to run, or its turn may come after the waiting
      replica in the same thread.
    * A replica's main thread runs while another of its threads waits. The main thread may be
      computing, or waiting for the other thread.

An interrupt at any place keeps no thread waiting: a thread that waits looks every second whether
the forward has failed or is closed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from replication.errors import (
    ReplicaFailed,
    ReplicasDiverged,
    ReplicasTimedOut,
    ReplicationError,
    describe_error,
    listed,
)
from replication.sync.observation import Observe
from replication.sync.positions import Progress, positions, site
from replication.sync.writes import Writes

T = TypeVar("T")

#: The seconds after which a wait fails if it is unknown whether its value will arrive.
STALL_TIMEOUT = 20.0

#: Seconds between checks whether a forward has failed or is closed, which an interrupt may have
#: kept from ending a wait.
_POLL = 1.0


class Abort(NamedTuple):
    """The reason why every wait of a forward fails."""

    kind: type[ReplicationError]
    reason: str
    cause: BaseException | None = None

    def error(self, replica: int | None = None, place: str = "") -> ReplicationError:
        """Makes the error of a replica that is at a call, or of the caller of the forward."""
        # A new error each: the traceback of a shared one would grow with each replica.
        names_all = self.kind in (ReplicasDiverged, ReplicasTimedOut)  # see `_positions`
        where = "" if replica is None or names_all else f" Replica {replica} was at {place}."
        error = self.kind(self.reason + where)
        error.__cause__ = self.cause
        return error


class Wait:
    """The wait of one replica, begun under the rendezvous' lock, blocking outside it."""

    def __init__(
        self, rendezvous: Rendezvous, replica: int, missing: Collection[int], path: str, call: int
    ) -> None:
        self.rendezvous = rendezvous
        self.replica, self.missing = replica, missing
        self.path, self.call = path, call
        self.abort: Abort | None = None
        self.is_over = False
        self.thread = threading.get_ident()
        #: Released when the wait ends. A bare lock is the cheapest thing to block on.
        self.gate = threading.Lock()
        self.gate.acquire()

    def block(self) -> None:
        """Blocks until the wait ends, and raises if it ends without a value."""
        try:
            rendezvous, now = self.rendezvous, time.monotonic()
            stalls = now + STALL_TIMEOUT
            while not self.gate.acquire(
                timeout=max(0.0, min(_POLL, min(stalls, rendezvous.deadline) - now))
            ):
                now = time.monotonic()
                if rendezvous.abort is None and now >= rendezvous.deadline:
                    rendezvous.time_out()
                elif rendezvous.abort is None and now >= stalls:
                    rendezvous.fail_if_stalled(self)
                    stalls = now + STALL_TIMEOUT
                if rendezvous.abort is not None:
                    self.abort = rendezvous.abort
                    rendezvous.end_waits([self])
                    break
        except BaseException:  # KeyboardInterrupt, where a replica runs in the main thread
            self.rendezvous.end_waits([self])
            raise
        self.is_over = True  # before the look: see `_abort_waits`
        abort, self.abort = self.abort, None
        if abort is not None:
            raise abort.error(self.replica, site(self.path, self.call))


class Failure(NamedTuple):
    replica: int
    error: BaseException


# `size` is None outside a forward, where participants do not report their beginning and end.
# Waits then end only with a value or when a participant fails.
class Rendezvous:
    """The replicas of one forward and their waits for each other."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        #: For messages, the beginnings of waits, and the beginnings and ends of replicas. Code
        #: under it makes objects, so a finalizer may run there, for as long as it likes, and so
        #: may a signal handler. Re-entrant, as these may train a model in the same thread. No
        #: failure, timeout, end of a wait or write needs it, so that each of them gets through.
        self.lock = threading.RLock()
        #: The `time.monotonic` by which the forward must have ended.
        self.deadline = math.inf
        self._timeout = math.inf
        #: Whether all of this forward is inside a backward, which runs in the caller's thread.
        self.in_backward = False
        #: Returns the module and the line where a replica is, given the thread that runs it.
        self.locate: Callable[[int, int], str] = lambda replica, thread: ""
        #: Records exchanges and waits. None unless waits are reported or profiled.
        self.observe: Observe | None = None
        #: The channel of each `SyncMaster` in this forward.
        self.channels: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        #: The rendezvous of the outer forward, if this forward runs inside one of its replicas.
        self.outer: Rendezvous | None = None
        self._progress = [Progress() for _ in range(size or 0)]
        # Whether any replica has ended a run, or is absent.
        self._some_are_over = False
        self._waits: list[Wait] = []
        self._failures: list[Failure] = []
        self.abort: Abort | None = None
        self._writes = Writes()

    # -- the life of a replica -----------------------------------------------------------------

    def enter(self, replica: int) -> bool:
        """Reports that a forward begins. Returns whether it is the replica's outermost call."""
        with self.lock:
            progress = self._progress[replica]
            progress.depth += 1
            if progress.depth == 1:
                progress.runs += 1
                progress.thread, progress.is_absent = threading.get_ident(), False
            return progress.depth == 1

    def expect_only(self, replicas: Collection[int]) -> None:
        """Reports that only these replicas are about to run."""
        with self.lock:
            for replica, progress in enumerate(self._progress):
                progress.is_absent = replica not in replicas
                self._some_are_over |= progress.is_absent
            self._fail_hopeless_waits()

    def leave(self, replica: int) -> None:
        """Reports that a forward ends, by returning or by raising (see `fail`)."""
        with self.lock:
            self._progress[replica].depth -= 1
            self._some_are_over = True
            self._fail_hopeless_waits()

    def has_left(self, replica: int) -> bool:
        with self.lock:
            progress = self._progress[replica]
            return progress.runs > 0 and not progress.depth

    def fail(self, replica: int, error: BaseException) -> None:
        """Reports that a replica failed. All waits fail, and name a failure."""
        is_known = any(error is failure.error for failure in self._failures)
        if not is_known and not isinstance(error, ReplicaFailed):
            self._failures.append(Failure(replica, error))
        if self._writes.are_closed:
            self.take_failures()  # the caller has taken the others, and knows of no more
            return
        # The error's own code makes its text.
        of = f" of {self.size}" if self.size else ""
        reason = f"replica {replica}{of} failed with {describe_error(error)}."
        self._abort_waits(ReplicaFailed, reason, error)

    def close(self, reason: str) -> None:
        """Forbids all waits and writes from now on, and waits for writes under way."""
        self._abort_waits(ReplicationError, reason)
        self._writes.close()

    def commit(self, write: Callable[[], T]) -> T:
        """Returns ``write()``, which changes the original module; raises in a closed forward."""
        # The caller of an outer forward may have closed that one only.
        outer = self.outer
        return self._writes.commit(write if outer is None else partial(outer.commit, write))

    def take_failures(self) -> list[Failure]:
        """Drops the failures, because their frames refer to the replicas, and returns them."""
        failures, self._failures = self._failures, []
        if self.abort is not None:
            self.abort = self.abort._replace(cause=None)
        return failures

    # -- waiting -------------------------------------------------------------------------------

    def begin_wait(self, replica: int, missing: Collection[int], path: str, call: int) -> Wait:
        """Begins a wait of ``replica`` for all in ``missing``, or for any if it is empty."""
        # The lock is held. The caller releases it and then calls `Wait.block`.
        wait = Wait(self, replica, missing, path, call)
        self._waits.append(wait)
        if self.abort is not None:  # after the append: see `_abort_waits`
            self._abort_waits(*self.abort)
        if self._some_are_over or len(self._waits) >= len(self._progress):  # else a replica runs
            self._fail_hopeless_waits()
        return wait

    def end_waits(self, waits: Iterable[Wait]) -> None:
        """Ends waits that have a value, or are aborted or interrupted."""
        for wait in waits:
            try:
                # In this order: a wait that an interrupt leaves in the list is ended again.
                if wait.gate.locked():
                    wait.gate.release()
                self._waits.remove(wait)
            except (RuntimeError, ValueError):  # another thread has been faster
                pass

    def _fail_hopeless_waits(self, *, have_stalled: bool = False) -> None:
        """Fails all waits if one of them can no longer end."""
        # The lock is held, and a wait has begun or stalled, or a replica has ended.
        waits, progress_of = self._waits[:], self._progress  # the caller may end waits meanwhile
        if not waits or self.size is None or self.abort is not None:
            return
        runs = {wait.replica: progress_of[wait.replica].runs for wait in waits}
        cannot_end = any(
            progress_of[r].is_over(runs[wait.replica]) for wait in waits for r in wait.missing
        )
        # A replica is blocked if its main thread waits. If only another thread of it does, its
        # main thread may be computing.
        threads = {wait.thread for wait in waits}
        blocked = {r for r in runs if have_stalled or progress_of[r].thread in threads}
        can_progress = any(
            replica not in blocked and not progress.is_over(max(runs.values()))
            for replica, progress in enumerate(progress_of)
        )
        if cannot_end or not can_progress:
            self._abort_waits(
                ReplicasDiverged,
                "the replicas have diverged. Every replica must make the same calls in the same "
                "order: look for branches that depend on data, and for layers in eval() in one "
                f"replica only.{self._positions()}",
            )

    def _abort_waits(
        self, kind: type[ReplicationError], reason: str, cause: BaseException | None = None
    ) -> Abort:
        """Fails all waits, for the reason of the first call."""
        # A wait appends itself and then looks for the reason. This sets the reason and then copies
        # the list of waits, so one of them sees the other, without a lock.
        self.abort = abort = self.abort or Abort(kind, reason, cause)
        for wait in self._waits[:]:
            wait.abort = abort
            if wait.is_over:  # its thread may not see that, and an error would close a cycle
                wait.abort = None
            self.end_waits([wait])
        return abort

    def fail_if_stalled(self, wait: Wait) -> None:
        """Fails all waits when a doubtful wait has taken `STALL_TIMEOUT`."""
        with self.lock:
            if self.size is None or wait not in self._waits:
                return
            self._fail_hopeless_waits(have_stalled=True)
            late = [r for r in sorted(wait.missing) if not self._progress[r].depth]
            if late:
                self._abort_waits(
                    ReplicasDiverged,
                    f"{listed(late)} did not begin within {STALL_TIMEOUT:g} s. Replicas that "
                    "communicate must run at the same time, each in a thread of its own."
                    f"{self._positions()}",
                )

    def limit_time(self, seconds: float) -> None:
        self._timeout, self.deadline = seconds, time.monotonic() + seconds

    def time_out(self) -> ReplicationError:
        """Fails all waits of a forward that has not ended by its deadline. Returns the error."""
        # This runs code of the replicas' modules.
        locations = [self.locate(r, progress.thread) for r, progress in enumerate(self._progress)]
        return self._abort_waits(
            ReplicasTimedOut,
            f"the replicas must end within {self._timeout:g} s, the timeout, which has passed:"
            f"{self._positions(locations)}",
        ).error()

    def _positions(self, locations: Sequence[str] = ()) -> str:
        waits = [(wait.replica, site(wait.path, wait.call)) for wait in self._waits[:]]
        return positions(self._progress, waits, locations)
