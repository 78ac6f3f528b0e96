"""Tracks when each replica begins, ends and fails, and finds where its first error came from."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from replication._torch import CALL_IMPL, current_backward
from replication.devices import device_of
from replication.errors import (
    ReplicationError,
    add_note,
    describe_error,
    listed,
    origin,
    origin_note,
    path_or_root,
)
from replication.sync.current import CurrentReplica, current_replica, is_recomputation, this_thread
from replication.sync.observation import observer
from replication.sync.positions import failing_path, location
from replication.sync.rendezvous import Failure, Rendezvous

T = TypeVar("T")

#: The method that ``copy``, ``deepcopy`` and ``pickle`` look up on an object before its class.
_REDUCE = "__reduce_ex__"


def _reduce_untracked(owner: Callable[[], Any], protocol: Any) -> Any:
    """Reduces a replica as if its methods were not overridden."""
    replica = owner()
    kind: Any = type(replica)
    twin = kind.__new__(kind)
    vars(twin).update(vars(replica))
    untrack(twin)
    return kind.__reduce_ex__(twin, protocol)


# An attribute and not a hook: ``replica.forward(...)`` runs no hooks, and replicas that torch
# made share theirs. It refers to the replica weakly, so that no cycle keeps its parameters
# alive. Copies of the replica do not get it, because it would run the replica itself.
class TrackedCall:
    """Overrides a method of a replica, to report when its forward begins and ends."""

    def __init__(self, owner: nn.Module, name: str, rendezvous: Rendezvous, replica: int) -> None:
        #: Returns the module, or None when it is gone.
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self.name, self.rendezvous, self.replica = name, rendezvous, replica
        previous = owner.__dict__.get(name)
        #: A method that was set on the module before. The latest override replaces older ones.
        self.previous: Callable[..., Any] | None = (
            previous.previous if isinstance(previous, TrackedCall) else previous
        )

    @property
    def original(self) -> Callable[..., Any]:
        if self.previous is not None:
            return self.previous
        owner = self.owner()
        return partial(getattr(type(owner), self.name), owner)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = this_thread.current
        if current == CurrentReplica(self.rendezvous, self.replica, current_backward()):
            return self.original(*args, **kwargs)  # reported already
        try:
            with ForwardScope(self):
                return self.original(*args, **kwargs)
        finally:
            this_thread.current = current  # also if a Ctrl-C comes in an `__exit__`


# Not `contextlib.contextmanager`, which sets attributes of an error that passes through: not
# every error class allows that.
class ForwardScope:
    """Reports the beginning and the end of a replica's forward around a ``with`` block."""

    def __init__(self, call: TrackedCall, device: torch.device | None = None) -> None:
        self._call, self._rendezvous, self._replica = call, call.rendezvous, call.replica
        self._device = device

    def __enter__(self) -> None:
        self._outermost = self._rendezvous.enter(self._replica)
        self._outer = this_thread.current
        this_thread.current = CurrentReplica(self._rendezvous, self._replica, current_backward())

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        this_thread.current = self._outer
        try:
            if error is not None:
                # Before the note, so that the other replicas wake up even if making it fails.
                self._rendezvous.fail(self._replica, error)
                if self._outermost and not isinstance(error, ReplicationError):
                    self._add_note(error)
        finally:
            self._rendezvous.leave(self._replica)

    def _add_note(self, error: BaseException) -> None:
        note, replica = origin(self._replica, self._rendezvous.size), self._call.owner()
        with suppress(Exception):  # raised by a method of the replica; it must not hide the error
            device = self._device or device_of(replica)
            note += f" on {device}" if device is not None else ""
            path = failing_path(error, replica)
            note += f", module `{path_or_root(path)}`" if path is not None else ""
        add_note(error, note)


#: The methods that run a replica: ``replica(...)``, with the hooks of the root, and
#: ``replica.forward(...)``.
_ENTRY_POINTS = (CALL_IMPL, "forward")


