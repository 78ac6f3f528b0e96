"""Tracks when the forward of each replica begins and ends, and which error is the first."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from torch import nn

from replication._torch import CALL_IMPL, current_backward
from replication.devices import device_in_use, device_of
from replication.errors import ReplicationError, described, listed
from replication.sync.current import (
    CurrentReplica,
    current_replica,
    is_recomputation,
    set_current_replica,
)
from replication.sync.rendezvous import Failure, Rendezvous
from replication.waits import observer

__all__: list[str] = []


#: The method that ``copy``, ``deepcopy`` and ``pickle`` look up on an object before its class.
_REDUCE = "__reduce_ex__"


def _without_overrides(owner: Callable[[], Any], protocol: Any) -> Any:
    """Reduces an object as if its methods were not overridden."""
    kind: Any = type(owner())
    reduced = kind.__reduce_ex__(owner(), protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    make, args, state, *rest = reduced
    state = {name: value for name, value in state.items() if name != _REDUCE}
    for name, value in list(state.items()):
        if isinstance(value, MethodOverride):
            del state[name]
            if value.previous is not None:
                state[name] = value.previous
    return make, args, state, *rest


class MethodOverride:
    """Overrides a method of one object, as an attribute of that object.

    It refers to the object weakly, so that no cycle keeps a replica and its parameters alive.
    Copies of the object (``copy``, ``deepcopy``, ``pickle``) do not get the override, which would
    run the method of the original object.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        #: Returns the object, or None when it is gone.
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self.name = name
        # A method that was set on the object before.
        self.previous: Callable[..., Any] | None = owner.__dict__.get(name)

    def install(self) -> None:
        """Overrides the method."""
        state = self.owner().__dict__
        state[self.name] = self
        state[_REDUCE] = partial(_without_overrides, self.owner)

    def remove(self) -> None:
        """Restores the method."""
        owner = self.owner()
        if owner is not None:
            self.remove_from(owner)

    def remove_from(self, module: nn.Module) -> None:
        """Restores the method of ``module``, which may be a copy of the owner."""
        module.__dict__.pop(_REDUCE, None)
        if module.__dict__.get(self.name) is self:
            if self.previous is None:
                del module.__dict__[self.name]
            else:
                module.__dict__[self.name] = self.previous

    @property
    def original(self) -> Callable[..., Any]:
        """The method that is overridden."""
        if self.previous is not None:
            return self.previous
        owner = self.owner()
        if owner is None:
            raise ReplicationError(
                f"the replica is gone; keep the replica, not only its `{self.name}`"
            )
        return partial(getattr(type(owner), self.name), owner)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.owner(), self.name), {"previous": self.previous}


#: Read the attributes of any exception, even if its class redefines them.
_ATTRIBUTES = vars(BaseException)["__dict__"]
_TRACEBACK = vars(BaseException)["__traceback__"]


def add_others(error: BaseException, failures: Sequence[Failure]) -> None:
    """Adds a note for each other failure, except for follow-ups of another error."""
    also: dict[str, list[int]] = {}
    for replica, other in failures:
        if other is not error and not issubclass(type(other), ReplicationError):
            also.setdefault(described(other), []).append(replica)
    for text, replicas in also.items():
        add_note(error, f"{listed(sorted(replicas))} also failed: {text}")


def add_note(error: BaseException, note: str) -> None:
    """Adds a note as `BaseException.add_note` does, but runs no method of the error.

    An error whose ``__notes__`` is not a list is left unchanged. Tracebacks show notes from Python
    3.11 on.
    """
    notes = _ATTRIBUTES.__get__(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def has_origin(error: BaseException, index: int, size: int | None) -> bool:
    """Whether a note names this replica as the origin of an error."""
    notes = _ATTRIBUTES.__get__(error).get("__notes__")
    begin = re.compile(re.escape(origin(index, size)) + r"\b")
    return type(notes) is list and any(
        type(note) is str and begin.match(note) is not None for note in notes
    )


def add_failure_note(
    error: BaseException, replica: nn.Module, index: int, size: int | None
) -> None:
    """Adds a note with the replica, the device and the submodule that an error came from."""
    try:
        device = device_in_use() or device_of(replica)
        path = failing_path(error, replica)
    except Exception:  # raised by a method of the replica; it must not hide the error
        device, path = None, ""
    add_note(
        error,
        origin(index, size)
        + (f" on {device}" if device is not None else "")
        + (f", module `{path}`" if path else ""),
    )


def origin(index: int, size: int | None) -> str:
    """Returns the beginning of a note on where an error came from."""
    return f"in replica {index} of {size}"


def failing_path(error: BaseException, root: nn.Module) -> str:
    """Returns the path of the innermost submodule in the traceback; the root has no path."""
    paths = paths_of(root)
    innermost = ""
    traceback = _TRACEBACK.__get__(error)
    while traceback is not None:
        path = path_of_call(traceback.tb_frame, paths)
        innermost = innermost if path is None else path
        traceback = traceback.tb_next
    return innermost


def paths_of(root: nn.Module) -> dict[int, str]:
    """Returns the path of each submodule, by the `id` of the submodule."""
    return {id(module): path for path, module in root.named_modules()}


def path_of_call(frame: FrameType, paths: dict[int, str]) -> str | None:
    """Returns the path of the submodule that a frame calls, if it calls one."""
    # Look at torch's own frames only: reading the locals of a frame that has the error in a
    # variable makes a reference cycle of both.
    if frame.f_code.co_name != CALL_IMPL:
        return None
    return paths.get(id(frame.f_locals.get("self")))


T = TypeVar("T")


class TrackedCall(MethodOverride):
    """Reports the beginning and the end of a replica's forward to its rendezvous.

    It is not a hook, because torch shares the hook dictionaries of the replicas and the original.
    """

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        rendezvous: Rendezvous | None = None,
        replica: int = 0,
    ) -> None:
        super().__init__(owner, name)
        if isinstance(self.previous, TrackedCall):  # replicated again: the latest forward counts
            self.previous = self.previous.previous
        self.rendezvous = rendezvous
        self.replica = replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rendezvous is None:  # a copy of a replica belongs to no forward
            return self.original(*args, **kwargs)
        current = current_replica()
        if current is not None and current == (
            self.rendezvous,
            self.replica,
            current_backward(),
            "",
        ):  # reported already
            return self.original(*args, **kwargs)
        with ForwardScope(self.rendezvous, self.replica, self.owner):
            return self.original(*args, **kwargs)


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
                # First of all, so that no other replica waits for this one if anything else fails.
                self._rendezvous.fail(self._index, error)
                self._add_note(error)
        finally:
            self._rendezvous.leave(self._index)

    def _add_note(self, error: BaseException) -> None:
        replica = self._replica()
        # Not `isinstance`, which may run code of the error: a property `__class__`.
        is_follow_up = issubclass(type(error), ReplicationError)
        if self._outermost and replica is not None and not is_follow_up:
            add_failure_note(error, replica, self._index, self._rendezvous.size)


