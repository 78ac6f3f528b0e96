"""The rendezvous of one forward: which replicas run, which wait, and which have ended.

Every wait ends with its value, `ReplicaFailed` (a replica raised), `ReplicasDiverged` (no replica
can send the value any more) or, if there is a deadline, `ReplicasTimedOut`. When one wait fails,
all waits fail at once, and no new wait begins in the same forward. Nothing outlives the forward,
and no write (`commit`) begins after `close`.

Each replica reports the beginning and the end of its forward (`enter`, `leave`). So waits need no
time limit, except where it is unknown whether the value will arrive. Then they fail after
`STALL_TIMEOUT`:

    * A replica has not begun. It may be about to run, or its turn may come after the waiting
      replica in the same thread.
    * A replica's main thread runs while another of its threads waits. The main thread may be
      computing, or waiting for the other thread.

An interrupt at any place keeps no thread waiting. Gates are released before any bookkeeping, and a
thread that waits looks now and then whether the forward has failed or is closed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from replication._torch import NO_BACKWARD, current_backward
from replication.errors import (
    ReplicaFailed,
    ReplicasDiverged,
    ReplicasTimedOut,
    ReplicationError,
    describe_error,
    listed,
)

T = TypeVar("T")

#: The seconds after which a wait fails if it is unknown whether its value will arrive.
STALL_TIMEOUT = 20.0

#: The seconds that the caller of a forward that failed waits for writes in progress.
LONGEST_WRITE = 1.0


def site(path: str, call: int) -> str:
    """Returns the text for an exchange and the number of a call."""
    return f"`{path}`, call {call}"


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
    """The wait of one replica, begun and ended under the rendezvous' lock, blocking outside it."""

    def __init__(
        self, rendezvous: Rendezvous, replica: int, missing: Collection[int], path: str, call: int
    ) -> None:
        self.rendezvous, self.replica = rendezvous, replica
        #: Replicas whose message is missing. The exchange removes each as its message arrives.
        self.missing = missing
        #: The name of the exchange and the number of the replica's call, for messages.
        self.path, self.call = path, call
        #: Why the wait has ended without a value, if it has.
        self.abort: Abort | None = None
        self.thread = threading.get_ident()
        #: Released when the wait ends. A bare lock is the cheapest thing to block on.
        self.gate = threading.Lock()
        self.gate.acquire()

    def block(self) -> None:
        """Blocks until the wait ends, and raises if it ends without a value."""
        rendezvous = self.rendezvous
        try:
            while not self.gate.acquire(
                timeout=max(0.0, min(STALL_TIMEOUT, rendezvous.deadline - time.monotonic()))
            ):
                rendezvous.fail_if_stalled(self)
        except BaseException:  # KeyboardInterrupt, where a replica runs in the main thread
            with rendezvous.lock:
                rendezvous.end_waits([self])
            raise
        abort, self.abort = self.abort, None
        if abort is not None:
            raise abort.error(self.replica, site(self.path, self.call))


#: Returns a context manager that records an exchange or a wait, given ``"exchange"`` or
#: ``"wait"``, the replica and the path.
Observe = Callable[[str, int, str], AbstractContextManager[object]]


class Failure(NamedTuple):
    """A replica and the error that it raised."""

    replica: int
    error: BaseException


# A replica may run its forward several times (micro-batches). Its k-th run meets the k-th run
# of the other replicas.
class Progress:
    """How far one replica is with its forwards."""

    def __init__(self) -> None:
        #: The number of nested calls that are under way.
        self.depth = 0
        #: The number of runs that have begun.
        self.runs = 0
        self.thread = 0
        self.is_absent = False

    def is_over(self, run: int) -> bool:
        """Whether the run of this number has ended, or will never begin."""
        return not self.depth and (self.is_absent or self.runs >= run)

    def __str__(self) -> str:
        if self.depth:
            return "runs"
        if self.is_absent:
            return "does not run"
        return "has ended" if self.runs else "has not begun"


