"""`ReplicaGroup`: collectives between the replicas of one forward, which run in threads.

The last rank to arrive checks that all calls match and joins the graphs of all ranks by plain
differentiable operations, so no thread waits in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from replication._torch import (
    count_nodes_up_to,
    nodes_made,
    sees_saved_tensors,
    set_grad_modes,
)
from replication.devices import to_device
from replication.errors import ReplicationError
from replication.groups.base import (
    Group,
    Layouts,
    ReduceOp,
    Signature,
    SoloGroup,
    Tensors,
    check_same_call,
    reduce_tensors,
    signature_of,
)
from replication.steps.broadcast import broadcast
from replication.sync.lifecycle import CurrentReplica, calling_replica
from replication.sync.rendezvous import Exchange, Rendezvous, site
from replication.texts import path_or_root

__all__ = ["CallbackContext", "ReplicaGroup"]

T = TypeVar("T")
MessageT = TypeVar("MessageT")
ReplyT = TypeVar("ReplyT")


class CallbackContext:
    """A namespace that the copies of one layer share in one forward: they may set any attribute.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel
    >>> class Greets(nn.Identity):
    ...     def __data_parallel_replicate__(self, ctx, copy_id):
    ...         print(f"copy {copy_id} of {ctx.num_copies} of `{ctx.path}`")
    >>> y = DataParallel(nn.Sequential(Greets()), ["cpu"] * 2)(torch.ones(4))
    copy 0 of 2 of `0`
    copy 1 of 2 of `0`

    Attributes:
        num_copies: Number of copies.
        devices: The device of each copy. None where it is unknown: a copy without tensors in a
            plain `torch.nn.DataParallel`.
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
        # Apart from the attributes above, which copies may set.
        self._communicator = Communicator(rendezvous, path_or_root(path), range(num_copies))

    def group(self, copy_id: int) -> Group:
        """Returns the `Group` of a copy, which connects it to the other copies in this forward.

        For a single copy it is a `SoloGroup`. Call collectives in ``forward``, not in the
        callback.

        Raises:
            IndexError: There is no such copy.
            ReplicationError: The context is a copy, and belongs to no forward.
        """
        return self._communicator.group(copy_id)


class Request(NamedTuple):
    """What a member of a group sends."""

    #: The name and layouts of its `Signature`, which must match on every member.
    call: tuple[str, Layouts]
    message: Any
    #: Returns the answers to all members, given their messages.
    merge: Callable[[list[Any]], Iterable[Any]]
    #: Whether the message requires gradients, and whether the thread is in inference mode.
    requires_grad: bool
    is_inference: bool
    #: The number of autograd nodes that the thread has made.
    nodes: int