#: The methods that run a replica: ``replica(...)``, with the hooks of the root, and
#: ``replica.forward(...)``.
_ENTRY_POINTS = (CALL_IMPL, "forward")


def watch(replicas: Sequence[nn.Module]) -> Rendezvous:
    """Makes the rendezvous of some replicas, which report their beginning and end to it."""
    rendezvous = Rendezvous(len(replicas))
    rendezvous.locate = Locator(replicas)
    rendezvous.observe = observer(len(replicas))
    rendezvous.in_backward = is_recomputation()
    current = current_replica()
    rendezvous.outer = None if current is None else current.rendezvous
    for index, replica in enumerate(replicas):
        for name in _ENTRY_POINTS:
            TrackedCall(replica, name, rendezvous, index).install()
    return rendezvous


class Locator:
    """Finds the submodule and the line that the thread of a replica is in."""

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        self._replicas = [weakref.ref(replica) for replica in replicas]

    def __call__(self, index: int, thread: int) -> str:
        innermost = sys._current_frames().get(thread)
        replica = self._replicas[index]()
        if innermost is None or replica is None:
            return ""
        try:
            paths = paths_of(replica)
        except Exception:  # the replica changes while it runs
            paths = {}
        path = ""
        line = f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
        frame: FrameType | None = innermost
        del innermost  # it may be this very frame, which must not refer to itself
        while frame is not None and not path:
            path = path_of_call(frame, paths) or ""
            frame = frame.f_back
        return f"in `{path}`, at {line}" if path else f"at {line}"


def untrack(replica: nn.Module) -> None:
    """Removes the overrides from a copy of a replica, where they would run the replica itself."""
    for name in _ENTRY_POINTS:
        call = replica.__dict__.get(name)
        if isinstance(call, TrackedCall):
            call.remove_from(replica)


def tracked_call(replica: Any) -> TrackedCall | None:
    """Returns the override that `watch` installed on a replica, if it belongs to a forward."""
    call = getattr(replica, "__dict__", {}).get(_ENTRY_POINTS[0])
    return call if isinstance(call, TrackedCall) and call.rendezvous is not None else None


def rendezvous_of(replicas: Sequence[Any]) -> Rendezvous | None:
    """Returns the rendezvous of the forward that these replicas belong to."""
    for replica in replicas:
        call = tracked_call(replica)
        if call is not None:
            return call.rendezvous
    return None


def limit_time(replicas: Sequence[Any], timeout: float | None) -> None:
    """Limits the forward of these replicas to ``timeout`` seconds from now."""
    rendezvous = rendezvous_of(replicas)
    if rendezvous is not None and timeout is not None:
        rendezvous.limit_time(timeout)


def first_failure_wins(
    parallel_apply: Callable[..., T], replicas: Sequence[Any], *args: Any, **kwargs: Any
) -> T:
    """Runs ``parallel_apply(replicas, ...)`` and raises the first error, unchanged.

    ``parallel_apply`` may be torch's or a user's. It raises the error of the first replica *by
    index*, or an error made of it, which may be a follow-up of the first error in time. If it
    raises, the forward is closed: all waits fail, and no replica writes into the original module.
    """
    rendezvous = rendezvous_of(replicas)
    if rendezvous is None:
        return parallel_apply(replicas, *args, **kwargs)
    rendezvous.expect_only([call.replica for call in map(tracked_call, replicas) if call])
    try:
        # A single replica runs in this thread, whose state is restored after a Ctrl-C anywhere.
        with set_current_replica(current_replica()):
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
        # Outside the except clause, so that the error keeps its own context.
        raise failure
    finally:
        del failure, failures  # the traceback of the error refers to this frame