def attach_rendezvous(replicas: Sequence[nn.Module]) -> Rendezvous:
    """Makes a rendezvous, and makes the replicas report their beginning and end to it."""
    rendezvous = Rendezvous(len(replicas))
    owners = list(map(weakref.ref, replicas))
    rendezvous.locate = lambda index, thread: location(owners[index](), thread)
    rendezvous.observe = observer(len(replicas))
    rendezvous.in_backward = is_recomputation()
    current = current_replica()
    rendezvous.outer = current.rendezvous if current is not None else None
    for index, replica in enumerate(replicas):
        state = replica.__dict__
        for name in _ENTRY_POINTS:
            state[name] = TrackedCall(replica, name, rendezvous, index)
        state[_REDUCE] = partial(_reduce_untracked, state[name].owner)
    return rendezvous


def untrack(replica: nn.Module) -> None:
    """Removes the overrides from a copy of a replica, where they would run the replica itself."""
    state = replica.__dict__
    for name in _ENTRY_POINTS:
        call = state.get(name)
        if isinstance(call, TrackedCall):
            del state[name]
            state.pop(_REDUCE, None)
            if call.previous is not None:
                state[name] = call.previous


def tracked_calls(replicas: Sequence[Any]) -> list[TrackedCall]:
    """The override of each replica that belongs to a forward."""
    calls = [getattr(replica, "__dict__", {}).get(CALL_IMPL) for replica in replicas]
    return [call for call in calls if isinstance(call, TrackedCall)]


def rendezvous_of(replicas: Sequence[Any]) -> Rendezvous | None:
    calls = tracked_calls(replicas)
    return calls[0].rendezvous if calls else None


# Interrupts may follow each other at once, and each may keep an `__exit__` from its work. Of some
# around each other each begins anew. A loop would not do: where it goes back, interrupts get out.
class ClosedByErrors:
    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._rendezvous.close("the forward was ended by its caller.")


def first_failure_wins(
    parallel_apply: Callable[..., T], replicas: Sequence[Any], *args: Any, **kwargs: Any
) -> T:
    """Runs ``parallel_apply(replicas, ...)`` and raises the first error, unchanged."""
    # Torch's `parallel_apply` raises the error of the replica with the lowest index, which may
    # only follow from the first error. After an error the forward is closed.
    calls = tracked_calls(replicas)
    if not calls:
        return parallel_apply(replicas, *args, **kwargs)
    rendezvous = calls[0].rendezvous
    rendezvous.expect_only([call.replica for call in calls])
    current = this_thread.current
    ends = ClosedByErrors(rendezvous)
    try:
        with ends, ends, ends, ends, ends, ends, ends, ends:
            outputs = parallel_apply(replicas, *args, **kwargs)
            rendezvous.take_failures()  # `parallel_apply` may have swallowed them
            return outputs
    except BaseException as error:
        # A single replica runs in this thread. A Ctrl-C may have come when it ended.
        this_thread.current = current
        ending, failures = error, rendezvous.take_failures()
    interrupted = not isinstance(ending, Exception) and all(
        ending is not f.error for f in failures
    )
    failure = ending if interrupted or not failures else failures[0].error
    add_others(failure, failures, rendezvous.size)
    try:
        # Outside the except clause, so that the error keeps its own context.
        raise failure
    finally:
        del ending, failure, failures  # see `Outcome.unwrap`


def add_others(error: BaseException, failures: Sequence[Failure], size: int | None) -> None:
    """Adds a note for each kind of other failure, except for follow-ups of another error."""
    own = [_described(failure, size) for failure in failures if failure.error is error]
    also: dict[str, list[int]] = {}
    for failure in failures:
        if failure.error is not error and not isinstance(failure.error, ReplicationError):
            text = _described(failure, size)
            text = ": the same error" if text in own else text
            also.setdefault(text, []).append(failure.replica)
    for text, replicas in also.items():
        add_note(error, f"{listed(sorted(replicas))} also failed{text}")


def _described(failure: Failure, size: int | None) -> str:
    note = origin_note(failure.error, failure.replica, size) or ""
    module = note.partition(", module ")[2]
    return f"{f' in module {module}' if module else ''}: {describe_error(failure.error)}"
