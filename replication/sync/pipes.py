"""Pipes between one master and its slaves, as the layers of the older toolkits use them.

    slave i                         master (copy 0)
    run_slave(msg_i) ── message ──▶ run_master(msg_0)
                                    master_callback([(0, msg_0), (1, msg_1), ...])
    returns reply_i  ◀── reply ───  returns reply_0

A call is an `Exchange` that the master merges. Its state lives in the `Rendezvous` of the forward,
so one `SyncMaster` serves any number of forwards. For threads outside any forward, it has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from replication.errors import ReplicationError
from replication.sync.current import current_replica
from replication.sync.exchange import Exchange
from replication.sync.rendezvous import Rendezvous, Wait

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]


class FutureResult:
    """A mailbox through which one thread passes values to another, one at a time.

    Any value passes, ``None`` included.

    >>> from replication import FutureResult
    >>> result = FutureResult()
    >>> result.put("ready")  # in one thread
    >>> result.get()  # in another
    'ready'
    """

    def __init__(self) -> None:
        # Without a lock, which an interrupt could leave held: each change is a single call.
        self._box: dict[str, list[Any]] = {}
        self._waits: list[Wait] = []

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return FutureResult, ()  # a copy has no getter and holds nothing

    def put(self, result: Any) -> None:
        """Puts ``result`` into the mailbox.

        Raises:
            ReplicationError: The previous result has not been fetched.
        """
        new = [result]
        try:
            if self._box.setdefault("result", new) is not new:
                raise ReplicationError(
                    "a FutureResult holds one result at a time (put was called before the "
                    "previous result was fetched); call get first"
                )
        finally:  # an interrupt must not leave a getter without the result
            for wait in self._waits[:]:
                wait.rendezvous.end_waits([wait])

    def get(self) -> Any:
        """Waits for a result, removes it from the mailbox and returns it.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: No replica can put a result any more.
        """
        current = current_replica()
        rendezvous = current.rendezvous if current else Rendezvous(None)
        replica = current.replica if current else 0
        while True:
            # While this lock is held no replica can end, so a replica that puts counts as running.
            with rendezvous.lock:
                with suppress(KeyError):  # empty, or another getter was faster
                    return self._box.pop("result")[0]
                wait = rendezvous.begin_wait(replica, (), "FutureResult", 1)
                self._waits.append(wait)
                if self._box:  # `put` has not seen the wait
                    rendezvous.end_waits([wait])
            try:
                wait.block()
            finally:
                self._waits.remove(wait)


#: The identifier of the master's own message, and the replica that the master is in.
_MASTER = 0

MasterCallback = Callable[[list[tuple[Any, Any]]], Iterable[tuple[Any, Any]]]


class Channel(Exchange):
    def __init__(self, path: str) -> None:
        super().__init__(path, [_MASTER], master=_MASTER)
        self.identifiers: set[Hashable] = {_MASTER}

    def register(
        self, rendezvous: Rendezvous, identifier: Hashable, replica: int | None
    ) -> SlavePipe:
        """Adds a slave that is in a replica, or that gets a new number if it is in none."""
        with rendezvous.lock:
            if replica is None:
                replica = len(self.calls)
            if identifier in self.identifiers or replica in self.calls:
                raise ReplicationError(
                    f"a slave's identifier must be new and not {_MASTER}, and its replica must "
                    f"have neither the master nor another slave (got {identifier!r} in replica "
                    f"{replica}, `{self.path}`)"
                )
            self.identifiers.add(identifier)
            self.add(replica)
        return SlavePipe(identifier, partial(self.send, rendezvous, replica))

    def send(self, rendezvous: Rendezvous, replica: int, message: tuple[Hashable, Any]) -> Any:
        current = current_replica()
        if current is not None and current.rendezvous is not rendezvous:
            raise ReplicationError(
                f"slave {message[0]!r} was not registered in this forward, so its master never "
                "answers; if another toolkit's patch_replication_callback has called the "
                "callbacks again, remove it"
            )
        return self(rendezvous, replica, message, None)


class SlavePipe:
    """The connection of a slave to its master. Made by `SyncMaster.register_slave`."""

    def __init__(self, identifier: Hashable, send: Callable[..., Any]) -> None:
        self.identifier = identifier
        self._send = send

    def __reduce__(self) -> tuple[Any, ...]:
        return SlavePipe, (self.identifier, _refuse)  # a copy belongs to no forward

    def run_slave(self, msg: Any) -> Any:
        """Sends ``msg`` to the master and returns its reply. Gradients flow through both.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The master can no longer reply.
            ReplicationError: The slave was registered in another forward, or in none.
        """
        return self._send((self.identifier, msg))


def _refuse(message: tuple[Hashable, Any]) -> None:
    raise ReplicationError(
        f"the pipe of slave {message[0]!r} is a copy and belongs to no forward; register_slave "
        "makes one for each forward"
    )


def replies_to(callback: MasterCallback, path: str, messages: list[tuple[Any, Any]]) -> list[Any]:
    answer = callback(messages)
    pairs = list(answer) if isinstance(answer, Iterable) else []
    expected = [identifier for identifier, _ in messages]
    replies: dict[Any, Any] = {}
    with suppress(TypeError, ValueError):  # not made of pairs
        replies = dict(pairs)
    if set(replies) != set(expected):
        raise ReplicationError(
            f"the master's callback of `{path}` must return one (identifier, reply) for each "
            f"message (expected {expected}, got {list(replies)} in a {type(answer).__name__})"
        )
    return [replies[identifier] for identifier in expected]


class SyncMaster:
    """The master of the copies of one layer: it replies to the messages of all of them.

    Make it in the ``__init__`` of the layer, or in each forward by the callback of copy 0. The
    other copies call `register_slave` in their callbacks::

        def __data_parallel_replicate__(self, ctx, copy_id):
            if copy_id == 0:
                ctx.sync_master = self.sync_master
            else:
                self.slave_pipe = ctx.sync_master.register_slave(copy_id)

    In their forwards copy 0 calls `run_master` and the others ``slave_pipe.run_slave``, equally
    often. Outside a forward, pipes connect any threads, and only `reset` ends a wait in vain.

    >>> from replication import SyncMaster
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> master = SyncMaster(lambda messages: [(i, f"{x}!") for i, x in messages])
    >>> pipe = master.register_slave(1)
    >>> with ThreadPoolExecutor() as pool:
    ...     reply = pool.submit(pipe.run_slave, "slave")
    ...     print(master.run_master("master"), reply.result())
    master! slave!

    Args:
        master_callback: Called in the master's thread with ``[(0, master_msg), (identifier, msg),
            ...]`` in the order of the replicas. Returns one ``(identifier, reply)`` for each.
    """

    def __init__(self, master_callback: MasterCallback) -> None:
        self._master_callback = master_callback
        self._outside_forward = Rendezvous(None)
        # Whether the latest slave was registered in a forward.
        self._serves_forward = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_outside_forward": None, "_serves_forward": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _outside_forward=Rendezvous(None))

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Adds a slave to the current forward.

        Outside a forward, the first registration after a run starts a new set of slaves.

        Args:
            identifier: The name of the slave in the callback's messages, usually its ``copy_id``.

        Raises:
            TypeError: The identifier cannot be hashed.
            ReplicationError: The identifier is taken, or the replica has a slave already.
        """
        current = current_replica()
        self._serves_forward = current is not None
        if current is None:
            with self._outside_forward.lock:  # any thread may register
                if any(self._channel()[1].calls.values()):
                    self.reset()
        rendezvous, channel = self._channel()
        return channel.register(rendezvous, identifier, current.replica if current else None)

    def reset(self) -> None:
        """Drops slaves that an interrupted program registered outside a forward."""
        self._outside_forward.close("reset, or a new set of slaves, has dropped this slave.")
        self._outside_forward.take_failures()
        self._outside_forward = Rendezvous(None)

    def _channel(self) -> tuple[Rendezvous, Channel]:
        current = current_replica()
        rendezvous = self._outside_forward if current is None else current.rendezvous
        path = (current and current.path) or "SyncMaster"
        known: Channel | None = rendezvous.channels.get(self)
        return rendezvous, known or rendezvous.channels.setdefault(self, Channel(path))

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that are registered in the current forward."""
        return len(self._channel()[1].calls) - 1

    def run_master(self, master_msg: Any) -> Any:
        """Collects the messages of the slaves, calls the callback and returns the master's reply.

        Gradients flow through messages and replies.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The message of a slave can no longer arrive.
            ReplicationError: The callback did not reply to every message, or the slaves' forward
                ended.
        """
        if self._serves_forward and current_replica() is None:
            raise ReplicationError(
                "run_master must be called in the same forward as its slaves, by its replica's "
                "own thread (in a recomputation?)"
            )
        rendezvous, channel = self._channel()
        message = (_MASTER, master_msg)
        merge = partial(replies_to, self._master_callback, channel.path)
        if len(channel.calls) == 1:
            return merge([message])[0]
        try:
            return channel(rendezvous, _MASTER, message, merge)
        finally:
            if rendezvous.size is None:  # no parallel_apply collects the failures
                rendezvous.take_failures()
