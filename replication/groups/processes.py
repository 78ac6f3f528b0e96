"""`ProcessGroup`: collectives between processes, built on `torch.distributed`.

Each call of a rank is a `Collective`, by which the ranks notice that their calls do not match.

Derivatives are collectives as well. Four collectives have derivatives, which consist of the same
four, and all others are built on them:

=============  ====================================  ===========================================
collective     what a rank gets                      derivative
=============  ====================================  ===========================================
`_sum`         the sum over all ranks                `_sum`
`_stack`       the tensors of all ranks              `_all_to_all`, whose parts are then added
`_all_to_all`  the parts that all ranks send to it   `_all_to_all`, which sends the parts back
`_broadcast`   the tensor of the rank ``src``        `_sum`, then zeros on all ranks but ``src``
=============  ====================================  ===========================================
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from replication._torch import (
    all_reduce_in_place,
    gathered,
    is_exporting,
    is_usable,
    uncompiled,
    wait_for_all,
)
from replication.devices import current_stream, use_device
from replication.groups.base import (
    Group,
    ReduceOp,
    Signature,
    SoloGroup,
    Tensors,
    WithDerivative,
    layouts_of,
    may_overflow,
    reduce_tensors,
    signature_of,
)
from replication.groups.collective import Collective
from replication.groups.graphs import run_in_graph, stays_in_graph
from replication.groups.registry import as_process_group, check_usable, part_of, state_of, world
from replication.warning import once_for, warn

__all__ = ["ProcessGroup"]

P = ParamSpec("P")
T = TypeVar("T")


def breaks_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Excludes a method of `ProcessGroup` from `torch.compile`. The first such call warns."""

    @uncompiled
    def call_and_warn(*args: P.args, **kwargs: P.kwargs) -> T:
        if once_for(function):
            name = args[1] if function.__name__ == "_run_now" else function.__name__
            warn(
                f"{name} between processes breaks the graph of torch.compile. Sums, means, "
                "extremes, broadcasts, and all_gather with same_shape=True stay in it, in "
                "floating-point and int32 or int64 numbers, from torch 2.13 on"
            )
        return function(*args, **kwargs)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        compiles = torch.compiler.is_dynamo_compiling()
        return (call_and_warn if compiles else function)(*args, **kwargs)

    return call


#: Vectors of one number, by the number and the dtype.
_numbers: dict[tuple[int, torch.dtype], Tensor] = {}


def _on_host(number: int, dtype: torch.dtype) -> Tensor:
    """A vector of one number, which takes longer to make than to look up."""
    vector = _numbers.get((number, dtype))
    if vector is None:
        with torch.inference_mode(False):
            vector = torch.full((1,), number, dtype=dtype, device="cpu")
        if type(vector) is Tensor and len(_numbers) < 1000:  # a fake tensor has no number
            _numbers[number, dtype] = vector
    return vector


#: Up to this many ranks and bytes per rank, gathering a vector is faster than reducing it.
_FEW_RANKS, _FEW_BYTES = 8, 64 * 1024


def _added_on_host(vector: Tensor, process_group: Any) -> Tensor:
    """Returns the sum of vectors of all ranks, in the order of the ranks or in place."""
    # A ring of n ranks reduces in 2 (n - 1) steps and gathers in n - 1. So on gloo, with few ranks
    # and short vectors, steps of networks of small layers take 7 % less time with 2 ranks, and
    # 24 % less with 4. All ranks make the same choice, since it depends on what matches on all.
    if vector.nbytes <= _FEW_BYTES and process_group.size() <= _FEW_RANKS:
        return gathered(vector, process_group).sum(0)
    all_reduce_in_place(vector, process_group)
    return vector


