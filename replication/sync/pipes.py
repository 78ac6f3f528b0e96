"""The queues between one master and its slaves, as the copies of one layer use them.

    slave i                         master (copy 0)
    run_slave(msg_i) ── message ──▶ run_master(msg_0)
                                    master_callback([(0, msg_0), (1, msg_1), ...])
    returns reply_i  ◀── reply ───  returns reply_0

A message and a reply per slave and call: nothing else crosses, and no acknowledgement is needed,
because a slave's next message cannot come before its reply has gone. What a call leaves behind
lives in the `Rendezvous` of its forward, so one `SyncMaster` serves any number of forwards, one
after the other or at once. (Where there is no forward it has a `Rendezvous` of its own.)
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from replication.errors import ReplicationError
from replication.sync.current import current_replica
from replication.sync.rendezvous import Rendezvous, Site, Wait, two_at_once

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]


_EMPTY: Any = object()


class FutureResult:
    """A mailbox for one value, between a thread that puts and a thread that gets.

    It can be used again once its result has been fetched. Any value passes, ``None`` included.
    Inside a replica's forward, `get` raises as every wait does (`ReplicaFailed`,
    `ReplicasDiverged`) when no other replica can put any more.
    """

    def __init__(self) -> None:
        # Held for a few assignments only: no other lock is taken inside. Re-entrant, as a signal
        # handler may interrupt the thread that holds it.
        self._lock = threading.RLock()
        self._result = _EMPTY
        self._has_getter = False
        self._wait: Wait | None = None

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return FutureResult, ()  # a copy has no getter and holds nothing

    def put(self, result: Any) -> None:
        """Hands over ``result``.

        Raises:
            ReplicationError: The previous result has not been fetched.
        """
        with self._lock:
            is_free = self._result is _EMPTY
            if is_free:
                self._result = result
        if not is_free:
            raise ReplicationError(
                "a FutureResult holds one result at a time (put was called before the previous "
                "result was fetched); call get first"
            )
        wait = self._wait
        if wait is not None:
            with wait.rendezvous.lock:
                wait.rendezvous.end_wait(wait)

    def get(self) -> Any:
        """Returns the result, after waiting for it if it is not there yet.

        Raises:
            ReplicationError: Another thread is in `get`.
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: No replica can put the result any more.
        """
        with self._lock:
            is_alone, self._has_getter = not self._has_getter, True
        if not is_alone:
            raise ReplicationError(
                "a FutureResult serves one getter at a time (get was called while another thread "
                "is in it); give each thread that gets a FutureResult of its own"
            )
        try:
            self._await_result()
            with self._lock:
                result, self._result = self._result, _EMPTY
            return result
        finally:
            self._wait = None
            self._has_getter = False

    def _await_result(self) -> None:
        place = current_replica()
        rendezvous = place.rendezvous if place else Rendezvous(None)
        # While this lock is held no replica can end, so a replica that puts counts as running.
        with rendezvous.lock:
            if self._result is not _EMPTY:
                return
            replica = place.replica if place else 0
            wait = rendezvous.begin_wait(replica, (), Site("FutureResult", 1), {})
            self._wait = wait
            # A put between the two looks has not seen the wait.
            if self._result is not _EMPTY:
                rendezvous.end_wait(wait)
        wait.block()


#: The identifier of the master's own message.
_MASTER = 0

MasterCallback = Callable[[Sequence[tuple[Any, Any]]], Iterable[tuple[Any, Any]]]


class Slot:
    """What one slave and the master have sent each other in the current call."""

    __slots__ = ("identifier", "message", "replica", "reply", "wait")

    def __init__(self, identifier: Hashable, replica: int) -> None:
        self.identifier = identifier
        self.replica = replica
        self.message = _EMPTY
        self.reply = _EMPTY
        self.wait: Wait | None = None


class Channel:
    """One master, its slaves, and their calls in one forward."""

    def __init__(self, path: str, master: int = 0) -> None:
        self.path = path
        #: The replica that the master is in.
        self.master = master
        #: In the order of the replicas, also if they have registered in another.
        self.slots: list[Slot] = []
        self.calls: dict[int, int] = defaultdict(int)
        #: The replicas that the master waits for.
        self.missing: set[int] = set()
        self.master_wait: Wait | None = None

    def next_call(self, replica: int) -> Site:
        self.calls[replica] += 1
        return Site(self.path, self.calls[replica])


class SlavePipe:
    """A slave's end. Made by `SyncMaster.register_slave`."""

    def __init__(
        self,
        identifier: Hashable,
        rendezvous: Rendezvous | None = None,
        channel: Channel | None = None,
        slot: Slot | None = None,
    ) -> None:
        self.identifier = identifier
        self._rendezvous = rendezvous
        self._channel = channel
        self._slot = slot

    def __reduce__(self) -> tuple[type[SlavePipe], tuple[Hashable]]:
        return SlavePipe, (self.identifier,)  # a copy belongs to no forward

    def run_slave(self, msg: Any) -> Any:
        """Sends ``msg`` to the master and returns its reply.

        Tensors in both may be part of an autograd graph; gradients flow through them.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The master can no longer reply.
        """
        rendezvous, channel, slot = self._rendezvous, self._channel, self._slot
        if rendezvous is None or channel is None or slot is None:
            raise ReplicationError(
                f"the pipe of slave {self.identifier!r} is a copy and belongs to no forward; "
                "register_slave makes one for each forward"
            )
        with rendezvous.observed("exchange", slot.replica, channel.path):
            return self._exchanged(msg, rendezvous, channel, slot)

    def _exchanged(self, msg: Any, rendezvous: Rendezvous, channel: Channel, slot: Slot) -> Any:
        with rendezvous.lock:
            if slot.wait is not None:
                raise two_at_once(channel.path, slot.replica)
            site = channel.next_call(slot.replica)
            rendezvous.refuse_if_over(slot.replica, site)
            slot.message = msg
            channel.missing.discard(slot.replica)
            if channel.master_wait is not None and not channel.missing:
                rendezvous.end_wait(channel.master_wait)
            slot.wait = rendezvous.begin_wait(slot.replica, (channel.master,), site, channel.calls)
        try:
            slot.wait.block()
        except BaseException:
            with rendezvous.lock:
                if slot.message is not _EMPTY:  # nobody has collected it
                    channel.missing.add(slot.replica)
                # A graph in it may hold the replica, which holds the slot.
                slot.wait, slot.message, slot.reply = None, _EMPTY, _EMPTY
            raise
        # Nobody else looks at the slot until it has another message.
        reply, slot.wait, slot.reply = slot.reply, None, _EMPTY
        return reply