# It does not refer to the groups of its members, so that it is freed with the last of them.
class Communicator(Exchange):
    """The state that the members of one group share in one forward.

    The ``rendezvous`` is that of the forward, or None outside a forward: in a context that was
    copied or created by hand.
    """

    def __init__(self, rendezvous: Rendezvous | None, layer: str, replicas: Sequence[int]) -> None:
        is_part = rendezvous is not None and len(replicas) != rendezvous.size
        part = f", replicas {replicas[0]}-{replicas[-1]}" if is_part else ""
        super().__init__(layer + part, replicas)
        self.rendezvous = rendezvous
        self.layer = layer
        self.replicas = replicas
        self._parts: dict[tuple[int, int], Communicator] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.layer, self.replicas)  # a copy belongs to no forward

    def group(self, rank: int) -> Group:
        size = len(self.replicas)
        if rank not in range(size):
            raise IndexError(f"`{self.layer}` has copies 0 to {size - 1} (got copy_id {rank!r})")
        if size == 1:
            return SoloGroup()
        self.live_rendezvous()
        return ReplicaGroup(rank, size, self)

    def live_rendezvous(self) -> Rendezvous:
        if self.rendezvous is None:
            raise ReplicationError(
                f"`{self.layer}`: a CallbackContext and its groups belong to one forward (got one "
                "that was copied or created by hand); use the ctx that is passed to the callback, "
                "or let execute_replication_callbacks make it"
            )
        return self.rendezvous

    def part(self, start: int, stop: int) -> Communicator:
        if (start, stop) not in self._parts:
            part = Communicator(self.rendezvous, self.layer, self.replicas[start:stop])
            self._parts.setdefault((start, stop), part)  # another thread may have been faster
        return self._parts[start, stop]

    def merge(self, requests: list[Request]) -> Iterable[tuple[Any, int]]:
        """Returns the answer to each member, and the number of nodes up to which all count."""
        # The thread of the last member to arrive runs it, perhaps without grad, in inference mode,
        # or with saved-tensor hooks. The answers do not depend on that.
        calls = list(map(attrgetter("call"), requests))
        if calls.count(calls[0]) < len(calls):
            where = site((self.path, self.calls[self.replicas[0]]))
            described = [(call, str(Signature(*call))) for call in calls]
            check_same_call(described, where, self.replicas, "replica")
        grad = any(map(attrgetter("requires_grad"), requests))
        inference = all(map(attrgetter("is_inference"), requests))
        count_nodes_up_to(max(map(attrgetter("nodes"), requests)))
        with ExitStack() as stack:
            set_grad_modes(stack, grad=grad, inference=inference)
            if sees_saved_tensors():
                stack.enter_context(hidden_from_hooks())
            # Made a list in this block, because the function may be a generator.
            answers = list(requests[0].merge(list(map(attrgetter("message"), requests))))
        return zip(answers, repeat(nodes_made() if grad else 0))


def hidden_from_hooks() -> saved_tensors_hooks:
    """Hides what nodes save in a ``with`` block from the hooks on saved tensors around it."""
    # Detached, because a node may save its own output, which refers to the node.
    return saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor._version), _unpacked)


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    """Returns the tensor, and checks its version as torch does where there are no hooks."""
    tensor, version = packed
    if tensor._version != version:  # detached tensors share it with the original
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation after a collective: a tensor of shape {list(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version}"
        )
    return tensor


