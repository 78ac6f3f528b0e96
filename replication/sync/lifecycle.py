"""Tracks when the forward of each replica begins and ends, and which error came first."""

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


#: What ``copy``, ``deepcopy`` and ``pickle`` ask an object for, before its class.
_REDUCE = "__reduce_ex__"


def _without_overrides(owner: Callable[[], Any], protocol: Any) -> Any:
    """Reduces an object to what it is without overrides."""
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
    """Stands in for a method of one object, as an attribute of that object.

    It holds the object weakly, so that no cycle keeps a replica (and its parameters) alive. Copies
    of the object, by ``copy``, ``deepcopy`` or ``pickle``, do not have it: there it would still
    run the original.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        #: Returns the object, or None when it is gone.
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self.name = name
        # A method that somebody has set on the object before us.
        self.previous: Callable[..., Any] | None = owner.__dict__.get(name)

    def install(self) -> None:
        """Sets it on its owner."""
        state = self.owner().__dict__
        state[self.name] = self
        state[_REDUCE] = partial(_without_overrides, self.owner)

    def remove(self) -> None:
        """Takes it off its owner."""
        owner = self.owner()
        if owner is not None:
            self.remove_from(owner)

    def remove_from(self, module: nn.Module) -> None:
        """Puts back what was there before, if it is set on ``module``."""
        module.__dict__.pop(_REDUCE, None)
        if module.__dict__.get(self.name) is self:
            if self.previous is None:
                del module.__dict__[self.name]
            else:
                module.__dict__[self.name] = self.previous

    @property
    def original(self) -> Callable[..., Any]:
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


#: Of every exception, whatever its class defines under these names.
_ATTRIBUTES = vars(BaseException)["__dict__"]
_TRACEBACK = vars(BaseException)["__traceback__"]


def add_others(error: BaseException, failures: Sequence[Failure]) -> None:
    """Notes on an error which replicas failed as well, but for those that failed because of it."""
    also: dict[str, list[int]] = {}
    for replica, other in failures:
        if other is not error and not issubclass(type(other), ReplicationError):
            also.setdefault(described(other), []).append(replica)
    for text, replicas in also.items():
        add_note(error, f"{listed(sorted(replicas))} failed, too: {text}")


def add_note(error: BaseException, note: str) -> None:
    """Does what `BaseException.add_note` of Python 3.11 does, but runs no method of the error.

    An error whose ``__notes__`` is not a list stays as it is. On Python 3.10 tracebacks do not
    show the notes.
    """
    notes = _ATTRIBUTES.__get__(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def has_origin(error: BaseException, index: int, size: int | None) -> bool:
    """Whether a note on an error says that it came from this replica."""
    notes = _ATTRIBUTES.__get__(error).get("__notes__")
    begin = re.compile(re.escape(origin(index, size)) + r"\b")
    return type(notes) is list and any(
        type(note) is str and begin.match(note) is not None for note in notes
    )


def add_failure_note(
    error: BaseException, replica: nn.Module, index: int, size: int | None
) -> None:
    """Notes on an error which replica it came from, on which device, and in which submodule."""
    try:
        device = device_in_use() or device_of(replica)
        path = failing_path(error, replica)
    except Exception:  # from a method of the replica, say: it must not hide the error
        device, path = None, ""
    add_note(
        error,
        origin(index, size)
        + (f" on {device}" if device is not None else "")
        + (f", module `{path}`" if path else ""),
    )


def origin(index: int, size: int | None) -> str:
    """Returns how a note on an error begins that says where the error came from."""
    return f"in replica {index} of {size}"


def failing_path(error: BaseException, root: nn.Module) -> str:
    """Returns the path of the innermost submodule that the error passed; empty for the root."""
    paths = paths_of(root)
    innermost = ""
    traceback = _TRACEBACK.__get__(error)
    while traceback is not None:
        path = path_of_call(traceback.tb_frame, paths)
        innermost = innermost if path is None else path
        traceback = traceback.tb_next
    return innermost


def paths_of(root: nn.Module) -> dict[int, str]:
    """Returns the paths of the submodules, by their identity."""
    return {id(module): path for path, module in root.named_modules()}


def path_of_call(frame: FrameType, paths: dict[int, str]) -> str | None:
    """Returns the path of the submodule that this frame is a call of, if it is one."""
    # Only torch's own frames: to look at the locals of a frame can make a cycle of it and an
    # error, if it has the error in a variable.
    if frame.f_code.co_name != CALL_IMPL:
        return None
    return paths.get(id(frame.f_locals.get("self")))


T = TypeVar("T")


class TrackedCall(MethodOverride):
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
        if isinstance(self.previous, TrackedCall):  # replicated again: the newest forward counts
            self.previous = self.previous.previous
        self.rendezvous = rendezvous
        self.replica = replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rendezvous is None:  # a copy of a replica: it belongs to no forward
            return self.original(*args, **kwargs)
        if current_replica() == CurrentReplica(
            self.rendezvous, self.replica, current_backward()
        ):  # reported already
            return self.original(*args, **kwargs)
        with ForwardScope(self.rendezvous, self.replica, self.owner):
            return self.original(*args, **kwargs)


class ForwardScope:
    """The time between the beginning and the end of a replica's forward, as a ``with`` block."""

    def __init__(self, rendezvous: Rendezvous, index: int, replica: Callable[[], Any]) -> None:
        self._rendezvous = rendezvous
        self._index = index
        self._replica = replica
        self._standing = set_current_replica(CurrentReplica(rendezvous, index, current_backward()))

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
            TrackedCall(replica, name, rendezvous, index).install()
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


def is_tracked(module: nn.Module) -> bool:
    """Whether `watch` has set something on a module."""
    state = vars(module)
    return any(isinstance(state.get(name), TrackedCall) for name in _ENTRANCES)


def untrack(replica: nn.Module) -> None:
    """Takes off a copy of a replica what would run, and report on, the replica itself."""
    for name in _ENTRANCES:
        call = replica.__dict__.get(name)
        if isinstance(call, TrackedCall):
            call.remove_from(replica)


def tracked_call(replica: Any) -> TrackedCall | None:
    """What `watch` has set on a replica, if it belongs to a forward."""
    call = getattr(replica, "__dict__", {}).get(_ENTRANCES[0])
    return call if isinstance(call, TrackedCall) and call.rendezvous is not None else None


def rendezvous_of(replicas: Sequence[Any]) -> Rendezvous | None:
    """The rendezvous that `watch` gave to these replicas."""
    calls = filter(None, map(tracked_call, replicas))
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
    rendezvous.expect_only([call.replica for call in map(tracked_call, replicas) if call])
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
