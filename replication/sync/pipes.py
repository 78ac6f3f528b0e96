"""Pipes between one master and its slaves, as the layers of the older toolkits use them.

    slave i                         master (copy 0)
    run_slave(msg_i) ── message ──▶ run_master(msg_0)
                                    master_callback([(0, msg_0), (1, msg_1), ...])
    returns reply_i  ◀── reply ───  returns reply_0

A call is an `Exchange`: the last to arrive calls the master's callback. Its state lives in the
`Rendezvous` of the forward, so one `SyncMaster` serves any number of forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from replication._torch import set_grad_modes
from replication.devices import current_device, current_stream, use_device
from replication.errors import ReplicationError
from replication.sync.lifecycle import CurrentReplica, current_replica
from replication.sync.rendezvous import Exchange, Rendezvous, Wait, site

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]


class FutureResult:
    """A mailbox through which one replica passes values to another, one at a time.

    Any value passes, ``None`` included. It works in forwards and replication callbacks.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel, FutureResult
    >>> class Adds(nn.Module):
    ...     def __data_parallel_replicate__(self, ctx, copy_id):
    ...         ctx.result = FutureResult() if copy_id == 0 else ctx.result
    ...         self.call = ctx.result.get if copy_id else lambda: ctx.result.put(1) or 0
    ...     def forward(self, x):
    ...         return x + self.call()
    >>> DataParallel(Adds(), ["cpu"] * 2)(torch.zeros(2)).tolist()
    [0.0, 1.0]
    """

    def __init__(self) -> None:
        self._box: list[Any] = []

    def __reduce__(self) -> tuple[type[FutureResult], tuple[()]]:
        return FutureResult, ()  # a copy has no getter and holds nothing

    def put(self, result: Any) -> None:
        """Puts ``result`` into the mailbox.

        Raises:
            ReplicationError: The previous result has not been fetched, or no replica calls.
        """
        rendezvous = calling_replica("FutureResult.put").rendezvous
        with rendezvous.lock:
            if self._box:
                raise ReplicationError(
                    "a FutureResult holds one result at a time (put was called before the "
                    "previous result was fetched); call get first"
                )
            self._box.append(result)
            rendezvous.condition.notify_all()

    def get(self) -> Any:
        """Waits for a result, removes it from the mailbox and returns it.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: No replica can put a result any more.
            ReplicationError: No replica calls.
        """
        current = calling_replica("FutureResult.get")
        with current.rendezvous.lock:
            current.rendezvous.wait(
                Wait(current.replica, (), site("FutureResult", 1), lambda: self._box)
            )
            return self._box.pop()


def calling_replica(name: str) -> CurrentReplica:
    """The replica whose forward or callback this thread runs, or ReplicationError."""
    current = current_replica()
    if current is None:
        raise ReplicationError(
            f"{name} connects the replicas of one forward; call it in a replication callback, or "
            "in a forward by the replica's own thread (not in a recomputation)"
        )
    return current


#: The identifier of the master's own message, and the replica that the master is in.
_MASTER = 0

MasterCallback = Callable[[list[tuple[Any, Any]]], Iterable[tuple[Any, Any]]]


class Message(NamedTuple):
    identifier: Hashable
    message: Any
    #: Of the master: makes the replies, as in the master's thread.
    reply: Callable[[list[tuple[Any, Any]]], list[Any]] | None = None


class Channel(Exchange):
    def __init__(self, path: str) -> None:
        super().__init__(path, [_MASTER])
        self.identifiers: set[Hashable] = {_MASTER}

    def register(self, rendezvous: Rendezvous, identifier: Hashable, replica: int) -> SlavePipe:
        """Adds a slave that is in a replica."""
        with rendezvous.lock:
            if identifier in self.identifiers or replica in self.calls:
                raise ReplicationError(
                    f"a slave's identifier must be new and not {_MASTER}, and its replica must "
                    f"have neither the master nor another slave (got {identifier!r} in replica "
                    f"{replica}, `{self.path}`)"
                )
            self.identifiers.add(identifier)
            self.add(replica)
        return SlavePipe(identifier, partial(self.send, rendezvous, replica))

    def send(self, rendezvous: Rendezvous, replica: int, message: Message) -> Any:
        if calling_replica("run_slave").rendezvous is not rendezvous:
            raise ReplicationError(
                f"slave {message.identifier!r} was not registered in this forward, so its master "
                "never answers; if another toolkit's patch_replication_callback has called the "
                "callbacks again, remove it"
            )
        return self(rendezvous, replica, message, self.merge)

    def merge(self, messages: list[Message]) -> list[Any]:
        reply = messages[0].reply  # the master is in replica 0
        if reply is None:
            raise ReplicationError(f"`{self.path}`: replica 0 is a slave, not the master")
        return reply([message[:2] for message in messages])


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
            ReplicationError: The slave was registered in another forward, or no replica calls.
        """
        return self._send(Message(self.identifier, msg))


