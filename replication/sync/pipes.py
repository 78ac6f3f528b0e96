"""Pipes between one master and its slaves, as the layers of the older toolkits use them.

    slave i                         master (copy 0)
    run_slave(msg_i) ── message ──▶ run_master(msg_0)
                                    master_callback([(0, msg_0), (1, msg_1), ...])
    returns reply_i  ◀── reply ───  returns reply_0

A call is an `Exchange` that the master merges in its own thread. Its state lives in the
`Rendezvous` of the forward, so one `SyncMaster` serves any number of forwards, one after the other
or at the same time. Outside any forward, a `SyncMaster` has a `Rendezvous` of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from replication.errors import ReplicationError
from replication.sync.exchange import Exchange
from replication.sync.rendezvous import Rendezvous, Wait, current_replica

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]


_EMPTY: Any = object()


class FutureResult:
    """A mailbox through which one thread passes values to another, one at a time.

    Any value passes, ``None`` included. Inside the forward of a replica, `get` raises
    `ReplicaFailed` or `ReplicasDiverged` when no other replica can put a result any more.

    >>> from replication import FutureResult
    >>> result = FutureResult()
    >>> result.put("ready")  # in one thread
    >>> result.get()  # in another
    'ready'
    """

    def __init__(self) -> None:
        # Held for a few assignments only: no other lock is taken inside.
        self._lock = threading.RLock()
        self._result = _EMPTY
        self._has_getter = False
        self._wait: Wait | None = None

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return FutureResult, ()  # a copy has no getter and holds nothing

    def put(self, result: Any) -> None:
        """Puts ``result`` into the mailbox.

        Raises:
            ReplicationError: The previous result has not been fetched.
        """
        try:
            with self._lock:
                is_free = self._result is _EMPTY
                if is_free:
                    self._result = result
            self._wake_getter()
        except BaseException:  # an interrupt must not leave a getter without the result
            self._wake_getter()
            raise
        if not is_free:
            raise ReplicationError(
                "a FutureResult holds one result at a time (put was called before the previous "
                "result was fetched); call get first"
            )

    def _wake_getter(self) -> None:
        with self._lock:
            wait = None if self._result is _EMPTY else self._wait
        if wait is not None:
            with wait.rendezvous.lock:
                wait.rendezvous.end_waits([wait])

    def get(self) -> Any:
        """Waits for the result, removes it from the mailbox and returns it.

        Raises:
            ReplicationError: Another thread is in `get`.
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: No replica can put the result any more.
        """
        is_alone = False
        try:
            with self._lock:
                if not self._has_getter:
                    self._has_getter = is_alone = True
            if not is_alone:
                raise ReplicationError(
                    "a FutureResult serves one getter at a time (get was called while another "
                    "thread is in it); give each thread its own FutureResult"
                )
            self._await_result()
            with self._lock:
                result, self._result = self._result, _EMPTY
            return result
        finally:
            if is_alone:
                # Without the lock: a Ctrl-C could come when it is taken.
                self._wait, self._has_getter = None, False

    def _await_result(self) -> None:
        current = current_replica()
        rendezvous = current.rendezvous if current else Rendezvous(None)
        # While this lock is held no replica can end, so a replica that puts counts as running.
        with rendezvous.lock:
            if self._result is not _EMPTY:
                return
            replica = current.replica if current else 0
            wait = rendezvous.begin_wait(replica, (), "FutureResult", {replica: 1})
            with self._lock:
                self._wait = wait
                has_arrived = self._result is not _EMPTY  # that put has not seen the wait
            if has_arrived:
                rendezvous.end_waits([wait])
        wait.block()


#: The identifier of the master's own message, and the replica that the master is in.
_MASTER = 0

MasterCallback = Callable[[list[tuple[Any, Any]]], Iterable[tuple[Any, Any]]]


class Channel(Exchange):
    """The exchange between one master and its slaves in one forward."""

    def __init__(self, path: str) -> None:
        super().__init__(path, [_MASTER], master=_MASTER)
        self.slaves: dict[int, Hashable] = {}

    def register(self, replica: int, identifier: Hashable, is_forward: bool) -> None:
        """Adds a slave. The rendezvous' lock is held."""
        if identifier == _MASTER or identifier in self.slaves.values():
            raise ReplicationError(
                f"a slave's identifier must be new and not {_MASTER}, which is the master's "
                f"(got {identifier!r} in `{self.path}`)"
            )
        if is_forward and (replica == _MASTER or replica in self.slaves):
            raise ReplicationError(
                f"replica {replica} cannot register another slave in `{self.path}`: each replica "
                "has one slave, and the master's replica none"
            )
        self.slaves[replica] = identifier
        self.add(replica)


class SlavePipe:
    """The connection of a slave to its master. Made by `SyncMaster.register_slave`."""

    def __init__(
        self,
        identifier: Hashable,
        rendezvous: Rendezvous | None = None,
        channel: Channel | None = None,
        replica: int = 0,
    ) -> None:
        self.identifier = identifier
        self._rendezvous = rendezvous
        self._channel = channel
        self._replica = replica

    def __reduce__(self) -> tuple[type[SlavePipe], tuple[Hashable]]:
        return SlavePipe, (self.identifier,)  # a copy belongs to no forward

    def run_slave(self, msg: Any) -> Any:
        """Sends ``msg`` to the master and returns its reply.

        Tensors in both may be part of an autograd graph. Gradients flow through them.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The master can no longer reply.
        """
        if self._rendezvous is None or self._channel is None:
            raise ReplicationError(
                f"the pipe of slave {self.identifier!r} is a copy and belongs to no forward; "
                "register_slave makes one for each forward"
            )
        return self._channel(self._rendezvous, self._replica, (self.identifier, msg), None)


