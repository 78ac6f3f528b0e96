"""`ReplicaGroup`: collectives between the replicas of one forward, which run in threads.

    rank i       call, tensors ─▶ the pipe of the group's first member, which checks that all calls
                                  are alike and joins the graphs by plain differentiable operations
                 result i      ◀─

A backward through the result is one through a single graph: no thread waits in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from replication.devices import to_device
from replication.group import Call, Group, ReduceOp, SoloGroup, check_alike, layouts, reduced
from replication.pipe import connect
from replication.rendezvous import Rendezvous, ReplicationError, Site, here
from replication.replicate import broadcast

__all__ = ["ReplicaGroup"]

T = TypeVar("T")
MessageT = TypeVar("MessageT")
ReplyT = TypeVar("ReplyT")

#: The tensors of one member.
Tensors = tuple[Tensor, ...]


class Request(NamedTuple):
    """What a member sends to the first one."""

    call: Call
    message: Any
    #: Makes of the messages of all members, by rank, the replies to them.
    merge: Callable[[list[Any]], Iterable[Any]]
    requires_grad: bool


class Circle:
    """What the members of one group share in one forward."""

    def __init__(self, rendezvous: Rendezvous, layer: str, replicas: Sequence[int]) -> None:
        self.rendezvous = rendezvous
        self.layer = layer
        #: The replica that each member is.
        self.replicas = tuple(replicas)
        is_part = len(replicas) != rendezvous.size
        #: For messages.
        self.path = f"{layer}, replicas {replicas[0]}-{replicas[-1]}" if is_part else layer
        self._calls = 0
        self._lock = threading.Lock()
        self._parts: dict[int, list[Group]] = {}

    def answer(self, requests: Sequence[tuple[int, Request]]) -> Iterable[tuple[int, Any]]:
        """The callback of the pipe's master."""
        self._calls += 1
        calls = [request.call for _, request in requests]
        check_alike(calls, str(Site(self.path, self._calls)), self.replicas, "replica")
        requires_grad = any(request.requires_grad for _, request in requests)
        # The first member may run without grad, or behind hooks on saved tensors; the others need
        # the graph all the same.
        with (
            torch.inference_mode(torch.is_inference_mode_enabled() and not requires_grad),
            torch.set_grad_enabled(requires_grad),
            saved_tensors_hooks(_packed, _unpacked),
        ):
            replies = requests[0][1].merge([request.message for _, request in requests])
            return list(enumerate(replies))

    def parts(self, size: int) -> list[Group]:
        """For each member the group of its part, all parts but the last of this size."""
        with self._lock:
            if size not in self._parts:
                self._parts[size] = [
                    member
                    for start in range(0, len(self.replicas), size)
                    for member in replica_groups(
                        self.rendezvous, self.layer, self.replicas[start : start + size]
                    )
                ]
            return self._parts[size]


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


def replica_groups(rendezvous: Rendezvous, layer: str, replicas: Sequence[int]) -> list[Group]:
    """Makes a group of some replicas of a forward: each member's end of it.

    Args:
        rendezvous: That of the forward.
        layer: The path of the layer that talks, for messages.
        replicas: Their numbers.
    """
    if len(replicas) == 1:
        return [SoloGroup()]
    circle = Circle(rendezvous, layer, replicas)
    ends = connect(circle.answer, rendezvous, circle.path, replicas)
    return [ReplicaGroup(rank, len(replicas), circle, end) for rank, end in enumerate(ends)]