class ProcessGroup(Group):
    """The processes of a group of `torch.distributed`, on any backend (gloo, NCCL, ...).

    A backward through a result is also a collective: all ranks must run it, in the same order. If
    the loss of a rank does not use its results, multiply them by 0.0 and add them to the loss.
    Tensors must require gradients on all ranks or on none.

    Calls of the ranks that do not match are named by `all_gather` and `all_gather_object`, which
    exchange lengths first (with ``same_shape`` they don't). Other mismatches are left to the
    backend, unless ``TORCH_DISTRIBUTED_DEBUG`` is ``INFO`` in the environment. Then the ranks
    compare each call before they make it.

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
        ReplicationError: The group is destroyed.
        NotImplementedError: See `Group`.
    """

    #: Numbers the calls, those of all layers in the group. None before the first.
    _calls: Iterator[int] | None = None

    def __init__(self, process_group: Any = None, name: str = "ProcessGroup") -> None:
        used = as_process_group(process_group) or world()
        if used is None:
            raise RuntimeError(
                "torch.distributed is not initialized; call init_process_group, or use a SoloGroup"
            )
        check_usable(used, name)
        super().__init__(used.rank(), used.size())
        self.name = name
        # Graphs refer to this object. A loss that outlives the script must not keep the threads of
        # a destroyed group alive.
        self._process_group = ref(used)

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return self  # a copy of a layer communicates with the same ranks

    @property
    def process_group(self) -> Any:
        """The group of `torch.distributed`, or ReplicationError if it is destroyed."""
        process_group = self._process_group()
        if not is_usable(process_group):
            check_usable(process_group, self.name)  # which says why
        return process_group

    @property
    def where(self) -> str:
        return f"`{self.name}`, rank {self.rank}"

    def _collective(self, signature: Signature) -> Collective:
        process_group, calls = self.process_group, self._calls
        if calls is None:
            calls = self._calls = state_of(process_group).calls
        # A lock would not help: calls in several threads at once would match in no order.
        return Collective(process_group, self.name, signature, next(calls))

    # -- for layers that have their own autograd nodes -----------------------------------------

    def refuse_exports(self) -> None:
        """Raises RuntimeError in an export or trace, which would hold what other ranks sent."""
        if is_exporting():
            raise RuntimeError(
                f"`{self.name}`: calls between processes cannot be exported or traced; export the "
                "network in eval()"
            )

    # On the host, one number more in the vector compares the calls. On accelerators the host would
    # have to wait for it.

    def gather(self, signature: Signature, *parts: Tensor) -> Sequence[Tensor]:
        """Stacks vectors of each rank, which travel as one, to ``(size, n)`` each.

        They have no derivatives.

        Raises:
            ReplicasDiverged: The calls differ. Not on accelerators.
        """
        lengths = tuple(map(Tensor.numel, parts))  # in C, as each call of Python shows on GPUs
        with self._collective(signature) as call:
            if not parts[0].is_cpu:
                rows = gathered(torch.cat(parts), call.process_group)
                return rows.split_with_sizes(lengths, 1)
            vector = torch.cat((*parts, _on_host(call.number, parts[0].dtype)))
            rows = gathered(vector, call.process_group)
            *stacked, numbers = rows.split_with_sizes((*lengths, 1), 1)
            call.check(numbers.view(-1).tolist())
            return stacked

    def add(self, signature: Signature, *parts: Tensor) -> Sequence[Tensor]:
        """Adds vectors of each rank, which travel as one.

        The sums have no derivatives (see `sum`).

        Raises:
            ReplicasDiverged: The calls differ. Not on accelerators.
        """
        lengths = tuple(map(Tensor.numel, parts))  # in C, as each call of Python shows on GPUs
        with self._collective(signature) as call:
            if not parts[0].is_cpu:
                vector = torch.cat(parts)
                all_reduce_in_place(vector, call.process_group)
                return vector.split_with_sizes(lengths)
            number = call.number
            vector = torch.cat((*parts, _on_host(number, parts[0].dtype)))
            vector = _added_on_host(vector, call.process_group)
            *sums, total = vector.split_with_sizes((*lengths, 1))
            if total.item() != number * self.size:
                call.compare_lengths()
            return sums

    def sum(self, signature: Signature, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks, which has derivatives of any order."""
        with self._collective(signature) as call:
            return self._sum(call, tensor)

    # -- collectives ---------------------------------------------------------------------------

    @breaks_graphs
    def barrier(self) -> None:
        with self._collective(Signature("barrier")) as call:
            wait_for_all(call.process_group)

    @breaks_graphs
    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns pickled copies of the objects of all members, in the order of their ranks.

        Unpickling can run any code, so call this only if you trust every process of the group. No
        other collective unpickles anything.
        """
        # `torch.distributed.all_gather_object` needs NumPy.
        data = pickle.dumps(obj)
        with self._collective(Signature("all_gather_object")) as call:
            parts = call.gather_bytes(data, call.compare_lengths(len(data)))
        return tuple(map(pickle.loads, parts))

    def _run(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        self.refuse_exports()
        if torch.compiler.is_dynamo_compiling() and stays_in_graph(name, tensors, **option):
            members = self.process_group.group_name, self.rank, self.size
            return run_in_graph(name, tensors[0], members, **option)
        return self._run_now(name, tensors, **option)

    @breaks_graphs
    def _run_now(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        """Runs the method of the name: `_all_reduce`, for example."""
        requires_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        signature = signature_of(name, tensors, option)._replace(requires_grad=requires_grad)
        device = tensors[0].device
        with ExitStack() as stack:
            # With NCCL the headers of compared calls travel through the current device.
            use_device(stack, device, current_stream(device))
            # Nested in the stack: `ExitStack` rewrites `__context__` of an interrupt that arrives
            # while it closes.
            with self._collective(signature) as call:
                return getattr(self, f"_{name}")(call, *tensors, **option)  # type: ignore[no-any-return]

    def _all_reduce(self, call: Collective, tensor: Tensor, op: ReduceOp) -> Tensors:
        if op == "mean" and may_overflow(tensor):
            return (self._sum(call, tensor / self.size),)
        if op in ("sum", "mean"):
            total = self._sum(call, tensor)
            return (total / self.size if op == "mean" else total,)
        return (reduce_tensors(self._stack(call, tensor).unbind(), op),)

    def _all_gather(self, call: Collective, tensor: Tensor, same_shape: bool = False) -> Tensors:
        if same_shape:
            return tuple(row.clone() for row in self._stack(call, tensor))
        lengths = call.compare_lengths(len(tensor) if tensor.dim() else 0)
        shapes = [(n, *tensor.shape[1:]) if tensor.dim() else () for n in lengths]
        sizes = [prod(shape) for shape in shapes]
        values = tensor.reshape(-1)
        if len(values) < max(sizes):  # backends need the same shape on all ranks
            # `pad` keeps an empty vector in the graph. `torch.cat` drops it, so this rank would
            # skip the backward that others wait in.
            values = pad(values, [0, max(sizes) - len(values)])
        rows = zip(self._stack(call, values), sizes, shapes, strict=True)
        return tuple(row[:size].view(shape).clone() for row, size, shape in rows)

    def _reduce_scatter(self, call: Collective, *tensors: Tensor, op: ReduceOp) -> Tensors:
        mine = tensors[self.rank]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sent, received = [tensor.numel() for tensor in tensors], [mine.numel()] * self.size
        parts = self._all_to_all(call, flat, sent=sent, received=received)
        parts = parts.view(self.size, *mine.shape)
        return (reduce_tensors(parts.unbind(), op),)

    def _broadcast(self, call: Collective, tensor: Tensor, src: int) -> Tensors:
        def from_source(tensor: Tensor) -> Tensor:
            received = tensor.clone(memory_format=torch.contiguous_format)
            # Older releases of torch leave complex numbers to the backend, which may refuse them.
            real = torch.view_as_real(received) if received.is_complex() else received
            source = distributed.get_global_rank(call.process_group, src)
            distributed.broadcast(real, source, call.process_group)
            return received

        def to_source(backward_call: Collective, grad: Tensor) -> Tensor:
            total = self._sum(backward_call, grad)
            # Other ranks get zeros in the graph, because all take part in the second derivative.
            return total.masked_fill(total.new_full((), self.rank != src, dtype=torch.bool), 0)

        return (self._differentiable(call, from_source, to_source, tensor),)

    # -- the others that have derivatives ------------------------------------------------------

    def _sum(self, call: Collective, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks."""

        def total_of(tensor: Tensor) -> Tensor:
            total = tensor.clone(memory_format=torch.contiguous_format)
            all_reduce_in_place(total, call.process_group)
            return total

        return self._differentiable(call, total_of, self._sum, tensor)

    def _stack(self, call: Collective, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, which have the same shape, to ``(size, ...)``."""

        def stacked(tensor: Tensor) -> Tensor:
            values = tensor.resolve_conj().resolve_neg().contiguous()
            values = values.view(torch.uint8) if values.dtype is torch.bool else values
            return gathered(values, call.process_group).view(tensor.dtype)

        def to_owners(backward_call: Collective, grad: Tensor) -> Tensor:
            return self._reduce_scatter(backward_call, *grad, op="sum")[0]

        return self._differentiable(call, stacked, to_owners, tensor)

    def _all_to_all(
        self, call: Collective, tensor: Tensor, *, sent: list[int], received: list[int]
    ) -> Tensor:
        """Sends ``sent[i]`` values of a vector to rank i, and returns ``received[i]`` from it."""

        def exchanged(tensor: Tensor) -> Tensor:
            result = tensor.new_empty(sum(received))
            # Nothing on all ranks or on none, so that no rank skips the call alone.
            if tensor.numel() or result.numel():
                tensor = tensor.resolve_conj().contiguous()
                distributed.all_to_all_single(result, tensor, received, sent, call.process_group)
            return result

        back = partial(self._all_to_all, sent=received, received=sent)
        return self._differentiable(call, exchanged, back, tensor)

    def _differentiable(
        self,
        call: Collective,
        collective: Callable[[Tensor], Tensor],
        derivative: Callable[[Collective, Tensor], Tensor],
        tensor: Tensor,
    ) -> Tensor:
        """Runs a collective in an autograd graph. Its backward is a separate call."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return collective(tensor)
        # Derivatives of any order have one name, without arguments.
        name = f"{call.signature.name.partition('(')[0].removesuffix('_backward')}_backward"

        def backward(grad: Tensor) -> Tensor:
            signature = Signature(name, layouts_of([grad], any_length=True))
            with self._collective(signature) as backward_call:
                return derivative(backward_call, grad)

        return WithDerivative.apply(collective, backward, tensor)  # type: ignore[no-any-return, no-untyped-call]

    # -- parts ---------------------------------------------------------------------------------

    @uncompiled
    def _part(self, size: int) -> Group:
        if size == 1:  # no collective, because perhaps only some ranks run this layer
            return SoloGroup()
        process_group, start = part_of(self.process_group, size), self.rank - self.rank % size
        last = start + process_group.size() - 1
        name = f"{self.name}, ranks {start}-{last}"
        return SoloGroup() if start == last else ProcessGroup(process_group, name)


def process_group_of(process_group: Any, name: str) -> ProcessGroup | None:
    """Returns the `ProcessGroup` of a layer, or None if no other process is in it.

    It is made at the first call of the layer.
    """
    used = world() if process_group is None else process_group
    if used is None:
        return None
    if process_group is not None:  # the world can be used as long as it is the world
        check_usable(used, name)
    if torch.compiler.is_dynamo_compiling():
        # Made anew: a graph that depends on those kept would be compiled again when they change.
        group = ProcessGroup(used, name)
        return group if group.size > 1 else None
    groups = state_of(used).groups
    if name not in groups:
        groups[name] = ProcessGroup(used, name)
    group = groups[name]
    return group if group.size > 1 else None