class MasterPipe:
    """The master's end in one forward."""

    def __init__(self, callback: MasterCallback, rendezvous: Rendezvous, channel: Channel) -> None:
        self._callback = callback
        self._rendezvous = rendezvous
        self._channel = channel

    def run_master(self, master_msg: Any) -> Any:
        """See `SyncMaster.run_master`."""
        channel = self._channel
        with self._rendezvous.observed("exchange", channel.master, channel.path):
            return self._exchanged(master_msg)

    def _exchanged(self, master_msg: Any) -> Any:
        rendezvous, channel = self._rendezvous, self._channel
        wait = None
        with rendezvous.lock:
            if channel.master_wait is not None:
                raise two_at_once(channel.path, channel.master)
            site = channel.next_call(channel.master)
            # Even if all messages are there: some may be of calls that have failed.
            rendezvous.refuse_if_over(channel.master, site)
            channel.missing = {slot.replica for slot in channel.slots if slot.message is _EMPTY}
            if channel.missing:
                wait = channel.master_wait = rendezvous.begin_wait(
                    channel.master, channel.missing, site, channel.calls
                )
        if wait is not None:
            try:
                wait.block()
            finally:
                channel.master_wait = None
        messages: list[tuple[Any, Any]] = [(_MASTER, master_msg)]
        with rendezvous.lock:
            if any(slot.message is _EMPTY for slot in channel.slots):  # given up meanwhile
                rendezvous.refuse_if_over(channel.master, site)
                raise ReplicationError(
                    f"{site}: a slave was interrupted and took its message back"
                )
            # A slave that is interrupted from here on, and calls again, waits for another reply.
            answered = [(slot, slot.wait) for slot in channel.slots]
            for slot in channel.slots:
                messages.append((slot.identifier, slot.message))
                slot.message = _EMPTY
        try:
            replies = replies_to(messages, self._callback, channel.path)
        except BaseException as error:
            rendezvous.fail(channel.master, error)
            if rendezvous.size is None:  # by hand: nobody else would
                rendezvous.forget_failures()
            raise
        with rendezvous.lock:
            for slot, wait in answered:
                if wait is not None and slot.wait is wait:
                    slot.reply = replies[slot.identifier]
                    rendezvous.end_wait(wait)
        return replies[_MASTER]


def replies_to(
    messages: list[tuple[Any, Any]], callback: MasterCallback, path: str
) -> dict[Any, Any]:
    """The callback's reply to each message, by its identifier."""
    answer = callback(messages)
    pairs = list(answer) if isinstance(answer, Iterable) else None
    expected = [identifier for identifier, _ in messages]
    try:
        replies = dict(pairs or ())
    except (TypeError, ValueError):  # not made of pairs
        replies = {}
    if set(replies) != set(expected):
        got = list(replies) or (type(answer).__name__ if pairs is None else pairs)
        raise ReplicationError(
            f"the master's callback of `{path}` must return one (identifier, reply) for each "
            f"message (expected identifiers {expected}, got {got})"
        )
    return replies


