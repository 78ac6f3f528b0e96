"""`ProcessGroup`: collectives between processes, built on `torch.distributed`."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import string_at
from functools import partial
from hashlib import sha256
from math import prod
from struct import Struct
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from replication._torch import (
    COMPILES_COLLECTIVES,
    device_of_group,
    is_batched,
    named_range,
    timeout_of,
    uncompiled,
)
from replication.devices import current_stream, use_device
from replication.errors import ReplicationError, add_note
from replication.groups.base import (
    Call,
    Group,
    Layouts,
    ReduceOp,
    SoloGroup,
    Tensors,
    check_same_call,
    layouts_of,
    name_of,
    reduce_tensors,
)
from replication.warning import warn

__all__ = ["ProcessGroup"]

T = TypeVar("T")

#: Up to this many ranks and bytes per rank, gloo gathers faster than it reduces (see
#: `ProcessGroup.prefers_gather`).
_FEW_RANKS, _FEW_BYTES = 8, 64 * 1024

#: A header, by which ranks compare their calls: a length, which may differ, the hash of the call's
#: text, and the text, cut if it is too long. It is not a pickle, because unpickling could run any
#: code.
_HEADER = Struct("<q32s472s")

#: The least number of bytes of a tensor with its header, so that tensors of different small sizes
#: arrive whole.
_LEAST_BYTES = 4096

#: A note on errors of a backend.
_REMEDY = (
    "if no other rank failed first (see their logs), some rank did not reach this call: is one in "
    "eval(), compiled where others are not, out of data (see replication.JoinableStep), without a "
    "backward, or in another layer?"
)


# -- the groups of this process -------------------------------------------------------------------


class ProcessGroupState:
    """The number of calls made with a process group, and the groups split from it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: The number of calls, by the name of the layer and whether a backward makes them.
        self.calls: Counter[tuple[str, bool]] = Counter()
        #: The groups made of this one, by the size of the parts.
        self.parts: dict[int, Any] = {}


_states: WeakKeyDictionary[Any, ProcessGroupState] = WeakKeyDictionary()


def state_of(process_group: Any) -> ProcessGroupState:
    """Returns the state of a process group, which lives as long as the group."""
    return _states.setdefault(process_group, ProcessGroupState())


def has_other_processes(process_group: Any = None) -> bool:
    """Whether a group, by default all processes, is more than this process."""
    # Also true if this process is not a member or the group is destroyed: using it raises.
    if process_group is not None:
        return not is_usable(process_group) or distributed.get_world_size(process_group) > 1
    # `torch.compile` looks at this object again, and not at `is_initialized`.
    world = distributed.group.WORLD if distributed.is_available() else None
    return world is not None and world.size() > 1


def is_usable(process_group: Any) -> bool:
    """Whether this process is in a group, and the group is not destroyed."""
    try:
        distributed.get_backend(process_group)
    except (ValueError, TypeError):  # older releases of torch raise TypeError
        return False
    return True


def name_in_graph(process_group: Any) -> str | None:
    """Returns the name of a group, by default all processes, in operators of a compiled graph.

    None if this process cannot use the group, or if the release of torch cannot keep collectives
    in a graph.
    """
    process_group = distributed.group.WORLD if process_group is None else process_group
    is_usable_here = COMPILES_COLLECTIVES and is_usable(process_group)
    return process_group.group_name if is_usable_here else None


def as_process_group(value: Any) -> Any:
    """Returns a group of `torch.distributed`, that of a mesh of one dimension, or None."""
    if isinstance(value, DeviceMesh):
        if value.ndim > 1:
            raise ValueError(
                f"process_group must be one dimension of a mesh (got {value.ndim}); pass the one "
                "that splits the batch, such as mesh['dp'], or None if all dimensions do"
            )
        return value.get_group()
    is_group = distributed.is_available() and (
        isinstance(value, distributed.ProcessGroup)
        or value is distributed.GroupMember.NON_GROUP_MEMBER
    )
    if value is not None and not is_group:
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, a DeviceMesh of one "
            f"dimension, or None (got {type(value).__name__})"
        )
    return value


