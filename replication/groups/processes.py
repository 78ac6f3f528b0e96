"""`ProcessGroup`: collectives between processes, built on `torch.distributed`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.nn.functional import pad

from replication._torch import (
    all_reduce_in_place,
    is_batched,
    is_usable,
    timeout_of,
    uncompiled,
)
from replication.devices import current_stream, use_device
from replication.errors import ReplicationError
from replication.groups.base import (
    Group,
    ReduceOp,
    Signature,
    SoloGroup,
    Tensors,
    layouts_of,
    reduce_tensors,
    signature_of,
)
from replication.groups.comparison import RankCall, gathered, to_bytes, to_tensor
from replication.groups.registry import as_process_group, state_of

__all__ = ["ProcessGroup"]

T = TypeVar("T")

#: Up to this many ranks and bytes per rank, `ProcessGroup.prefers_gather`.
_FEW_RANKS, _FEW_BYTES = 8, 64 * 1024


class Collective(Function):
    """Runs a collective in an autograd graph. ``derivative`` consists of such collectives."""

    @staticmethod
    def forward(ctx: Any, collective: Any, derivative: Any, tensor: Tensor) -> Tensor:
        ctx.derivative = derivative
        return collective(tensor)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.derivative(grad)


class ProcessGroup(Group):
    """The processes of a group of `torch.distributed`, on any backend (gloo, NCCL, ...).

    A backward through a result is also a collective: all ranks must run it, in the same order. If
    the loss of a rank does not use its results, multiply them by 0.0 and add them to the loss.
    Tensors must require gradients on all ranks or on none.

    Calls of the ranks that do not match are named by `all_gather` and `all_gather_object`, which
    exchange lengths. So they are for tensors on the CPU that have as many bytes on each rank, in a
    maximum, minimum or product, and in sums of up to 64 KiB in groups of up to 8 ranks. Otherwise
    mismatches are left to the backend, unless ``TORCH_DISTRIBUTED_DEBUG`` is ``INFO`` or
    ``DETAIL`` in the environment.

    >>> import torch
    >>> from torch import distributed
    >>> from replication import ProcessGroup
    >>> distributed.init_process_group(
    ...     "gloo", store=distributed.HashStore(), rank=0, world_size=1
    ... )  # without arguments under torchrun
    >>> ProcessGroup().all_reduce(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> distributed.destroy_process_group()

    Args:
        process_group: A group of `torch.distributed`, or a `DeviceMesh` of one dimension; by
            default all processes.
        name: The name of the layer, for messages.

    Raises:
        RuntimeError: `torch.distributed` is not initialized.
        TypeError: ``process_group`` is neither a group nor a mesh.
        ValueError: This process is not in ``process_group``, or the mesh has several dimensions.
        ReplicationError: The group is destroyed, or a backward batches gradients
            (``is_grads_batched=True``).
        NotImplementedError: See `Group`.
    """

    def __init__(self, process_group: Any = None, name: str = "ProcessGroup") -> None:
        if process_group is None:
            process_group = distributed.group.WORLD if distributed.is_available() else None
            if process_group is None:
                raise RuntimeError(
                    "torch.distributed is not initialized; call init_process_group, or use a "
                    "SoloGroup"
                )
        else:
            process_group = as_process_group(process_group)
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"`{name}`: process_group must contain this process")
        self._name = name
        # Graphs refer to this object. A loss that outlives the script must not keep the threads of
        # a destroyed group alive.
        self._process_group = ref(process_group)
        used = self.process_group  # raises if it is destroyed
        super().__init__(used.rank(), used.size())

    @property
    def process_group(self) -> Any:
        """The group of `torch.distributed`, or ReplicationError if it is destroyed."""
        process_group = self._process_group()
        if process_group is None or not is_usable(process_group):  # a destroyed group may live on
            raise ReplicationError(
                f"`{self._name}`: the process group has been destroyed; call "
                "torch.distributed.destroy_process_group after the last forward and backward that "
                "use it, and set another process_group, or None, in layers that stay in use"
            )
        return process_group

    @property
    def where(self) -> str:
        return f"`{self._name}`, rank {self.rank}"

    def _running(self, call: Signature) -> RankCall:
        return RankCall(self.process_group, self._name, call)

    def _differentiable(
        self,
        call: RankCall,
        collective: Callable[[Tensor], Tensor],
        derivative: Callable[[RankCall, Tensor], Tensor],
        tensor: Tensor,
    ) -> Tensor:
        """Runs a collective in an autograd graph. Its backward is a separate call."""
        _refuse_batched(tensor)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return collective(tensor)
        # Derivatives of any order have one name, without arguments.
        name = f"{call.call.name.partition('(')[0].removesuffix('_backward')}_backward"

        def backward(grad: Tensor) -> Tensor:
            with self._running(Signature(name, layouts_of([grad], any_length=True))) as call:
                return derivative(call, grad)

        return Collective.apply(collective, backward, tensor)  # type: ignore[no-any-return, no-untyped-call]

    # -- collectives ---------------------------------------------------------------------------

    @uncompiled
    def barrier(self) -> None:
        with self._running(Signature("barrier")) as call:
            distributed.barrier(call.process_group)

    @uncompiled
    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns pickled copies of the objects of all members, in the order of their ranks.

        Unpickling can run any code, so call this only if you trust every process of the group. No
        other collective unpickles anything.
        """
        # Not torch.distributed.all_gather_object, which needs NumPy.
        data = to_tensor(pickle.dumps(obj), self.process_group)
        with self._running(Signature("all_gather_object")) as call:
            parts = self._all_gather(call, data)
        return tuple(pickle.loads(to_bytes(part)) for part in parts)

    def gather_vectors(self, call: Signature, *vectors: Tensor) -> Sequence[Tensor]:
        """Stacks each of some vectors of all ranks, ``(size, length)``, without a derivative.

        It is for layers with autograd nodes of their own. The vectors travel as one.
        """
        with self._running(call) as running:
            return self._gathered(running, *vectors)

    def sum_vector(self, call: Signature, vector: Tensor) -> Tensor:
        """Adds a vector of all ranks, in place if it needs no derivative."""
        with self._running(call) as running:
            if vector.requires_grad or is_batched(vector):
                return self._sum(running, vector)
            if self.prefers_gather(vector):
                return self._gathered(running, vector)[0].sum(0)
            all_reduce_in_place(vector, running.process_group)
            return vector

    def prefers_gather(self, *tensors: Tensor) -> bool:
        """Whether it is faster to sum by gathering all tensors and adding them on each rank."""
        # A ring of n ranks reduces in 2 (n - 1) steps and gathers in n - 1. With few ranks and
        # short tensors gathering wins: on gloo by 25 % for 2 ranks and by 40 % for 8. NCCL picks
        # its own algorithm. The answer depends only on what matches on all ranks, so all choose
        # the same way.
        return (
            self.size <= _FEW_RANKS
            and tensors[0].is_cpu
            and sum([tensor.nbytes for tensor in tensors]) <= _FEW_BYTES
        )

    @uncompiled
    def _run(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        """Runs the method of the name: `_all_reduce`, for example."""
        requires_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        call = signature_of(name, tensors, option)._replace(requires_grad=requires_grad)
        device = tensors[0].device
        with ExitStack() as stack:
            # With NCCL the headers of compared calls travel through the current device.
            use_device(stack, device, current_stream(device))
            # Not in the stack, which sets attributes of an interrupt that comes while it ends.
            with self._running(call) as running:
                return getattr(self, f"_{name}")(running, *tensors, **option)  # type: ignore[no-any-return]

    def _all_reduce(self, call: RankCall, tensor: Tensor, op: ReduceOp) -> Tensors:
        if op == "mean" and tensor.dtype is torch.float16:  # a sum may overflow
            return (self._sum(call, tensor / self.size),)
        if op in ("sum", "mean"):
            total = self._sum(call, tensor)
            return (total / self.size if op == "mean" else total,)
        return (reduce_tensors(self._stack(call, tensor).unbind(), op),)

    def _all_gather(self, call: RankCall, tensor: Tensor) -> Tensors:
        lengths = call.compare(len(tensor) if tensor.dim() else 0)
        shapes = [(n, *tensor.shape[1:]) if tensor.dim() else () for n in lengths]
        sizes = [prod(shape) for shape in shapes]
        values = tensor.reshape(-1)
        if len(values) < max(sizes):  # backends need the same shape on all ranks
            # Not `torch.cat`, which ignores an empty vector, in backward as well.
            values = pad(values, [0, max(sizes) - len(values)])
        rows = zip(self._stack(call, values), sizes, shapes, strict=True)
        return tuple(row[:size].view(shape).clone() for row, size, shape in rows)

    def _reduce_scatter(self, call: RankCall, *tensors: Tensor, op: ReduceOp) -> Tensors:
        mine = tensors[self.rank]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sent, received = [tensor.numel() for tensor in tensors], [mine.numel()] * self.size
        parts = self._send_values(sent, received, call, flat).view(self.size, *mine.shape)
        return (reduce_tensors(parts.unbind(), op),)

    def _broadcast(self, call: RankCall, tensor: Tensor, src: int) -> Tensors:
        def from_source(tensor: Tensor) -> Tensor:
            received = tensor.clone(memory_format=torch.contiguous_format)
            # Older releases of torch leave complex numbers to the backend, which may refuse them.
            real = torch.view_as_real(received) if received.is_complex() else received
            distributed.broadcast(real, self._global_rank(src), call.process_group)
            return received

        def to_source(call: RankCall, grad: Tensor) -> Tensor:
            total = self._sum(call, grad)
            # Other ranks get zeros in the graph, because all take part in the second derivative.
            return total.masked_fill(total.new_full((), self.rank != src, dtype=torch.bool), 0)

        return (self._differentiable(call, from_source, to_source, tensor),)

    def _sum(self, call: RankCall, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks, whose derivative is the sum of the gradients."""

        def sum_of_ranks(tensor: Tensor) -> Tensor:
            if self.prefers_gather(tensor):
                return reduce_tensors(self._stacked(call, tensor).unbind(), "sum")
            total = tensor.clone(memory_format=torch.contiguous_format)
            all_reduce_in_place(total, call.process_group)
            return total

        return self._differentiable(call, sum_of_ranks, self._sum, tensor)

    def _stack(self, call: RankCall, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, which have the same shape, to ``(size, ...)``."""

        def to_owners(call: RankCall, grad: Tensor) -> Tensor:
            return self._reduce_scatter(call, *grad, op="sum")[0]

        return self._differentiable(call, partial(self._stacked, call), to_owners, tensor)

    def _stacked(self, call: RankCall, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, without a derivative."""
        values = tensor.resolve_conj().resolve_neg().reshape(-1)
        values = values.view(torch.uint8) if values.dtype is torch.bool else values
        (rows,) = self._gathered(call, values)
        return rows.view(tensor.dtype).view(self.size, *tensor.shape)

    def _gathered(self, call: RankCall, *vectors: Tensor) -> Sequence[Tensor]:
        """Stacks each of some vectors of all ranks, which travel as one. Compares the call.

        Not if they are on accelerators, where the host would wait for the digests.
        """
        first, sizes = vectors[0], [vector.numel() for vector in vectors]
        has_digest = first.is_cpu and not call.is_compared
        if has_digest:
            digest = torch.tensor(call.digest, dtype=torch.float64, device="cpu")
            if first.dtype != torch.float64:  # which can hold the numbers themselves
                digest = digest.long().view(first.dtype)
            vectors, sizes = (digest, *vectors), [digest.numel(), *sizes]
        vector = torch.cat(vectors) if len(vectors) > 1 else first.contiguous()
        parts = gathered(vector, call.process_group).split_with_sizes(sizes, 1)
        if not has_digest:
            return parts
        digests = parts[0]
        if first.dtype != torch.float64:
            # A single row counts as contiguous, whatever its stride.
            digests = digests.clone(memory_format=torch.contiguous_format).view(torch.int64)
        call.check(digests.tolist())
        return parts[1:]

    def _send_values(
        self, sent: list[int], received: list[int], call: RankCall, tensor: Tensor
    ) -> Tensor:
        """Sends ``sent[i]`` values of a vector to rank i, and returns ``received[i]`` from it."""

        def exchange(tensor: Tensor) -> Tensor:
            result = tensor.new_empty(sum(received))
            # Nothing on all ranks or on none, so that no rank skips the call alone.
            if tensor.numel() or result.numel():
                tensor = tensor.resolve_conj().contiguous()
                distributed.all_to_all_single(result, tensor, received, sent, call.process_group)
            return result

        way_back = partial(self._send_values, received, sent)
        return self._differentiable(call, exchange, way_back, tensor)

    @uncompiled
    def _part(self, size: int) -> Group:
        if size == 1:  # without a collective: perhaps only some ranks run this layer
            return SoloGroup()
        ranks = range(self.size)
        parts = [ranks[start : start + size] for start in ranks[::size]]
        own = parts[self.rank // size]
        state = state_of(self.process_group)
        with state.lock:
            if size not in state.parts:
                # All processes must make all groups. Processes outside this group do not come
                # here, so its members use local synchronization.
                is_world = self.process_group is distributed.group.WORLD
                made = {
                    part: distributed.new_group(
                        list(map(self._global_rank, part)),
                        timeout=timeout_of(self.process_group),
                        backend=distributed.get_backend(self.process_group),
                        use_local_synchronization=not is_world,
                    )
                    for part in (parts if is_world else [own])
                }
                state.parts[size] = made[own]
        if len(own) == 1:
            return SoloGroup()
        return ProcessGroup(state.parts[size], f"{self._name}, ranks {own[0]}-{own[-1]}")

    def _global_rank(self, rank: int) -> int:
        return distributed.get_global_rank(self.process_group, rank)


def process_group_of(process_group: Any, name: str) -> ProcessGroup:
    """The `ProcessGroup` of a layer, which is made at its first call."""
    used = distributed.group.WORLD if process_group is None else process_group
    groups = state_of(used).groups if is_usable(used) else {}
    group = groups.get(name)
    if group is None:
        group = groups[name] = ProcessGroup(process_group, name)
    return group


def _refuse_batched(tensor: Tensor) -> None:
    if is_batched(tensor):
        raise ReplicationError(
            "collectives between processes take no batched gradients; compute one at a time"
        )