class SyncMaster:
    """The master's end of the pipes between the copies of one layer.

    Made once, in a layer's ``__init__``, or anew in each forward's callback of copy 0. The other
    copies call `register_slave` in their callbacks::

        def __data_parallel_replicate__(self, ctx, copy_id):
            if copy_id == 0:
                ctx.sync_master = self.sync_master
            else:
                self.slave_pipe = ctx.sync_master.register_slave(copy_id)

    In their forwards copy 0 calls `run_master` and the others ``slave_pipe.run_slave``, equally
    often. Outside a forward the pipes work between any threads; whether such a thread still lives
    is unknown there, so a message that nobody sends is waited for.

    Args:
        master_callback: Called in the master's thread with ``[(0, master_msg), (identifier, msg),
            ...]`` in the order of the replicas. Returns one ``(identifier, reply)`` for each, in
            any order.
    """

    def __init__(self, master_callback: MasterCallback) -> None:
        self._master_callback = master_callback
        self._forget_forwards()

    #: What a copy has anew.
    _OF_FORWARDS = ("_lock", "_latest", "_by_hand")

    def _forget_forwards(self) -> None:
        # Registering by hand, which any thread may do. Re-entrant: a signal handler or a finalizer
        # may interrupt the thread that holds it.
        self._lock = threading.RLock()
        # The forward that slaves were last registered in, for threads that do not run a replica.
        self._latest: Callable[[], Rendezvous | None] | None = None
        # Slaves registered outside any forward.
        self._by_hand: Rendezvous | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        for name in self._OF_FORWARDS:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_forwards()

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Adds a slave to the current forward.

        Outside a forward, the first registration after a run starts a new set of slaves.

        Args:
            identifier: Its name in the callback's messages, the ``copy_id`` as a rule.

        Raises:
            TypeError: The identifier cannot be hashed.
            ReplicationError: The identifier is taken, or the replica has a slave already.
        """
        if not isinstance(identifier, Hashable):
            raise TypeError(
                f"a slave's identifier must be hashable (got {type(identifier).__name__})"
            )
        place = current_replica()
        if place is not None:
            self._latest = weakref.ref(place.rendezvous)
            return self._registered(identifier, place.rendezvous, place.replica, place.path)
        with self._lock:
            rendezvous = self._registering_by_hand()
            self._latest = None
            return self._registered(identifier, rendezvous, len(self._slots(rendezvous)) + 1)

    def _registered(
        self, identifier: Hashable, rendezvous: Rendezvous, replica: int, path: str = ""
    ) -> SlavePipe:
        with rendezvous.lock:
            channel = rendezvous.channels.setdefault(self, Channel(path or "SyncMaster"))
            if identifier == _MASTER or any(s.identifier == identifier for s in channel.slots):
                raise ReplicationError(
                    f"a slave's identifier must be new and not {_MASTER}, which is the master's "
                    f"(got {identifier!r} in `{channel.path}`)"
                )
            if rendezvous.size and (
                replica == _MASTER or any(slot.replica == replica for slot in channel.slots)
            ):
                raise ReplicationError(
                    f"replica {replica} cannot register another slave in `{channel.path}`: each "
                    "replica but the master's has one"
                )
            slot = Slot(identifier, replica)
            channel.slots.append(slot)
            channel.slots.sort(key=lambda slot: slot.replica)
        return SlavePipe(identifier, rendezvous, channel, slot)

    def _registering_by_hand(self) -> Rendezvous:
        if self._by_hand is not None:
            if not any(self._by_hand.channels[self].calls.values()):
                return self._by_hand
            self._by_hand.close("new slaves have been registered; this pipe is of an older set.")
        by_hand = Rendezvous(None)
        by_hand.channels[self] = Channel("SyncMaster")
        self._by_hand = by_hand  # last, as others may look at it
        return by_hand

    def _slots(self, rendezvous: Rendezvous | None) -> list[Slot]:
        channel = rendezvous.channels.get(self) if rendezvous is not None else None
        return channel.slots if channel is not None else []

    def _rendezvous(self) -> Rendezvous | None:
        place = current_replica()
        if place is not None:
            return place.rendezvous
        return self._latest() if self._latest is not None else self._by_hand

    @property
    def nr_slaves(self) -> int:
        """Number of slaves registered in the current forward."""
        return len(self._slots(self._rendezvous()))

    def run_master(self, master_msg: Any) -> Any:
        """Collects the slaves' messages, calls the callback, sends the replies.

        Tensors in them may be part of an autograd graph; gradients flow through them.

        Returns:
            The callback's reply to the master.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: A slave's message can no longer come.
            ReplicationError: The callback did not reply to everyone, or the forward of the slaves
                has ended.
        """
        rendezvous = self._rendezvous()
        if rendezvous is None and self._latest is not None:
            raise ReplicationError(
                "run_master is called outside the forward that its slaves are of, which has ended "
                "(in the recomputation of an activation checkpoint, say)"
            )
        slots = self._slots(rendezvous)
        if rendezvous is None or not slots:
            messages = [(_MASTER, master_msg)]
            return replies_to(messages, self._master_callback, "SyncMaster")[_MASTER]
        channel = rendezvous.channels[self]
        return MasterPipe(self._master_callback, rendezvous, channel).run_master(master_msg)
