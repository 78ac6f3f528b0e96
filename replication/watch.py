"""Tracks when the forward of each replica begins and ends, and which error came first."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from torch import nn

from replication.errors import ReplicationError
from replication.group import is_recomputation
from replication.notes import add_failure_note, add_others, path_of_call, paths_of
from replication.observation import observer
from replication.overrides import MethodOverride
from replication.place import Place, here, standing_at
from replication.rendezvous import Rendezvous
from replication.torch_internals import CALL_IMPL, current_backward

__all__: list[str] = []

T = TypeVar("T")


class WatchedCall(MethodOverride):
    """Reports the beginning and the end of a replica's forward to its rendezvous.

    No hook is used: torch shares the hook dictionaries between the replicas and the original.
    """

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        rendezvous: Rendezvous | None = None,
        replica: int = 0,
    ) -> None:
        super().__init__(owner, name)
        if isinstance(self.previous, WatchedCall):  # replicated again: the newest forward counts
            self.previous = self.previous.previous
        self.rendezvous = rendezvous
        self.replica = replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rendezvous is None:  # a copy of a replica: it belongs to no forward
            return self.original(*args, **kwargs)
        if here() == Place(self.rendezvous, self.replica, current_backward()):  # reported already
            return self.original(*args, **kwargs)
        with Attendance(self.rendezvous, self.replica, self.owner):
            return self.original(*args, **kwargs)


class Attendance:
    """The time between the beginning and the end of a replica's forward, as a ``with`` block."""

    def __init__(self, rendezvous: Rendezvous, index: int, replica: Callable[[], Any]) -> None:
        self._rendezvous = rendezvous
        self._index = index
        self._replica = replica
        self._standing = standing_at(Place(rendezvous, index, current_backward()))

    def __enter__(self) -> None:
        self._outermost = self._rendezvous.enter(self._index)
        self._standing.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._standing.__exit__()
        try:
            if error is not None:
                # First of all: whatever else goes wrong, the others must not wait for this one.
                self._rendezvous.fail(self._index, error)
                self._add_note(error)
        finally:
            self._rendezvous.leave(self._index)

    def _add_note(self, error: BaseException) -> None:
        replica = self._replica()
        # By the class: `isinstance` asks an object for its `__class__`, which may be code.
        is_ours = issubclass(type(error), ReplicationError)
        if self._outermost and replica is not None and not is_ours:
            add_failure_note(error, replica, self._index, self._rendezvous.size)


#: What a replica can be run through: ``replica(...)``, the root's hooks included, and
#: ``replica.forward(...)``.
_ENTRANCES = (CALL_IMPL, "forward")


def watch(replicas: Sequence[nn.Module]) -> Rendezvous:
    """Gives the replicas of one forward a rendezvous, which sees each of them begin and end."""
    rendezvous = Rendezvous(len(replicas))
    rendezvous.locate = Locator(replicas)
    rendezvous.observe = observer(len(replicas))
    rendezvous.in_backward = is_recomputation()
    for index, replica in enumerate(replicas):
        for name in _ENTRANCES:
            WatchedCall(replica, name, rendezvous, index).install()
    return rendezvous


class Locator:
    """Says in which submodule, and at which line, the thread of a replica is."""

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        self._replicas = [weakref.ref(replica) for replica in replicas]

    def __call__(self, index: int, thread: int) -> str:
        innermost = sys._current_frames().get(thread)
        replica = self._replicas[index]()
        if innermost is None or replica is None:
            return ""
        try:
            paths = paths_of(replica)
        except Exception:  # it changes while it runs
            paths = {}
        path = ""
        frame: FrameType | None = innermost
        while frame is not None and not path:
            path = path_of_call(frame, paths) or ""
            frame = frame.f_back
        module = f"in `{path}`, " if path else ""
        return f"{module}at {innermost.f_code.co_filename}:{innermost.f_lineno}"


def is_watched(module: nn.Module) -> bool:
    """Whether `watch` has set something on a module."""
    state = vars(module)
    return any(isinstance(state.get(name), WatchedCall) for name in _ENTRANCES)


def unwatch(replica: nn.Module) -> None:
    """Takes off a copy of a replica what would run, and report on, the replica itself."""
    for name in _ENTRANCES:
        call = replica.__dict__.get(name)
        if isinstance(call, WatchedCall):
            call.remove_from(replica)


def watched_call(replica: Any) -> WatchedCall | None:
    """What `watch` has set on a replica, if it belongs to a forward."""
    call = getattr(replica, "__dict__", {}).get(_ENTRANCES[0])
    return call if isinstance(call, WatchedCall) and call.rendezvous is not None else None


def rendezvous_of(replicas: Sequence[Any]) -> Rendezvous | None:
    """The rendezvous that `watch` gave to these replicas."""
    calls = filter(None, map(watched_call, replicas))
    return next((call.rendezvous for call in calls), None)


def limit_time(replicas: Sequence[Any], timeout: float | None) -> None:
    """Limits the time of the forward of these replicas to so many seconds from now."""
    rendezvous = rendezvous_of(replicas)
    if rendezvous is not None and timeout is not None:
        rendezvous.limit_time(timeout)


def first_failure_wins(
    parallel_apply: Callable[..., T], replicas: Sequence[Any], *args: Any, **kwargs: Any
) -> T:
    """Runs ``parallel_apply(replicas, ...)`` and raises the error that came first, as it was.

    ``parallel_apply`` may be torch's or a user's. It raises the error of the first replica *by
    index*, or a new error around it, which may be a follow-up of the one that came first. When it
    leaves early (it was interrupted, or could not start a thread), the forward is closed: replicas
    that wait for each other are woken, and none of them writes into the original module any more.
    """
    rendezvous = rendezvous_of(replicas)
    if rendezvous is None:
        return parallel_apply(replicas, *args, **kwargs)
    rendezvous.expect_only([call.replica for call in map(watched_call, replicas) if call])
    try:
        outputs = parallel_apply(replicas, *args, **kwargs)
        rendezvous.forget_failures()  # it may have swallowed them
        return outputs
    except BaseException as error:
        failures = rendezvous.close("the forward was ended by its caller.")
        interrupted = not issubclass(type(error), Exception) and all(
            error is not f.error for f in failures
        )
        failure = error if interrupted or not failures else failures[0].error
    add_others(failure, failures)
    try:
        # Outside the except clause, so that the error keeps the context it was raised in.
        raise failure
    finally:
        del failure, failures  # the traceback of the error refers to this frame
