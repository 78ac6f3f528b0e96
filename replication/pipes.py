"""Pipes between one master and its slaves, as the layers of the older toolkits use them.

    slave i                         master (copy 0)
    run_slave(msg_i) ── message ──▶ run_master(msg_0)
                                    master_callback([(0, msg_0), (1, msg_1), ...])
    returns reply_i  ◀── reply ───  returns reply_0

A call is an `Exchange`: the last to arrive calls the master's callback. Its state belongs to the
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
from replication.sync.lifecycle import CurrentReplica, calling_replica, this_thread
from replication.sync.rendezvous import Exchange, Rendezvous, Wait

__all__ = ["FutureResult", "SlavePipe", "SyncMaster"]

#: The identifier of the master's own message, and the replica that the master is in.
_MASTER = 0

#: Messages or replies, each with the identifier of its slave or of the master.
Identified = list[tuple[Any, Any]]

MasterCallback = Callable[[Identified], Iterable[tuple[Any, Any]]]


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
        #: Holds the result, if there is one.
        self._box: list[Any] = []

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
            rendezvous.wake()

    def get(self) -> Any:
        """Waits for a result, removes it from the mailbox and returns it.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: No replica can put a result any more.
            ReplicationError: No replica calls.
        """
        current = calling_replica("FutureResult.get")
        with current.rendezvous.lock:
            wait = Wait(current.replica, ("FutureResult", 1), (), lambda: self._box)
            current.rendezvous.wait(wait)
            return self._box.pop()


class Message(NamedTuple):
    identifier: Hashable
    content: Any
    #: Makes the replies to all messages. Only the master's message has it.
    reply: Callable[[Identified], list[Any]] | None = None


class PipeExchange(Exchange):
    """The calls of one master and its slaves in one forward."""

    def __init__(self, path: str) -> None:
        super().__init__(path, [_MASTER])
        self.identifiers: set[Hashable] = {_MASTER}

    def register(self, identifier: Hashable, replica: int) -> None:
        """Adds a slave that is in a replica. The lock is held."""
        if identifier in self.identifiers or replica in self.calls:
            raise ReplicationError(
                f"a slave's identifier must be new and not {_MASTER}, and its replica must have "
                f"neither the master nor another slave (got {identifier!r} in replica {replica}, "
                f"`{self.path}`); call register_slave once in each replica except 0"
            )
        self.identifiers.add(identifier)
        self.add(replica)

    def merge(self, messages: list[Message]) -> list[Any]:
        reply: Any = messages[0].reply  # the first message is the master's, which is in replica 0
        return reply([message[:2] for message in messages])  # type: ignore[no-any-return]


class SlavePipe:
    """The connection of a slave to its master. Made by `SyncMaster.register_slave`."""

    def __init__(
        self, identifier: Hashable, exchange: PipeExchange, rendezvous: Rendezvous, replica: int
    ) -> None:
        self.identifier, self._exchange = identifier, exchange
        self._rendezvous, self._replica = rendezvous, replica

    def run_slave(self, msg: Any) -> Any:
        """Sends ``msg`` to the master and returns its reply. Gradients flow through both.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The master can no longer reply.
            ReplicationError: The slave was registered in another forward, or no replica calls.
        """
        if calling_replica("run_slave").rendezvous is not self._rendezvous:
            raise ReplicationError(
                f"slave {self.identifier!r} was not registered in this forward, so its master "
                "never answers; if another toolkit's patch_replication_callback has called the "
                "callbacks again, remove it"
            )
        message = Message(self.identifier, msg)
        return self._exchange(self._rendezvous, self._replica, message)


def replies_of(callback: MasterCallback, path: str, messages: Identified) -> list[Any]:
    """Calls the master's callback. Returns its replies in the order of the messages."""
    answer = callback(messages)
    pairs = list(answer) if isinstance(answer, Iterable) else []
    expected = [identifier for identifier, _ in messages]
    replies: dict[Any, Any] = {}
    with suppress(TypeError, ValueError):  # something else than pairs
        replies = dict(pairs)
    if set(replies) != set(expected):
        raise ReplicationError(
            f"the master's callback of `{path}` must return one (identifier, reply) for each "
            f"message (expected {expected}, got {list(replies)} in a {type(answer).__name__})"
        )
    return [replies[identifier] for identifier in expected]


def as_in_this_thread(reply: Callable[[Identified], list[Any]]) -> Callable[..., list[Any]]:
    """Lets any thread call a function on this thread's device, in its stream and its modes."""
    device = current_device()
    stream = current_stream(device)
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call(messages: Identified) -> list[Any]:
        with ExitStack() as stack:
            use_device(stack, device, stream)
            set_grad_modes(stack, grad=grad, inference=inference)
            return reply(messages)

    return call


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
        exchange = self._exchange(current)
        with current.rendezvous.lock:
            exchange.register(identifier, current.replica)
        self._has_slaves = True
        return SlavePipe(identifier, exchange, current.rendezvous, current.replica)

    def _exchange(self, current: CurrentReplica) -> PipeExchange:
        made = current.rendezvous.exchanges
        exchange: PipeExchange = made.setdefault(self, PipeExchange(current.path or "SyncMaster"))
        return exchange

    @property
    def nr_slaves(self) -> int:
        """The number of slaves that are registered in the current forward."""
        return len(self._exchange(calling_replica("nr_slaves")).calls) - 1

    def run_master(self, master_msg: Any) -> Any:
        """Collects the messages of the slaves, calls the callback and returns the master's reply.

        Gradients flow through messages and replies.

        Raises:
            ReplicaFailed: Another replica raised.
            ReplicasDiverged: The message of a slave can no longer arrive.
            ReplicationError: The callback did not reply to every message, or no replica calls.
        """
        if this_thread.current is None and not self._has_slaves:  # a layer that is the only copy
            return replies_of(self._master_callback, "SyncMaster", [(_MASTER, master_msg)])[0]
        current = calling_replica("run_master")
        exchange = self._exchange(current)
        # The last replica to arrive calls the callback. Its thread must not change the bits.
        reply = as_in_this_thread(partial(replies_of, self._master_callback, exchange.path))
        return exchange(current.rendezvous, _MASTER, Message(_MASTER, master_msg, reply))
