"""`ReplicaGroup`: collectives between the replicas of one forward, which run in threads.

The last rank to arrive checks that all calls match and joins the graphs of all ranks by plain
differentiable operations (see `replication.sync.exchange`). A backward through the results is a
backward through a single graph: no thread waits in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from replication._torch import (
    NO_BACKWARD,
    count_nodes_up_to,
    current_backward,
    nodes_made,
    sees_saved_tensors,
)
from replication.devices import is_int, to_device
from replication.errors import ReplicationError, path_or_root
from replication.groups.base import (
    Call,
    Group,
    Layouts,
    ReduceOp,
    SoloGroup,
    check_alike,
    in_a_callback,
    layouts_of,
    reduced,
)
from replication.steps.broadcast import broadcast
from replication.sync.current import current_replica, is_recomputation
from replication.sync.exchange import Exchange
from replication.sync.rendezvous import Rendezvous, Site

__all__ = ["CallbackContext", "ReplicaGroup"]


class CallbackContext:
    """What the copies of one layer share in one forward: any attribute that they set on it.

    Attributes:
        num_copies: Number of copies.
        devices: The device of each copy; None where it is not known, as that of a copy without
            any tensor in somebody else's `torch.nn.DataParallel`.
        path: The layer's path in the replicated module, as in ``named_modules()``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        num_copies: int = 1,
        devices: Sequence[torch.device | None] | None = None,
        path: str = "",
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.num_copies = num_copies
        self.devices = tuple(devices or [None] * num_copies)
        self.path = path
        # What `group` needs is out of the way of attributes that copies may set.
        self._members = GroupFactory(rendezvous, path_or_root(path), range(num_copies))

    def group(self, copy_id: int) -> Group:
        """Returns a copy's `Group`: it and the other copies of this layer in this forward.

        For a single copy that is a `SoloGroup`. Collectives are called in forward, not in the
        callback. Every call with the same ``copy_id`` returns the same group.

        Raises:
            TypeError: ``copy_id`` is no int.
            IndexError: There is no such copy.
            ReplicationError: The context is a copy, and belongs to no forward.
        """
        return self._members.group(copy_id)


T = TypeVar("T")
MessageT = TypeVar("MessageT")
ReplyT = TypeVar("ReplyT")

#: The tensors of one member.
Tensors = tuple[Tensor, ...]


class Request(NamedTuple):
    """The message of one member to the member that merges, and the thread state it came with."""

    call: Call
    message: Any
    #: Returns the replies by rank; that of the first rank is called, whichever member merges.
    merge: Callable[[list[Any]], Iterable[Any]]
    wants_graph: bool
    inference_mode: bool
    #: The number of autograd nodes that the member's thread has made.
    nodes: int