def replies_to(messages: list[tuple[Any, Any]], callback: MasterCallback, path: str) -> list[Any]:
    """Returns the callback's reply to each message."""
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
    return [replies[identifier] for identifier in expected]


class SyncMaster:
    """The master of the copies of one layer: it replies to the messages of all of them.

    It is made once, in the ``__init__`` of the layer, or anew in each forward by the callback of
    copy 0. The other copies call `register_slave` in their callbacks::

        def __data_parallel_replicate__(self, ctx, copy_id):
            if copy_id == 0:
                ctx.sync_master = self.sync_master
            else:
                self.slave_pipe = ctx.sync_master.register_slave(copy_id)

    In their forwards copy 0 calls `run_master` and the others call ``slave_pipe.run_slave``,
    equally often. Outside a forward, pipes connect any threads. They cannot know whether a thread
    is still alive, so a wait for a message that never comes ends only with `reset`.

    >>> from replication import SyncMaster
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> def add(messages):
    ...     total = sum(message for _, message in messages)
    ...     return [(identifier, total) for identifier, _ in messages]
    >>> master = SyncMaster(add)
    >>> pipe = master.register_slave(1)
    >>> with ThreadPoolExecutor() as pool:
    ...     reply = pool.submit(pipe.run_slave, 2)
    ...     print(master.run_master(1), reply.result())
    3 3

    Args:
        master_callback: Called in the master's thread with ``[(0, master_msg), (identifier, msg),
            ...]`` in the order of the replicas. It returns one ``(identifier, reply)`` for each
            message, in any order.
    """

    def __init__(self, master_callback: MasterCallback) -> None:
        self._master_callback = master_callback
        self._forget_forwards()

    _OF_FORWARDS = ("_lock", "_latest", "_outside_forward")

    def _forget_forwards(self) -> None:
        # Guards registrations outside a forward, which any thread may make.
        self._lock = threading.RLock()
        # The latest forward with slaves, for threads that do not run a replica.
        self._latest: Callable[[], Rendezvous | None] | None = None
        # The rendezvous of the slaves that were registered outside any forward.
        self._outside_forward: Rendezvous | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._OF_FORWARDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_forwards()

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Adds a slave to the current forward.

        Outside a forward, the first registration after a run starts a new set of slaves.

        Args:
            identifier: The name of the slave in the callback's messages, usually its ``copy_id``.

        Raises:
            TypeError: The identifier cannot be hashed.
            ReplicationError: The identifier is taken, or the replica has a slave already.
        """
        if not isinstance(identifier, Hashable):
            raise TypeError(
                f"a slave's identifier must be hashable (got {type(identifier).__name__})"
            )
        current = current_replica()
        if current is not None:
            rendezvous, replica = current.rendezvous, current.replica
            self._latest = weakref.ref(rendezvous)
            with rendezvous.lock:
                new = Channel(current.path or "SyncMaster")
                channel = rendezvous.channels.setdefault(self, new)
                channel.register(replica, identifier, is_forward=True)
            return SlavePipe(identifier, rendezvous, channel, replica)
        with self._lock:
            rendezvous = self._open_registration()
            self._latest = None
            with rendezvous.lock:
                channel = rendezvous.channels[self]
                replica = len(channel.slaves) + 1
                channel.register(replica, identifier, is_forward=False)
        return SlavePipe(identifier, rendezvous, channel, replica)

    def reset(self) -> None:
        """Drops the slaves that were registered outside a forward, whose pipes raise from then on.

        It is needed if an interrupt comes between `register_slave` and `run_master`.
        """
        with self._lock:
            if self._outside_forward is not None:
                self._outside_forward.close("the SyncMaster has been reset.")
            self._outside_forward = None

    def _open_registration(self) -> Rendezvous:
        if self._outside_forward is not None:
            if not any(self._outside_forward.channels[self].calls.values()):
                return self._outside_forward
            self._outside_forward.close(
                "new slaves have been registered; this pipe is of an older set."
            )
        rendezvous = Rendezvous(None)
        rendezvous.channels[self] = Channel("SyncMaster")
        self._outside_forward = rendezvous  # last, because other threads may read it
        return rendezvous

    def _rendezvous(self) -> Rendezvous | None:
        current = current_replica()
        if current is not None:
            return current.rendezvous
        latest = self._latest  # read once: another thread may register a slave
        return latest() if latest is not None else self._outside_forward

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that are registered in the current forward."""
        rendezvous = self._rendezvous()
        channel = rendezvous.channels.get(self) if rendezvous is not None else None
        return len(channel.slaves) if channel is not None else 0

    def run_master(self, master_msg: Any) -> Any:
        """Collects the messages of the slaves, calls the callback and sends the replies.

        Tensors in them may be part of an autograd graph. Gradients flow through them.

        Returns:
            The callback's reply to the master.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The message of a slave can no longer arrive.
            ReplicationError: The callback did not reply to every message, or the forward of the
                slaves has ended.
        """
        rendezvous = self._rendezvous()
        if rendezvous is None and self._latest is not None:
            raise ReplicationError(
                "run_master must be called in the same forward as its slaves, which has ended "
                "(is this the recomputation of an activation checkpoint?)"
            )
        message = (_MASTER, master_msg)
        channel = rendezvous.channels.get(self) if rendezvous is not None else None
        if rendezvous is None or channel is None or not channel.slaves:
            return replies_to([message], self._master_callback, "SyncMaster")[0]

        def merge(messages: list[tuple[Any, Any]]) -> list[Any]:
            return replies_to(messages, self._master_callback, path)

        path = channel.path

        try:
            return channel(rendezvous, _MASTER, message, merge)
        except BaseException:
            if rendezvous.size is None:  # no parallel_apply collects the failures
                rendezvous.take_failures()
            raise