class ReplicaGroup(Group):
    """The copies of one layer in the replicas of one forward, each in its own thread.

    `CallbackContext.group` makes it. No thread waits in backward, and any subset of the results
    may enter a loss. A tensor without influence on the loss gets no gradient
    (`torch.autograd.grad` needs ``allow_unused``).
    """

    def __init__(self, rank: int, size: int, communicator: Communicator) -> None:
        super().__init__(rank, size)
        self._communicator = communicator
        #: The index of the replica. It differs from the rank in parts (see `Group.split`).
        self._replica = communicator.replicas[rank]

    @property
    def where(self) -> str:
        return f"`{self._communicator.path}`, replica {self._replica}"

    def exchange(
        self,
        name: str,
        message: MessageT,
        merge: Callable[[list[MessageT]], Iterable[ReplyT]],
        *,
        layouts: Layouts = (),
        requires_grad: bool = False,
    ) -> ReplyT:
        """Sends a message and returns the reply. One member computes the replies to all members.

        All collectives are built on it. Layers with their own autograd nodes may also call it.

        Args:
            name: The name of the call in messages. It must match on every member.
            message: Any object.
            merge: Returns the replies by rank, given the messages by rank. The function of rank 0
                is called, in the thread of the last member to arrive.
            layouts: Dtypes and shapes that must match on every member. Leave out what may differ.
            requires_grad: Whether the message holds a tensor that requires gradients. If it is
                true on any member, ``merge`` runs with grad enabled.

        Raises:
            ReplicationError: As `Group`. Also if no other member could answer the call.
        """
        communicator, replica = self._communicator, self._replica
        try:
            caller = calling_replica(f"`{communicator.path}`: {name}")
        except ReplicationError:
            self._check_lives(name)
            raise
        rendezvous = caller.rendezvous
        if rendezvous is not communicator.rendezvous or caller.replica != replica or caller.path:
            raise self._refusal(name, caller)
        request = Request(
            call=(name, layouts),
            message=message,
            merge=merge,
            requires_grad=requires_grad,
            is_inference=torch.is_inference_mode_enabled(),
            nodes=nodes_made() if requires_grad else 0,
        )
        # The engine runs the nodes with the highest numbers first. All members count up to one
        # number, so that their order does not depend on who has merged.
        answer, nodes = communicator(rendezvous, replica, request)
        count_nodes_up_to(nodes)
        return answer  # type: ignore[no-any-return]

    def _check_lives(self, name: str) -> None:
        """Raises if the forward to which this group belongs has ended."""
        if self._communicator.live_rendezvous().has_ended(self._replica):
            raise ReplicationError(
                f"{self.where}: {name} of a group whose forward has ended; read self.group in "
                "each forward, call no collectives in hooks or custom backwards, and leave the "
                "layer out of activation checkpoints"
            ) from None

    def _refusal(self, name: str, caller: CurrentReplica) -> ReplicationError:
        """The error of a call that no other member could answer."""
        self._check_lives(name)
        if caller.path:  # a callback runs
            text = (
                f"{name} in a replication callback; callbacks run one after the other, so that "
                "no other copy can answer: call collectives in forward"
            )
        else:
            text = (
                f"replica {caller.replica} calls {name} of the group of copy {self._replica}; "
                "pass ctx.group the copy_id that the callback receives, and read self.group in "
                "each forward"
            )
        return ReplicationError(f"{self.where}: {text}")

    def _run(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        merge, grad_enabled = _MERGES[name], torch.is_grad_enabled()
        if not grad_enabled:  # the results are constants
            tensors = tuple(tensor.detach() for tensor in tensors)
        signature = signature_of(name, tensors, option)
        results: Tensors = self.exchange(
            signature.name,
            tensors,
            partial(merge, **option),
            layouts=signature.layouts,
            requires_grad=any(tensor.requires_grad for tensor in tensors),
        )
        return results if grad_enabled else tuple(result.detach() for result in results)

    def barrier(self) -> None:
        self.exchange("barrier", None, lambda messages: messages)

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns the objects of all members themselves, in the order of their ranks."""
        return self.exchange("all_gather_object", obj, lambda sent: [tuple(sent)] * len(sent))

    def _part(self, size: int) -> Group:
        start = self.rank - self.rank % size
        return self._communicator.part(start, start + size).group(self.rank - start)


def copy_to_each(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensors]:
    """Copies tensors to each device. Gradients are summed in the order of the devices."""
    return [
        tuple(
            # On the tensor's own device, `broadcast` shares the storage.
            copy.clone() if copy.device == tensor.device else copy
            for copy, tensor in zip(on_device, tensors, strict=True)
        )
        for on_device in broadcast(tensors, list(devices))
    ]


# -- merges: the results of all members, given the tensors of all members ----------------------

# Each result is on the device of its member, in separate memory: `to_device` may return its
# argument.


def _all_reduce(members: list[Tensors], op: ReduceOp) -> list[Tensors]:
    first_device = members[0][0].device
    total = reduce_tensors([to_device(tensor, first_device) for (tensor,) in members], op)
    return copy_to_each([total], [tensor.device for (tensor,) in members])


def _all_gather(members: list[Tensors], same_shape: bool = False) -> list[Tensors]:
    tensors = [tensor for (tensor,) in members]
    return copy_to_each(tensors, [tensor.device for tensor in tensors])


def _reduce_scatter(members: list[Tensors], op: ReduceOp) -> Iterable[Tensors]:
    # Part i of every member is for member i, and goes to its device.
    for own, parts in zip(members, zip(*members, strict=True), strict=True):
        yield (reduce_tensors([to_device(part, own[0].device) for part in parts], op),)


def _broadcast(members: list[Tensors], src: int) -> list[Tensors]:
    return copy_to_each(members[src], [tensor.device for (tensor,) in members])


_MERGES: dict[str, Callable[..., Iterable[Tensors]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}
