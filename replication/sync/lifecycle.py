"""The replica that a thread runs, and when its forward begins, ends and fails."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from replication._torch import CALL_IMPL, NO_BACKWARD, current_backward
from replication.devices import device_of
from replication.errors import ReplicationError, add_note, origin
from replication.modules import layers_of
from replication.sync.rendezvous import Rendezvous
from replication.texts import path_or_root

T = TypeVar("T")

# -- the replica whose forward or callback a thread runs ---------------------------------------


class CurrentReplica(NamedTuple):
    rendezvous: Rendezvous
    replica: int
    #: The `current_backward` of the thread when the forward or the callback began.
    backward: int
    #: The path of the module whose callback runs. It is empty in a forward.
    path: str = ""


class _Local(threading.local):
    current: CurrentReplica | None = None


#: Its attribute ``current`` is the innermost forward or callback that this thread runs, or None.
this_thread = _Local()


class Phase(Enum):
    """What this thread does, with respect to the backward of the program."""

    #: A forward, outside any backward.
    FORWARD = 0
    #: A whole forward inside a backward: an activation checkpoint around it computes it again, and
    #: all replicas run again.
    REPEATED = 1
    #: A backward that has begun after the forward of the replica, or outside replicas. There a
    #: checkpoint computes a part of one replica again, and no other replica would answer a call.
    REPLAYED = 2


def phase() -> Phase:
    current, backward = this_thread.current, current_backward()
    if backward != (NO_BACKWARD if current is None else current.backward):
        return Phase.REPLAYED
    is_inside = current is not None and current.rendezvous.in_backward
    return Phase.REPEATED if is_inside or backward != NO_BACKWARD else Phase.FORWARD


def calling_replica(name: str) -> CurrentReplica:
    """Returns the replica whose forward or callback this thread runs, and which calls ``name``.

    All pipes and all collectives between replicas ask it. A replica calls in its own thread: what
    another thread of it sends would be matched with the calls of others in no order, and the
    rendezvous could not tell whether the replica waits. Hooks of a backward may run in a thread of
    torch, and in the order of another device's work, so a backward inside the forward counts as
    another thread on every device.

    Raises:
        ReplicationError: The thread runs no replica, or is in a backward that its forward began.
    """
    current = this_thread.current
    if current is None:
        raise ReplicationError(
            f"{name} connects the replicas of one forward, and this thread runs none of them; "
            "call it in the replica's own thread, in its forward or in a replication callback "
            "(not in a thread that the replica has started, nor in a recomputation)"
        )
    if current_backward() != current.backward:
        raise ReplicationError(
            f"{name} connects the replicas of one forward, and this thread is in a backward "
            "inside that forward; call it in the replica's own thread, outside of hooks, custom "
            "backwards and recomputations"
        )
    return current


# -- its beginning and end ---------------------------------------------------------------------

#: The method that ``copy``, ``deepcopy`` and ``pickle`` look up on an object before its class.
_REDUCE = "__reduce_ex__"


# Not a hook, because ``replica.forward(...)`` runs no hooks. It refers to the replica weakly, so
# that no cycle keeps the parameters alive. Copies of the replica do not get it, because it would
# run the replica itself: a second attribute, `reduce`, sees to that.
class TrackedForward:
    """The attribute ``forward`` of a replica, which reports when it begins, ends and fails."""

    def __init__(self, owner: nn.Module, rendezvous: Rendezvous, replica: int) -> None:
        #: Returns the module, or None when it is gone.
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self.rendezvous, self.replica = rendezvous, replica
        previous = vars(owner).get("forward")
        #: A method that was set on the module before. The latest override replaces older ones.
        self.previous: Callable[..., Any] | None = (
            previous.previous if isinstance(previous, TrackedForward) else previous
        )

    def attach(self) -> None:
        vars(self.owner()).update({"forward": self, _REDUCE: self.reduce})

    @staticmethod
    def detach(replica: nn.Module) -> None:
        """Removes the override from a copy of a replica, where it would run the replica itself."""
        state = vars(replica)
        if isinstance(tracked := state.get("forward"), TrackedForward):
            del state["forward"]
            state.pop(_REDUCE, None)
            if tracked.previous is not None:
                state["forward"] = tracked.previous

    def reduce(self, protocol: Any) -> Any:
        """Reduces the replica as if its methods were not overridden."""
        replica = self.owner()
        kind: Any = type(replica)
        twin = kind.__new__(kind)
        vars(twin).update(vars(replica))
        self.detach(twin)
        return kind.__reduce_ex__(twin, protocol)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, current = self.owner(), this_thread.current
        forward = self.previous or partial(type(owner).forward, owner)
        if current is not None and current[:2] == (self.rendezvous, self.replica):
            return forward(*args, **kwargs)  # this thread has reported the beginning already
        return self.run(partial(forward, *args, **kwargs))

    def run(self, work: Callable[[], T], device: torch.device | None = None) -> T:
        """Returns ``work()``, which is the forward of the replica."""
        outer = this_thread.current
        try:
            self.rendezvous.begin(self.replica)
            this_thread.current = CurrentReplica(self.rendezvous, self.replica, current_backward())
            return work()
        except BaseException as error:
            # Before the note, so that the other replicas wake up even if making it fails.
            self.rendezvous.fail(self.replica, error)
            if not isinstance(error, ReplicationError):  # which names the replicas itself
                self._add_note(error, device)
            raise
        finally:
            this_thread.current = outer
            self.rendezvous.end(self.replica)

    def _add_note(self, error: BaseException, device: torch.device | None) -> None:
        note, replica = origin(self.replica, self.rendezvous.size), self.owner()
        with suppress(Exception):  # raised by a method of the replica; it must not hide the error
            device = device or device_of(replica)
            note += f" on {device}" if device is not None else ""
            note += f", module `{path_or_root(_failing_path(error, replica))}`"
        add_note(error, note)


def _failing_path(error: BaseException, root: nn.Module) -> str:
    """The path of the innermost module in the traceback."""
    paths, innermost = {id(module): path for path, module in layers_of(root)}, ""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        # Only torch's own frames: the locals of a frame that holds the error would make a cycle.
        if frame.f_code.co_name == CALL_IMPL:
            innermost = paths.get(id(frame.f_locals.get("self")), innermost)
        traceback = traceback.tb_next
    return innermost


def attach_rendezvous(replicas: Sequence[nn.Module]) -> Rendezvous:
    """Makes a rendezvous, and makes the replicas report their beginning and end to it."""
    rendezvous = Rendezvous(len(replicas), in_backward=phase() is not Phase.FORWARD)
    for index, replica in enumerate(replicas):
        TrackedForward(replica, rendezvous, index).attach()
    return rendezvous


def tracked_forwards(replicas: Sequence[Any]) -> list[TrackedForward]:
    """The override of each replica that belongs to a forward. Others may be of any kind."""
    methods = [getattr(replica, "__dict__", {}).get("forward") for replica in replicas]
    return [method for method in methods if isinstance(method, TrackedForward)]


def rendezvous_of(replicas: Sequence[Any]) -> Rendezvous | None:
    tracked = tracked_forwards(replicas)
    return tracked[0].rendezvous if tracked else None


def abort_forward(replicas: Sequence[Any]) -> None:
    """Lets all waits between replicas fail, because the caller goes no further."""
    if (rendezvous := rendezvous_of(replicas)) is not None:
        rendezvous.abort("the caller has ended the forward.")


def first_failure_wins(
    parallel_apply: Callable[..., T], replicas: Sequence[Any], *args: Any, **kwargs: Any
) -> T:
    """Runs ``parallel_apply(replicas, ...)`` and raises the first error, unchanged."""
    # Torch's `parallel_apply` raises the error of the replica with the lowest index, which may
    # only follow from the first error.
    tracked = tracked_forwards(replicas)
    if not tracked:
        return parallel_apply(replicas, *args, **kwargs)
    rendezvous = tracked[0].rendezvous
    rendezvous.expect_only([forward.replica for forward in tracked])
    current = this_thread.current
    try:
        outputs = parallel_apply(replicas, *args, **kwargs)
        rendezvous.take_failure()  # `parallel_apply` may have swallowed it
        return outputs
    except BaseException as error:
        # A single replica runs in this thread, and a Ctrl-C may have come when it ended.
        this_thread.current = current
        # Taken first, because what replicas raise after the abort only follows from it.
        failure = rendezvous.take_failure()
        abort_forward(replicas)
        if failure is None or not isinstance(error, Exception):
            failure = error
    try:
        # Outside the except clause, so that the error keeps its own context.
        raise failure
    finally:
        del failure  # see `replication.steps.threads.Outcome.unwrap`