class ProcessGroupHandle:
    """A process group of a layer. Copies of the layer keep it, and pickling drops it."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> ProcessGroupHandle:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        warn("a process_group is not pickled with a layer; set it where the layer is loaded")
        return type(None), ()  # loaded as None


# -- the group ------------------------------------------------------------------------------------


class Collective(Function):
    """Runs a collective in an autograd graph. ``derivative`` consists of such collectives."""

    @staticmethod
    def forward(ctx: Any, collective: Any, derivative: Any, tensor: Tensor) -> Tensor:
        ctx.derivative = derivative
        return collective(tensor)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.derivative(grad)


class Begun(NamedTuple):
    """A call that this rank has begun."""

    #: The name for messages, also of its derivatives.
    name: str
    #: The text by which ranks compare the call, if they have not done so.
    text: str = ""


class ProcessGroup(Group):
    """The processes of a group of `torch.distributed`, on any backend (gloo, NCCL, ...).

    A backward through a result is also a collective: all ranks must run it, in the same order. If
    the loss of a rank does not use its results, multiply them by 0.0 and add them to the loss.
    Tensors must require gradients on all ranks or on none.

    Calls of the ranks that do not match are named by `all_gather` and `all_gather_object`, which
    exchange lengths, and for tensors on the CPU of up to 3.5 kB, in a maximum, minimum or product,
    or in groups of up to 8 ranks. Otherwise mismatches are left to the backend, unless
    ``TORCH_DISTRIBUTED_DEBUG`` is ``INFO`` or ``DETAIL`` in the environment.

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
        process_group = as_process_group(process_group)
        if process_group is None:
            if not (distributed.is_available() and distributed.is_initialized()):
                raise RuntimeError(
                    "torch.distributed is not initialized; call init_process_group, or use a "
                    "SoloGroup"
                )
            process_group = distributed.group.WORLD
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"`{name}`: process_group must contain this process")
        self._name = name
        # Graphs refer to this object. A loss that outlives the script must not keep the threads of
        # a destroyed group alive.
        self._process_group = ref(process_group)
        used = self.process_group  # raises if it is destroyed
        super().__init__(distributed.get_rank(used), distributed.get_world_size(used))

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

    def _where(self) -> str:
        return f"`{self._name}`, rank {self.rank}"

    # -- calls ---------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, call: Call) -> Iterator[str]:
        """Counts a call, and yields the text by which ranks compare it."""
        # If another rank raises or dies, this one gets an error of the backend or runs into the
        # timeout of the process group. Notes on that error name the call.
        state = state_of(self.process_group)
        kind = self._name, call.name.endswith("_backward")
        with state.lock:
            state.calls[kind] += 1
            text = f"`{self._name}`, call {state.calls[kind]}: {call}"
        try:
            with named_range(f"exchange {self._name}, rank {self.rank}"):
                if _ranks_debug():
                    self._compare(text)
                yield text
        except Exception as error:
            if not isinstance(error, ReplicationError):
                add_note(error, f"in {text}, rank {self.rank} of {self.size}")
                add_note(error, _REMEDY + debugging_advice())
            raise

    def _compare(self, text: str, length: int = 0) -> list[int]:
        """Raises `ReplicasDiverged` if the ranks' calls do not match. Returns their lengths."""
        return self._checked(self._gathered(self._to_tensor(_header_of(text, length))))

    def _checked(self, headers: Tensor) -> list[int]:
        """Raises `ReplicasDiverged` if the headers do not match. Returns their lengths."""
        unpacked = [_HEADER.unpack(_to_bytes(row)) for row in headers]
        if len({digest for _, digest, _ in unpacked}) > 1:
            calls = [(digest, _printable(encoded)) for _, digest, encoded in unpacked]
            check_same_call(calls, f"`{self._name}`", range(self.size), "rank")
        return [length for length, *_ in unpacked]

    def _to_tensor(self, data: bytes) -> Tensor:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return tensor.to(device_of_group(self.process_group))

    def _differentiable(
        self,
        begun: Begun,
        collective: Callable[[Tensor], Tensor],
        derivative: Callable[[Begun, Tensor], Tensor],
        tensor: Tensor,
    ) -> Tensor:
        """Runs a collective in an autograd graph. Its backward is a separate call."""
        if is_batched(tensor):
            raise ReplicationError(
                "collectives between processes take no batched gradients; compute one at a time"
            )

        def backward(grad: Tensor) -> Tensor:
            call = Call(f"{begun.name}_backward", layouts_of([grad], any_length=True))
            with self._calling(call) as text:
                return derivative(begun._replace(text=text), grad)

        return Collective.apply(collective, backward, tensor)  # type: ignore[no-any-return, no-untyped-call]

    # -- collectives ---------------------------------------------------------------------------

    @uncompiled
    def barrier(self) -> None:
        with self._calling(Call("barrier")):
            distributed.barrier(self.process_group)

    @uncompiled
    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns pickled copies of the objects of all members, in the order of their ranks.

        Unpickling can run any code, so call this only if you trust every process of the group. No
        other collective unpickles anything.
        """
        # Not torch.distributed.all_gather_object, which needs NumPy.
        parts = self._all_gather(Call("all_gather_object"), self._to_tensor(pickle.dumps(obj)))
        return tuple(pickle.loads(_to_bytes(part)) for part in parts)

    @uncompiled
    def exchange(
        self, name: str, tensor: Tensor, *, stack: bool, layouts: Layouts, requires_grad: bool
    ) -> Tensor:
        """Gathers or sums tensors of one shape, for layers with autograd nodes of their own.

        Args:
            name: The name of the call in messages. It ends in ``_backward`` in a backward.
            tensor: A tensor of the same shape and dtype on all ranks.
            stack: Whether to return the tensors of all ranks, ``(size, ...)``, and not their sum.
            layouts: Dtypes and shapes that must match on all ranks.
            requires_grad: Whether autograd records the call.
        """
        with self._calling(Call(name, layouts, requires_grad)) as text:
            # Derivatives of any order have one name.
            begun = Begun(name.removesuffix("_backward"), text)
            return self._stack(begun, tensor) if stack else self._sum(begun, tensor)

    def prefers_gather(self, tensor: Tensor) -> bool:
        """Whether it is faster to sum by gathering all tensors and adding them on each rank."""
        # A ring of n ranks reduces in 2 (n - 1) steps and gathers in n - 1. With few ranks and
        # short tensors gathering wins: on gloo by 25 % for 2 ranks and by 40 % for 8. NCCL picks
        # its own algorithm. The answer depends only on what matches on all ranks, so all choose
        # the same way.
        return (
            self.size <= _FEW_RANKS
            and tensor.numel() * tensor.element_size() <= _FEW_BYTES
            and tensor.device.type == "cpu"
        )

    @uncompiled
    def _run(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        """Runs the method of the name: `_all_reduce`, for example."""
        requires_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        layouts = layouts_of(tensors, any_length=name == "all_gather")
        call = Call(name_of(name, option), layouts, requires_grad)
        if name == "all_gather":  # it compares lengths in its call
            return self._all_gather(call, *tensors)
        with self._calling(call) as text:
            return getattr(self, f"_{name}")(Begun(name, text), *tensors, **option)  # type: ignore[no-any-return]

    def _all_reduce(self, begun: Begun, tensor: Tensor, op: ReduceOp) -> Tensors:
        if op == "mean" and tensor.dtype is torch.float16:  # a sum may overflow
            return (self._sum(begun, tensor / self.size),)
        if op in ("sum", "mean"):
            total = self._sum(begun, tensor)
            return (total / self.size if op == "mean" else total,)
        return (reduce_tensors(self._stack(begun, tensor).unbind(), op),)

    def _all_gather(self, call: Call, tensor: Tensor) -> Tensors:
        length = len(tensor) if tensor.dim() else 0
        # With NCCL the headers travel through the current device.
        with ExitStack() as stack:
            use_device(stack, tensor.device, current_stream(tensor.device))
            lengths = self._compare(stack.enter_context(self._calling(call)), length)
            shapes = [(n, *tensor.shape[1:]) if tensor.dim() else () for n in lengths]
            sizes = [prod(shape) for shape in shapes]
            values = tensor.reshape(-1)
            if len(values) < max(sizes):  # backends need the same shape on all ranks
                # Not `torch.cat`, which ignores an empty vector, in backward as well.
                values = pad(values, [0, max(sizes) - len(values)])
            stacked = self._stack(Begun(call.name), values)
            rows = zip(stacked, sizes, shapes, strict=True)
            return tuple(row[:size].view(shape).clone() for row, size, shape in rows)

    def _reduce_scatter(self, begun: Begun, *tensors: Tensor, op: ReduceOp) -> Tensors:
        mine = tensors[self.rank]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        sent, received = [tensor.numel() for tensor in tensors], [mine.numel()] * self.size
        parts = self._send_values(sent, received, begun, flat).view(self.size, *mine.shape)
        return (reduce_tensors(parts.unbind(), op),)

    def _broadcast(self, begun: Begun, tensor: Tensor, src: int) -> Tensors:
        def from_source(tensor: Tensor) -> Tensor:
            received = tensor.clone(memory_format=torch.contiguous_format)
            # Older releases of torch leave complex numbers to the backend, which may refuse them.
            real = torch.view_as_real(received) if received.is_complex() else received
            distributed.broadcast(real, self._global_rank(src), self.process_group)
            return received

        def to_source(begun: Begun, grad: Tensor) -> Tensor:
            total = self._sum(begun, grad)
            # Other ranks get zeros in the graph, because all take part in the second derivative.
            return total.masked_fill(total.new_full((), self.rank != src, dtype=torch.bool), 0)

        return (self._differentiable(begun, from_source, to_source, tensor),)

    def _sum(self, begun: Begun, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks, whose derivative is the sum of the gradients."""

        def sum_of_ranks(tensor: Tensor) -> Tensor:
            if self.prefers_gather(tensor):
                return reduce_tensors(self._rows(begun.text, tensor).unbind(), "sum")
            total = tensor.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(total, group=self.process_group)
            return total

        return self._differentiable(begun, sum_of_ranks, self._sum, tensor)

    def _rows(self, text: str, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, without a derivative. Compares the call, if any."""
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if not (text and tensor.is_cpu):  # elsewhere the host would wait for the headers
            return self._gathered(tensor)
        # A single number counts as contiguous with any stride.
        values = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        begin, end = _HEADER.size, _HEADER.size + len(values)
        padding = values.new_zeros(max(0, _LEAST_BYTES - end))
        rows = self._gathered(torch.cat((self._to_tensor(_header_of(text)), values, padding)))
        self._checked(rows[:, :begin])
        return rows[:, begin:end].view(tensor.dtype).view(self.size, *tensor.shape)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Stacks contiguous tensors of all ranks."""
        rows = tensor.new_empty(self.size, *tensor.shape)
        if rows.numel():  # else there is nothing to send
            # Not all_gather_into_tensor, which gloo lacks in older releases of torch.
            distributed.all_gather(list(rows), tensor, self.process_group)
        return rows

    def _stack(self, begun: Begun, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, which have the same shape, to ``(size, ...)``."""

        def to_owners(begun: Begun, grad: Tensor) -> Tensor:
            return self._reduce_scatter(begun, *grad, op="sum")[0]

        collective = partial(self._rows, begun.text)
        return self._differentiable(begun, collective, to_owners, tensor)

    def _send_values(
        self, sent: list[int], received: list[int], begun: Begun, tensor: Tensor
    ) -> Tensor:
        """Sends ``sent[i]`` values of a vector to rank i, and returns ``received[i]`` from it."""

        def exchange(tensor: Tensor) -> Tensor:
            result = tensor.new_empty(sum(received))
            # Nothing on all ranks or on none, so that no rank skips the call alone.
            if tensor.numel() or result.numel():
                tensor = tensor.resolve_conj().contiguous()
                distributed.all_to_all_single(result, tensor, received, sent, self.process_group)
            return result

        way_back = partial(self._send_values, received, sent)
        return self._differentiable(begun, exchange, way_back, tensor)

    # -- parts ---------------------------------------------------------------------------------

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


def _ranks_debug() -> bool:
    """Whether ranks compare all calls, by ``TORCH_DISTRIBUTED_DEBUG``."""
    # Not `is`, because every call returns a new object.
    return bool(distributed.get_debug_level() != distributed.DebugLevel.OFF)  # type: ignore[attr-defined]


def debugging_advice() -> str:
    """Returns what to set, unless it is set."""
    advice = " Set TORCH_DISTRIBUTED_DEBUG=INFO in the environment to compare the calls"
    return "" if _ranks_debug() else advice


def _header_of(text: str, length: int = 0) -> bytes:
    return _HEADER.pack(length, sha256(text.encode()).digest(), text.encode())


def _to_bytes(tensor: Tensor) -> bytes:
    """Returns the values of a vector of bytes, without NumPy."""
    tensor = tensor.cpu()
    return string_at(tensor.data_ptr(), len(tensor))


def _printable(encoded: bytes) -> str:
    """Returns the text of a header, given any bytes."""
    text = encoded.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