def _refuse(message: Message) -> None:
    raise ReplicationError(
        f"the pipe of slave {message.identifier!r} is a copy and belongs to no forward; "
        "register_slave makes one for each forward"
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


def replies_as_master(
    place: tuple[torch.device, Any],
    modes: dict[str, bool],
    reply: Callable[[list[tuple[Any, Any]]], list[Any]],
    messages: list[tuple[Any, Any]],
) -> list[Any]:
    """Replies in the thread of any replica, on the device and in the modes of the master's."""
    with ExitStack() as stack:
        use_device(stack, *place)
        set_grad_modes(stack, **modes)
        return reply(messages)


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
    often.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel, SyncMaster
    >>> class Greets(nn.Module):
    ...     def __data_parallel_replicate__(self, ctx, copy_id):
    ...         if copy_id == 0:
    ...             ctx.master = SyncMaster(lambda messages: [(i, f"{x}!") for i, x in messages])
    ...             self.run = ctx.master.run_master
    ...         else:
    ...             self.run = ctx.master.register_slave(copy_id).run_slave
    ...     def forward(self, x):
    ...         return self.run(f"copy of {len(x)}")
    >>> DataParallel(Greets(), ["cpu"] * 2, gather_to_one_device=False)(torch.ones(3))
    Scattered('copy of 2!', 'copy of 1!')

    Args:
        master_callback: Called with ``[(0, master_msg), (identifier, msg), ...]`` in the order of
            the replicas, on the master's device, in the thread of the last replica to arrive.
            Returns one ``(identifier, reply)`` for each.
    """

    def __init__(self, master_callback: MasterCallback) -> None:
        self._master_callback = master_callback
        # Whether it has ever had slaves, which a call outside their forward would leave out.
        self._has_slaves = False

    def register_slave(self, identifier: Hashable) -> SlavePipe:
        """Adds a slave to the current forward.

        Args:
            identifier: The name of the slave in the callback's messages, usually its ``copy_id``.

        Raises:
            TypeError: The identifier cannot be hashed.
            ReplicationError: The identifier is taken, the replica has a slave already, or no
                replica calls.
        """
        current = calling_replica("register_slave")
        channel = self._channel(current)
        self._has_slaves = True
        return channel.register(current.rendezvous, identifier, current.replica)

    def _channel(self, current: CurrentReplica) -> Channel:
        channels = current.rendezvous.channels
        known: Channel | None = channels.get(self)
        return known or channels.setdefault(self, Channel(current.path or "SyncMaster"))

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that are registered in the current forward."""
        return len(self._channel(calling_replica("nr_slaves")).calls) - 1

    def run_master(self, master_msg: Any) -> Any:
        """Collects the messages of the slaves, calls the callback and returns the master's reply.

        Gradients flow through messages and replies.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The message of a slave can no longer arrive.
            ReplicationError: The callback did not reply to every message, or no replica calls.
        """
        if current_replica() is None and not self._has_slaves:  # a layer that is the only copy
            return replies_to(self._master_callback, "SyncMaster", [(_MASTER, master_msg)])[0]
        current, device = calling_replica("run_master"), current_device()
        channel = self._channel(current)
        reply = partial(
            replies_as_master,
            (device, current_stream(device)),
            {"grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled()},
            partial(replies_to, self._master_callback, channel.path),
        )
        message = Message(_MASTER, master_msg, reply)
        return channel(current.rendezvous, _MASTER, message, channel.merge)