class ReplicaGroup(Group):
    """The copies of one layer in the replicas of one forward, each in a thread of its own.

    Made by `CallbackContext.group`, for one forward only.

    Nobody waits in backward, and any subset of the results may enter a loss. A tensor that has no
    influence on it gets no gradient (`torch.autograd.grad` needs ``allow_unused``).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        circle: Circle | None = None,
        send: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._circle = circle
        self._send = send

    def __reduce__(self) -> tuple[type[ReplicaGroup], tuple[int, int]]:
        return type(self), (self.rank, self.size)  # a copy belongs to no forward

    def _where(self) -> str:
        if self._circle is None:
            return super()._where()
        return f"`{self._circle.path}`, replica {self._circle.replicas[self.rank]}"

    def exchange(
        self,
        call: Call,
        message: MessageT,
        merge: Callable[[list[MessageT]], Iterable[ReplyT]],
        requires_grad: bool = False,
    ) -> ReplyT:
        """Sends a message; the first member makes of those of all members the replies to them.

        What the collectives consist of, and layers with graph nodes of their own.

        Args:
            call: Must be alike in all members.
            message: Anything.
            merge: Called in the first member's thread with the messages by rank; returns the
                replies by rank.
            requires_grad: Whether the message holds a tensor that does; ``merge`` runs with grad
                enabled if one of the members says so.

        Raises:
            ReplicationError: As `Group`; and if it is called where it cannot be answered.
        """
        self._check_use(call.name)
        return self._send(Request(call, message, merge, requires_grad))  # type: ignore[no-any-return, misc]

    def _check_use(self, name: str) -> None:
        circle, place = self._connected(), here()
        own = circle.replicas[self.rank]
        if place is not None and place.rendezvous is circle.rendezvous:
            if place.path:
                raise ReplicationError(
                    f"{self._where()}: {name} in a replication callback; callbacks run one after "
                    "the other, so that no other copy can answer: call collectives in forward"
                )
            if place.replica != own:
                raise ReplicationError(
                    f"{self._where()}: replica {place.replica} calls {name} of the group of copy "
                    f"{own}; ctx.group takes the copy_id that the callback has been called with"
                )
        elif circle.rendezvous.has_left(own):
            raise ReplicationError(
                f"{self._where()}: {name} outside the forward that the group is of, which has "
                "ended (in backward, say, or in a recomputation); take the group anew in each "
                "forward"
            )

    def _connected(self) -> Circle:
        if self._circle is None:
            raise ReplicationError(
                f"{self._where()} is a copy and belongs to no forward; only the replicas' own "
                "groups are connected"
            )
        return self._circle

    def _join(
        self, call: Call, tensors: Tensors, merge: Callable[[list[Tensors]], Iterable[Tensors]]
    ) -> Tensors:
        """`exchange` of tensors."""
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled:
            tensors = tuple(tensor.detach() for tensor in tensors)
        requires_grad = any(tensor.requires_grad for tensor in tensors)
        results = self.exchange(call, tensors, merge, requires_grad)
        return results if grad_enabled else tuple(result.detach() for result in results)

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self.exchange(Call("barrier"), None, lambda messages: messages)

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns the objects of all members themselves, in the order of their ranks."""
        call = Call("all_gather_object")
        return self.exchange(call, obj, lambda objects: [tuple(objects)] * len(objects))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            tensors = [shard for (shard,) in shards]
            home = tensors[0].device
            total = reduced([to_device(t, home) for t in tensors], op)
            return copies([total], [t.device for t in tensors])

        call = Call("all_reduce", f"op={op!r}", layouts([tensor]))
        return self._join(call, (tensor,), merge)[0]

    def _all_gather(self, tensor: Tensor) -> Tensors:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            tensors = [shard for (shard,) in shards]
            return copies(tensors, [t.device for t in tensors])

        call = Call("all_gather", "", layouts([tensor]), any_length=True)
        return self._join(call, (tensor,), merge)

    def _reduce_scatter(self, tensors: Tensors, op: ReduceOp) -> Tensor:
        def merge(lists: list[Tensors]) -> Iterable[Tensors]:
            for parts, own in zip(zip(*lists, strict=True), lists, strict=True):
                yield (reduced([to_device(part, own[0].device) for part in parts], op),)

        call = Call("reduce_scatter", f"op={op!r}", layouts(tensors))
        return self._join(call, tensors, merge)[0]

    def _broadcast(self, tensor: Tensor, src: int) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            return copies(shards[src], [shard.device for (shard,) in shards])

        call = Call("broadcast", f"src={src}", layouts([tensor]))
        return self._join(call, (tensor,), merge)[0]

    def _split(self, size: int) -> Group:
        return self._connected().parts(size)[self.rank]


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