# `size` is None outside a forward, where participants do not report their beginning and end.
# Waits then end only with a value or when a participant fails.
class Rendezvous:
    """The replicas of one forward and their waits for each other."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        # Re-entrant: a signal handler or a finalizer may interrupt the thread that holds it.
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
        self._is_closed = False
        # One object for each write into the original module that is under way.
        self._writes: set[object] = set()

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
        """Whether a replica has finished its forward."""
        with self.lock:
            progress = self._progress[replica]
            return progress.runs > 0 and not progress.depth

    def fail(self, replica: int, error: BaseException) -> None:
        """Reports that a replica failed. All waits fail, and name a failure."""
        with self.lock:
            if self._is_closed:  # the caller has collected the failures
                return
            is_known = any(error is failure.error for failure in self._failures)
            if not is_known and not isinstance(error, ReplicaFailed):
                self._failures.append(Failure(replica, error))
        # The error's own code makes its text. It may be slow, and must not run under the lock.
        of = f" of {self.size}" if self.size else ""
        reason = f"replica {replica}{of} failed with {describe_error(error)}."
        with self.lock:
            self._abort_waits(ReplicaFailed, reason, error)

    def close(self, reason: str) -> list[Failure]:
        """Forbids all waits and writes from now on, and returns the failures in order of time."""
        # The first call waits at most `LONGEST_WRITE` for writes under way.
        end = time.monotonic() + (0.0 if self._is_closed else LONGEST_WRITE)
        abort = self.abort or Abort(ReplicationError, reason)
        self.abort, self._is_closed = abort, True  # no interrupt comes between them
        with self.lock:
            self._abort_waits(*abort)
        while self._writes and time.monotonic() < end:
            time.sleep(0.001)
        return self.take_failures()

    def commit(self, write: Callable[[], T]) -> T:
        """Returns ``write()``, which changes the original module; raises in a closed forward."""
        # A replica may still run after the forward has raised in the caller, who saves the module
        # or trains it further. The same holds for a forward inside such a replica.
        # Not a lock around `write`: foreign code that interrupts it, such as a finalizer, may run
        # a forward of its own.
        key = object()
        try:
            with self.lock:
                if self._is_closed:
                    raise ReplicationError("the caller has ended the forward of this replica")
                self._writes.add(key)
            return write() if self.outer is None else self.outer.commit(write)
        finally:
            self._writes.discard(key)

    def take_failures(self) -> list[Failure]:
        """Returns the failures, and drops them, because their frames refer to the replicas."""
        with self.lock:
            # `abort` outlives the lock, because freeing its cause may run any code.
            abort, failures = self.abort, self._failures
            self._failures = []
            if abort is not None:
                self.abort = abort._replace(cause=None)
        return failures

    # -- waiting -------------------------------------------------------------------------------

    def begin_wait(self, replica: int, missing: Collection[int], path: str, call: int) -> Wait:
        """Begins a wait of ``replica`` for all in ``missing``, or for any if it is empty."""
        # The lock is held. The caller releases it and then calls `Wait.block`.
        if self.abort is not None:
            raise self.abort.error(replica, site(path, call))
        wait = Wait(self, replica, missing, path, call)
        self._waits.append(wait)
        if self._some_are_over or len(self._waits) >= len(self._progress):  # else a replica runs
            self._fail_hopeless_waits()
        return wait

    def end_waits(self, waits: Iterable[Wait]) -> None:
        """Ends waits that have a value, or are aborted or interrupted. The lock is held."""
        for wait in waits:
            if wait in self._waits:  # else it has failed already
                # In this order: a wait that an interrupt leaves in the list is ended again.
                if wait.gate.locked():
                    wait.gate.release()
                self._waits.remove(wait)

    def _fail_hopeless_waits(self, *, have_stalled: bool = False) -> None:
        """Fails all waits if one of them can no longer end."""
        # The lock is held, and a wait has begun or stalled, or a replica has ended.
        if not self._waits or self.size is None or self.abort is not None:
            return
        waits, progress_of = self._waits, self._progress
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
        """Fails all waits, for the reason of the first call. The lock is held."""
        # Later calls fail the waits that an interrupt of an earlier one has left.
        self.abort = self.abort or Abort(kind, reason, cause)
        for wait in self._waits:
            wait.abort = self.abort
        self.end_waits(self._waits[:])
        return self.abort

    def fail_if_stalled(self, wait: Wait) -> None:
        """Fails all waits at the deadline, or when a doubtful wait has taken `STALL_TIMEOUT`."""
        if self.abort is None and time.monotonic() >= self.deadline:
            self.time_out()
        with self.lock:
            if self.abort is not None:
                # An interrupt has kept the thread that failed all waits from this one.
                self._abort_waits(*self.abort)
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
        # Without the lock, because it runs code of the replicas' modules.
        locations = [self.locate(r, progress.thread) for r, progress in enumerate(self._progress)]
        with self.lock:
            abort = self._abort_waits(
                ReplicasTimedOut,
                f"the replicas must end within {self._timeout:g} s, the timeout, which has passed:"
                f"{self._positions(locations)}",
            )
        return abort.error()

    def _positions(self, locations: Sequence[str] | None = None) -> str:
        """Returns a line for each replica that says where it is. The lock is held."""
        positions = []
        for replica, progress in enumerate(self._progress):
            location = locations[replica] if locations and progress.depth else ""
            positions.append(f"{progress} {location}".rstrip())
        for wait in self._waits:
            positions[wait.replica] = f"waits at {site(wait.path, wait.call)}"
            if not self._progress[wait.replica].depth:
                positions[wait.replica] += (
                    ", outside the forward (in a recomputation, by another method, or through a "
                    "part of the replica)"
                )
        return "".join(f"\n  replica {r}: {position}" for r, position in enumerate(positions))


class CurrentReplica(NamedTuple):
    """The replica whose forward or callback a thread runs."""

    rendezvous: Rendezvous
    replica: int
    #: The backward that the thread was in when the forward or the callback began (see
    #: `replication._torch.current_backward`).
    backward: int
    #: The path of the module whose callback runs. It is empty in a forward.
    path: str = ""

    @property
    def is_one_of_several(self) -> bool:
        """Whether it is one of several replicas, or inside one."""
        rendezvous: Rendezvous | None = self.rendezvous
        while rendezvous is not None and (rendezvous.size or 0) < 2:
            rendezvous = rendezvous.outer
        return rendezvous is not None


class _Local(threading.local):
    current: CurrentReplica | None = None


#: Its attribute ``current`` is the innermost forward or callback that this thread runs, or None.
this_thread = _Local()


def current_replica() -> CurrentReplica | None:
    """Returns the innermost forward or callback that this thread runs, if any."""
    return this_thread.current


def is_recomputation() -> bool:
    """Whether this thread, or the caller of the replica that it runs, is in a backward."""
    current = this_thread.current
    is_in_backward = current is not None and current.rendezvous.in_backward
    return is_in_backward or current_backward() != NO_BACKWARD