class Communicator:
    """The state that the members of one group share in one forward."""

    def __init__(self, rendezvous: Rendezvous, layer: str, replicas: Sequence[int]) -> None:
        self.rendezvous = rendezvous
        self.layer = layer
        #: The replica of each member.
        self.replicas = tuple(replicas)
        is_part = len(replicas) != rendezvous.size
        #: The name of the group in messages.
        self.path = f"{layer}, replicas {replicas[0]}-{replicas[-1]}" if is_part else layer
        self._exchange = Exchange(rendezvous, self.path, self.replicas)
        self._parts: dict[int, list[GroupFactory]] = {}

    def exchange(
        self,
        rank: int,
        call: Call,
        message: Any,
        merge: Callable[[list[Any]], Iterable[Any]],
        wants_graph: bool,
    ) -> Any:
        """Sends a message to the member that merges, which may be any, and returns the reply.

        Autograd runs nodes in an order that depends on how many nodes each thread has made. For
        the same order in every run, whichever member merges, all have made equally many after it.
        """
        nodes = nodes_made() if wants_graph and not torch.is_anomaly_enabled() else 0
        inference_mode = torch.is_inference_mode_enabled()
        request = Request(call, message, merge, wants_graph, inference_mode, nodes)
        reply, nodes = self._exchange(rank, request, self._merge)
        count_nodes_up_to(nodes)
        return reply

    def _merge(self, site: Site, requests: list[Request]) -> list[tuple[Any, int]]:
        """Returns the reply to each member, and the number of nodes to catch up with."""
        calls = [request.call for request in requests]
        if calls.count(calls[0]) < len(calls):
            check_alike(calls, str(site), self.replicas, "replica")
        most = max(request.nodes for request in requests)
        count_nodes_up_to(most)
        inference_mode = all(request.inference_mode for request in requests)
        wants_graph = any(request.wants_graph for request in requests)
        with self._on_behalf_of_all(inference_mode, wants_graph):
            replies = list(requests[0].merge([request.message for request in requests]))
        nodes = nodes_made() if most else 0
        return [(reply, nodes) for reply in replies]

    def _on_behalf_of_all(
        self, inference_mode: bool, wants_graph: bool
    ) -> AbstractContextManager[object]:
        """Sets the state of the merging thread, on which no reply may depend.

        The member that merges may run without grad, in inference mode, or behind hooks on saved
        tensors.
        """
        stack = ExitStack()
        if torch.is_inference_mode_enabled() != inference_mode:
            stack.enter_context(torch.inference_mode(inference_mode))
        if torch.is_grad_enabled() != wants_graph:
            stack.enter_context(torch.set_grad_enabled(wants_graph))
        if sees_saved_tensors():
            stack.enter_context(saved_tensors_hooks(_packed, _unpacked))
        return stack

    def part(self, rank: int, size: int) -> Group:
        """A member's group of its part, if all parts but the last are of this size."""
        parts = self._parts.get(size)
        if parts is None:
            starts = range(0, len(self.replicas), size)
            made = [
                GroupFactory(self.rendezvous, self.layer, self.replicas[i : i + size])
                for i in starts
            ]
            parts = self._parts.setdefault(size, made)  # somebody else may have been faster
        return parts[rank // size].group(rank % size)


def _packed(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    """The tensor; torch checks its version only where there are no hooks."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation after a collective: a tensor of shape {list(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version}"
        )
    return tensor


class GroupFactory:
    """Some copies of a layer, and their groups, which are made when the first is asked for.

    Args:
        rendezvous: That of the forward; None where there is none.
        layer: The path of the layer, for messages.
        replicas: The replica that each copy is in.
    """

    def __init__(self, rendezvous: Rendezvous | None, layer: str, replicas: Sequence[int]) -> None:
        self._rendezvous = rendezvous
        self._layer = layer
        self._replicas = replicas
        self._groups: list[Group] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self._layer, self._replicas)  # a copy belongs to no forward

    def group(self, rank: int) -> Group:
        """The group of one of them.

        Raises:
            TypeError: ``rank`` is no int.
            IndexError: There is no such copy.
            ReplicationError: They belong to no forward.
        """
        size = len(self._replicas)
        if not is_int(rank):
            raise TypeError(f"a copy_id is an int (got {rank!r})")
        if not 0 <= rank < size:
            raise IndexError(f"`{self._layer}` has copies 0 to {size - 1} (got copy_id {rank})")
        if size == 1:
            return SoloGroup()
        if self._rendezvous is None:
            raise ReplicationError(
                f"`{self._layer}`: the context is a copy, or was made by hand, and belongs to no "
                "forward; execute_replication_callbacks makes one that does"
            )
        with self._rendezvous.lock:
            if not self._groups:
                communicator = Communicator(self._rendezvous, self._layer, self._replicas)
                self._groups = [ReplicaGroup(i, size, communicator) for i in range(size)]
        return self._groups[rank]


class ReplicaGroup(Group):
    """The copies of one layer in the replicas of one forward, each in a thread of its own.

    Made by `CallbackContext.group`, for one forward only.

    Nobody waits in backward, and any subset of the results may enter a loss. A tensor that has no
    influence on it gets no gradient (`torch.autograd.grad` needs ``allow_unused``).
    """

    def __init__(self, rank: int, size: int, communicator: Communicator | None = None) -> None:
        super().__init__(rank, size)
        self._communicator = communicator

    def __reduce__(self) -> tuple[type[ReplicaGroup], tuple[int, int]]:
        return type(self), (self.rank, self.size)  # a copy belongs to no forward

    def _where(self) -> str:
        if self._communicator is None:
            return super()._where()
        return f"`{self._communicator.path}`, replica {self._communicator.replicas[self.rank]}"

    @property
    def recomputes(self) -> bool:
        """As `Group` says; also in a thread that a replica has started."""
        return is_recomputation() or self._connected().rendezvous.in_backward

    @property
    def in_later_backward(self) -> bool:
        """Whether this is a call in a backward that began later than this replica's forward.

        Nobody would answer it.
        """
        place, began_in = current_replica(), NO_BACKWARD
        if place is not None and place.rendezvous is self._connected().rendezvous:
            began_in = place.backward
        return current_backward() != began_in

    def commit(self, write: Callable[[], object]) -> None:
        """Calls ``write``, which changes the original layer, unless the forward has been closed.

        See `Rendezvous.commit`.
        """
        self._connected().rendezvous.commit(write)

    def exchange(
        self,
        name: str,
        message: MessageT,
        merge: Callable[[list[MessageT]], Iterable[ReplyT]],
        *,
        layouts: Layouts = (),
        requires_grad: bool = False,
    ) -> ReplyT:
        """Sends a message and returns the reply; one member computes the replies of all.

        The collectives consist of it. Layers with autograd nodes of their own may call it as well.

        Args:
            name: The name of the call in messages. It must match on every member.
            message: Any object.
            merge: Returns the replies by rank, given the messages by rank. The function that the
                first rank passes is called, in the thread of the last member to arrive.
            layouts: Dtypes and shapes that must match on every member.
            requires_grad: Whether the message holds a tensor that requires gradients. If it is
                true on any member, ``merge`` runs with grad enabled.

        Raises:
            ReplicationError: As `Group`. Also if no other member could answer the call.
        """
        return self._exchange(Call(name, layouts=layouts), message, merge, requires_grad)

    def _exchange(
        self,
        call: Call,
        message: MessageT,
        merge: Callable[[list[MessageT]], Iterable[ReplyT]],
        wants_graph: bool = False,
    ) -> ReplyT:
        self._check_use(call.name)
        communicator = self._connected()
        return communicator.exchange(self.rank, call, message, merge, wants_graph)  # type: ignore[no-any-return]

    def _check_use(self, name: str) -> None:
        communicator, place = self._connected(), current_replica()
        own = communicator.replicas[self.rank]
        if place is not None and place.rendezvous is communicator.rendezvous:
            if place.path:
                raise ReplicationError(f"{self._where()}: {in_a_callback(name)}")
            if place.replica != own:
                raise ReplicationError(
                    f"{self._where()}: replica {place.replica} calls {name} of the group of copy "
                    f"{own}; ctx.group takes the copy_id that the callback has been called with"
                )
        elif communicator.rendezvous.has_left(own):
            raise ReplicationError(
                f"{self._where()}: {name} outside the forward that the group is of, which has "
                "ended; "
                + (
                    "in backward nobody answers, so leave the layer out of activation checkpoints"
                    if current_backward() != NO_BACKWARD
                    else "take the group anew in each forward"
                )
            )

    def _connected(self) -> Communicator:
        if self._communicator is None:
            raise ReplicationError(
                f"{self._where()} is a copy and belongs to no forward; only the replicas' own "
                "groups are connected"
            )
        return self._communicator

    def _join(
        self, call: Call, tensors: Tensors, merge: Callable[[list[Tensors]], Iterable[Tensors]]
    ) -> Tensors:
        """`exchange` of tensors."""
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled:
            tensors = tuple(tensor.detach() for tensor in tensors)
        wants_graph = any(tensor.requires_grad for tensor in tensors)
        results = self._exchange(
            call,
            tensors,
            lambda messages: merge([tuple(map(ordinary, m)) for m in messages]),
            wants_graph,
        )
        return results if grad_enabled else tuple(result.detach() for result in results)

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self._exchange(Call("barrier"), None, lambda messages: messages)

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns the objects of all members themselves, in the order of their ranks."""
        call = Call("all_gather_object")
        return self._exchange(call, obj, lambda objects: [tuple(objects)] * len(objects))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            tensors = [shard for (shard,) in shards]
            home = tensors[0].device
            total = reduced([to_device(t, home) for t in tensors], op)
            return copies([total], [t.device for t in tensors])

        call = Call("all_reduce", f"op={op!r}", layouts_of([tensor]))
        return self._join(call, (tensor,), merge)[0]

    def _all_gather(self, tensor: Tensor) -> Tensors:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            tensors = [shard for (shard,) in shards]
            return copies(tensors, [t.device for t in tensors])

        call = Call("all_gather", "", layouts_of([tensor]), any_length=True)
        return self._join(call, (tensor,), merge)

    def _reduce_scatter(self, tensors: Tensors, op: ReduceOp) -> Tensor:
        def merge(lists: list[Tensors]) -> Iterable[Tensors]:
            for parts, own in zip(zip(*lists, strict=True), lists, strict=True):
                yield (reduced([to_device(part, own[0].device) for part in parts], op),)

        call = Call("reduce_scatter", f"op={op!r}", layouts_of(tensors))
        return self._join(call, tensors, merge)[0]

    def _broadcast(self, tensor: Tensor, src: int) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            return copies(shards[src], [shard.device for (shard,) in shards])

        call = Call("broadcast", f"src={src}", layouts_of([tensor]))
        return self._join(call, (tensor,), merge)[0]

    def _split(self, size: int) -> Group:
        return self._connected().part(self.rank, size)


def ordinary(tensor: Tensor) -> Tensor:
    """Outside of inference mode a copy of a tensor made in it, which no graph may hold."""
    if torch.is_inference_mode_enabled() or not tensor.is_inference():
        return tensor
    return tensor.clone()


def copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensors]:
    """New tensors for each device; their gradients are summed in the order of the devices."""
    return [
        tuple(
            # Where it is at home already, `broadcast` shares the storage.
            copy.clone() if copy.device == tensor.device else copy
            for copy, tensor in zip(on_device, tensors, strict=True)
        )
        for on_device in broadcast(tensors, list(devices))
    ]
