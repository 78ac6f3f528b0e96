"""Tracks when the forward of each replica begins and ends, and which error is the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from replication._torch import CALL_IMPL, current_backward
from replication.errors import ReplicationError, has_type
from replication.sync.current import (
    CurrentReplica,
    current_replica,
    is_recomputation,
    set_current_replica,
    this_thread,
)
from replication.sync.notes import Locator, add_failure_note, add_others
from replication.sync.overrides import MethodOverride
from replication.sync.rendezvous import Rendezvous
from replication.waits import observer

__all__: list[str] = []


T = TypeVar("T")


class TrackedCall(MethodOverride):
    """Reports the beginning and the end of a replica's forward to its rendezvous.

    It is not a hook, because torch shares the hook dictionaries of the replicas and the original.
    """

    #: The rendezvous of the forward. A copy of a replica belongs to no forward.
    rendezvous: Rendezvous | None = None
    replica = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rendezvous is None:
            return self.original(*args, **kwargs)
        if this_thread.current == (self.rendezvous, self.replica, current_backward(), ""):
            return self.original(*args, **kwargs)  # reported already
        with self.scope():
            return self.original(*args, **kwargs)

    def scope(self) -> ForwardScope:
        """Returns the context that reports the beginning and the end of the forward."""
        assert self.rendezvous is not None
        return ForwardScope(self.rendezvous, self.replica, self.owner)


class ForwardScope:
    """Reports the beginning and the end of a replica's forward around a ``with`` block."""

    def __init__(self, rendezvous: Rendezvous, index: int, replica: Callable[[], Any]) -> None:
        self._rendezvous = rendezvous
        self._index = index
        self._replica = replica
        self._current = set_current_replica(CurrentReplica(rendezvous, index, current_backward()))

    def __enter__(self) -> None:
        self._outermost = self._rendezvous.enter(self._index)
        self._current.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._current.__exit__()
        try:
            if error is not None:
                # Before the note, so that the other replicas wake up even if making it fails.
                self._rendezvous.fail(self._index, error)
                self._add_note(error)
        finally:
            self._rendezvous.leave(self._index)

    def _add_note(self, error: BaseException) -> None:
        replica = self._replica()
        if self._outermost and replica is not None and not has_type(error, ReplicationError):
            add_failure_note(error, replica, self._index, self._rendezvous.size)


#: The methods that run a replica: ``replica(...)``, with the hooks of the root, and
#: ``replica.forward(...)``.
_ENTRY_POINTS = (CALL_IMPL, "forward")


def track(replicas: Sequence[nn.Module]) -> Rendezvous:
    """Makes a rendezvous, and makes the replicas report their beginning and end to it."""
    rendezvous = Rendezvous(len(replicas))
    rendezvous.locate = Locator(replicas)
    rendezvous.observe = observer(len(replicas))
    rendezvous.in_backward = is_recomputation()
    current = current_replica()
    rendezvous.outer = None if current is None else current.rendezvous
    for index, replica in enumerate(replicas):
        for name in _ENTRY_POINTS:
            call = TrackedCall(replica, name)
            call.rendezvous, call.replica = rendezvous, index
            call.install()
    return rendezvous


def untrack(replica: nn.Module) -> None:
    """Removes the overrides from a copy of a replica, where they would run the replica itself."""
    for name in _ENTRY_POINTS:
        call = replica.__dict__.get(name)
        if isinstance(call, TrackedCall):
            call.remove_from(replica)


def tracked_calls(replicas: Sequence[Any]) -> list[TrackedCall]:
    """Returns the overrides that `track` installed, of the replicas that belong to a forward."""
    calls = []
    for replica in replicas:
        call = getattr(replica, "__dict__", {}).get(CALL_IMPL)
        if isinstance(call, TrackedCall) and call.rendezvous is not None:
            calls.append(call)
    return calls


def rendezvous_of(replicas: Sequence[Any]) -> Rendezvous | None:
    """Returns the rendezvous of the forward that these replicas belong to."""
    calls = tracked_calls(replicas)
    return calls[0].rendezvous if calls else None


def limit_time(replicas: Sequence[Any], timeout: float | None) -> None:
    """Limits the forward of these replicas to ``timeout`` seconds from now."""
    if timeout is not None and (rendezvous := rendezvous_of(replicas)) is not None:
        rendezvous.limit_time(timeout)


def first_failure_wins(
    parallel_apply: Callable[..., T], replicas: Sequence[Any], *args: Any, **kwargs: Any
) -> T:
    """Runs ``parallel_apply(replicas, ...)`` and raises the first error, unchanged.

    ``parallel_apply`` may be torch's or a user's. Torch's raises the error of the replica with the
    lowest *index*, which may only follow from the first error. When ``parallel_apply`` raises, the
    forward is closed: all waits fail, and no replica writes into the original module.
    """
    calls = tracked_calls(replicas)
    rendezvous = calls[0].rendezvous if calls else None
    if rendezvous is None:
        return parallel_apply(replicas, *args, **kwargs)
    rendezvous.expect_only([call.replica for call in calls])
    del calls
    try:
        # A single replica runs in this thread, whose state is restored after a Ctrl-C anywhere.
        with set_current_replica(current_replica()):
            outputs = parallel_apply(replicas, *args, **kwargs)
        rendezvous.take_failures()  # `parallel_apply` may have swallowed them
        return outputs
    except BaseException as error:
        failures = rendezvous.close("the forward was ended by its caller.")
        interrupted = not has_type(error, Exception) and all(
            error is not f.error for f in failures
        )
        failure = error if interrupted or not failures else failures[0].error
    add_others(failure, failures)
    try:
        # Outside the except clause, so that the error keeps its own context.
        raise failure
    finally:
        del failure, failures  # the traceback of the error refers to this frame
