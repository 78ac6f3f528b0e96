"""`ProcessGroup`: collectives between processes, by `torch.distributed`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from ctypes import string_at
from typing import Any, NoReturn, TypeVar
from weakref import ref

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.nn.functional import pad

from replication.collectives import differentiable_collectives
from replication.devices import current_stream, use_device
from replication.errors import ReplicationError
from replication.group import (
    Call,
    Group,
    Layouts,
    ReduceOp,
    SoloGroup,
    check_alike,
    layouts_of,
    reduced,
)
from replication.notes import add_note
from replication.observation import named_range
from replication.processes import check_process_group, debugging, history_of, is_known
from replication.torch_internals import device_of_group, is_batched, timeout_of, uncompiled

__all__ = ["ProcessGroup"]

T = TypeVar("T")

_collectives = differentiable_collectives()

#: Up to so many ranks, and bytes of each, gloo gathers sooner than it reduces (see
#: `ProcessGroup.prefers_gather`).
_FEW_RANKS, _FEW_BYTES = 8, 64 * 1024


class ProcessGroup(Group):
    """The processes of a group of `torch.distributed`, on any backend (gloo, NCCL, ...).

    A backward through a result is a collective, too: all ranks must run it, and in the same order.
    A rank whose results do not enter its loss multiplies them by 0 and adds them. Tensors require
    gradients on all ranks or on none.

    Ranks whose calls do not match are told so in `all_gather`, which exchanges the shapes. In
    other collectives the backend decides what happens, unless ``TORCH_DISTRIBUTED_DEBUG`` is
    ``INFO`` in the environment (or ``DETAIL``), which makes every call be compared first.

    Args:
        process_group: A group of `torch.distributed` that this process is in; by default all
            processes.
        name: Of the layer that talks, for messages.

    Raises:
        RuntimeError: `torch.distributed` is not initialized; or, in a call, the group has been
            destroyed, or gradients are batched (``is_grads_batched=True``).
        NotImplementedError: In a call, a tensor has a derivative in forward mode.
        TypeError: ``process_group`` is none.
        ValueError: This process is not in ``process_group``.
    """

    def __init__(self, process_group: Any = None, name: str = "ProcessGroup") -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "a ProcessGroup needs torch.distributed to be initialized; call "
                "torch.distributed.init_process_group, or use a SoloGroup"
            )
        if process_group is not None:
            check_process_group(process_group)
        process_group = process_group or distributed.group.WORLD
        rank = distributed.get_rank(process_group)
        if rank < 0:
            raise ValueError(
                f"`{name}`: this process is not in the process_group that it is given; give each "
                "process a group that it is in"
            )
        super().__init__(rank, distributed.get_world_size(process_group))
        self._name = name
        # Graphs refer to this object. A loss that is still there when a script ends must not keep
        # the threads of a group that has been destroyed.
        self._process_group = ref(process_group)

    @property
    def process_group(self) -> Any:
        """The group of `torch.distributed`.

        Raises:
            RuntimeError: It has been destroyed.
        """
        process_group = self._process_group()
        if process_group is None or not is_known(process_group):  # somebody else may keep it
            raise RuntimeError(
                f"{self._where()}: the process group has been destroyed; call "
                "torch.distributed.destroy_process_group after the last forward and backward"
            )
        return process_group

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return ProcessGroup(self.process_group, self._name)  # between the same processes

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ProcessGroup cannot be pickled: it connects the processes of this run")

    def _where(self) -> str:
        return f"`{self._name}`, rank {self.rank}"

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self._made(Call("barrier"), lambda _: distributed.barrier(self.process_group))

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns copies of the objects of all members, in the order of their ranks."""
        return self._made(Call("all_gather_object"), lambda _: self._gathered(obj))

    @uncompiled
    def _gathered(self, obj: T) -> tuple[T, ...]:
        # As torch.distributed.all_gather_object, which wants NumPy to be installed.
        pickled = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        pickled = pickled.to(device_of_group(self.process_group))
        length = pickled.new_tensor([len(pickled)], dtype=torch.int64)
        lengths = [int(n) for n in self._stacked(length)]
        rows = [row.cpu() for row in self._gather_rows(pickled, lengths)]
        return tuple(pickle.loads(string_at(row.data_ptr(), len(row))) for row in rows)

    def _made(
        self, call: Call, collective: Callable[[Sequence[Call]], T], compares: bool = False
    ) -> T:
        """Makes a call, with those of all ranks, if they are compared: on demand, or if users ask.

        If a rank raises or dies, the others get an error of the backend's, or run into the timeout
        of the process group: a note says which call that was.
        """
        call = self._counted(call)
        try:
            with named_range(f"exchange {self._name}, rank {self.rank}"):
                return collective(self._exchanged(call) if compares or debugging() else ())
        except Exception as error:
            if not issubclass(type(error), ReplicationError):
                add_note(error, f"in {call} at {call.where}, rank {self.rank} of {self.size}")
                add_note(error, _remedy())
            raise

    def _counted(self, call: Call) -> Call:
        """The call, with its place."""
        history, kind = history_of(self.process_group), (self._name, call.in_backward)
        with history.lock:
            history.calls[kind] += 1
            return call._replace(where=f"`{self._name}`, call {history.calls[kind]}")

    def _exchanged(self, call: Call) -> tuple[Call, ...]:
        """The calls of all ranks, which are alike."""
        calls = self._gathered(call)
        check_alike(calls, call.where, range(self.size), "rank")
        return calls

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        call = _call("all_reduce", (tensor,), f"op={op!r}")
        return self._made(call, lambda _: self._reduced(tensor, op))

    def _reduced(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        if op == "mean" and tensor.dtype is torch.float16:  # whose sum may overflow
            return self._sum(tensor / self.size)
        if op in ("sum", "mean"):
            total = self._sum(tensor)
            return total / self.size if op == "mean" else total
        return reduced(self._stacked(tensor).unbind(), op)

    def exchange(
        self,
        name: str,
        tensor: Tensor,
        *,
        stack: bool,
        layouts: Layouts = (),
        requires_grad: bool = False,
    ) -> Tensor:
        """Gathers or sums tensors of one shape, in one collective.

        For layers with graph nodes of their own.

        Args:
            name: What the call is named in messages.
            tensor: Of the same shape and dtype on all ranks.
            stack: Whether to gather (see `prefers_gather`).
            layouts: Dtypes and shapes that must be alike on all ranks.
            requires_grad: Whether the node leads a backward through this call.

        Returns:
            ``(size, ...)``, all ranks' tensors, or else their sum.
        """
        call = Call(name, layouts=layouts, requires_grad=requires_grad)
        collective = self._stacked if stack else self._sum
        return self._made(call, lambda _: collective(tensor))

    def _sum(self, tensor: Tensor) -> Tensor:
        return Sum.apply(self, tensor)  # type: ignore[no-any-return, no-untyped-call]

    def sum_without_graph(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, by the faster way."""
        if self.prefers_gather(tensor):
            return reduced(self._stacked(tensor).unbind(), "sum")
        return _through_reals(
            lambda real: _collectives.all_reduce(real, self.process_group), tensor
        )

    def sum_in_backward(self, grad: Tensor) -> Tensor:
        """The derivative of a sum over the ranks: the sum of the derivatives."""
        call = Call("all_reduce_backward", layouts=layouts_of([grad]))
        return self._made(call, lambda _: self._sum(grad))

    def prefers_gather(self, tensor: Tensor) -> bool:
        """Whether a sum is faster by a gather, after which each rank adds.

        A ring of n ranks reduces in 2 (n - 1) steps and gathers in n - 1. Where the steps, not the
        bytes, take the time, and that is so for few ranks and short tensors, the gather wins; on
        gloo by a quarter for 2 ranks, and by 40 % for 8, up to the bounds above. NCCL picks its
        own algorithm. All ranks go the same way: only what is alike in all of them may count.
        """
        return (
            self.size <= _FEW_RANKS
            and tensor.numel() * tensor.element_size() <= _FEW_BYTES
            and tensor.device.type == "cpu"
        )

    def _all_gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        call = _call("all_gather", (tensor,))._replace(any_length=True)

        def collective(calls: Sequence[Call]) -> tuple[Tensor, ...]:
            if tensor.dim() == 0:
                return tuple(entry.clone() for entry in self._stacked(tensor))
            return self._gather_rows(tensor, [shape[0] for c in calls for _, shape in c.layouts])

        # With NCCL the calls travel through the current device.
        with use_device(tensor.device, current_stream(tensor.device)):
            return self._made(call, collective, compares=True)

    def _gather_rows(self, tensor: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        """All ranks' tensors; those that are short travel padded, as backends want one length."""
        missing = max(lengths) - len(tensor)
        padded = tensor
        if missing and 0 in tensor.shape[1:]:  # an older torch does not pad such tensors
            padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        elif missing:
            padded = pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])
        return tuple(
            rows[:n].clone() for rows, n in zip(self._stacked(padded), lengths, strict=True)
        )

    def _stacked(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, of one shape, as one: ``(size, ...)``."""
        if not tensor.numel():  # nothing to send
            return tensor.reshape(self.size, *tensor.shape)
        gathered = _through_reals(
            lambda real: _collectives.all_gather(real, self.process_group), tensor.unsqueeze(0)
        )
        return gathered.reshape(self.size, *tensor.shape)

    def _reduce_scatter(self, tensors: tuple[Tensor, ...], op: ReduceOp) -> Tensor:
        call = _call("reduce_scatter", tensors, f"op={op!r}")
        return self._made(call, lambda _: self._scattered(tensors, op))

    def _scattered(self, tensors: tuple[Tensor, ...], op: ReduceOp) -> Tensor:
        own = tensors[self.rank]
        sent = [tensor.numel() for tensor in tensors]
        got = [own.numel()] * self.size
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received = _through_reals(
            lambda real: _collectives.all_to_all(real, sent, got, self.process_group), flat
        )
        return reduced([part.view(own.shape) for part in received.split(got)], op)

    def _broadcast(self, tensor: Tensor, src: int) -> Tensor:
        call = _call("broadcast", (tensor,), f"src={src}")
        return self._made(call, lambda _: self._sent(tensor, src))

    def _sent(self, tensor: Tensor, src: int) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            received = tensor.clone(memory_format=torch.contiguous_format)
            distributed.broadcast(received, self._global_rank(src), self.process_group)
            return received
        if self.rank != src:
            # Nothing, whatever is in it, but part of the graph; -0 as that leaves a -0 as it is.
            everything = torch.ones((), dtype=torch.bool, device=tensor.device)
            tensor = tensor.masked_fill(everything, -0.0)
        return self._sum(tensor)

    def _split(self, size: int) -> Group:
        if size == 1:  # without a word to the others: perhaps only some ranks run this layer
            return SoloGroup()
        starts = range(0, self.size, size)
        parts = [range(start, min(start + size, self.size)) for start in starts]
        own = parts[self.rank // size]
        history = history_of(self.process_group)
        with history.lock:
            if size not in history.parts:
                history.parts[size] = self._part(parts, own)
        if len(own) == 1:
            return SoloGroup()
        return ProcessGroup(history.parts[size], f"{self._name}, ranks {own[0]}-{own[-1]}")

    def _part(self, parts: list[range], own: range) -> Any:
        """Makes the groups of torch's for some parts; returns the one of this process."""
        is_world = self.process_group is distributed.group.WORLD
        # torch wants all processes to make all groups. Those outside this one know nothing of it;
        # without them, its members must have made the same groups before.
        made = {
            part: distributed.new_group(
                [self._global_rank(rank) for rank in part],
                timeout=timeout_of(self.process_group),
                backend=distributed.get_backend(self.process_group),
                use_local_synchronization=not is_world,
            )
            for part in (parts if is_world else [own])
        }
        return made[own]

    def _global_rank(self, rank: int) -> int:
        return distributed.get_global_rank(self.process_group, rank)


def _remedy() -> str:
    """What a rank can do that was left alone in a call."""
    if debugging():
        return (
            "if no other rank has failed before (see their logs), some of them have not come to "
            "this call: is one in eval(), at the end of its data, or without a backward?"
        )
    return (
        "if no other rank has failed before (see their logs), the ranks may have called different "
        "layers: with TORCH_DISTRIBUTED_DEBUG=INFO in the environment the calls are compared"
    )


class Sum(Function):
    """The sum over the ranks, and, as its derivative, the sum of theirs; any number of times."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        return group.sum_without_graph(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.group.sum_in_backward(grad)


def _call(name: str, tensors: tuple[Tensor, ...], option: str = "") -> Call:
    requires_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return Call(name, option, layouts_of(tensors), requires_grad=requires_grad)


def _through_reals(collective: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Runs a collective on a contiguous tensor, of real numbers: not all backends know others."""
    _refuse_batched(tensor)
    if not torch.compiler.is_compiling() and unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(
            "collectives between processes have no derivatives in forward mode"
        )
    if tensor.is_complex():
        real = torch.view_as_real(tensor.resolve_conj()).contiguous()
        result = torch.view_as_complex(collective(real))
    else:
        result = collective(tensor.contiguous())
    return OneByOne.apply(result) if result.requires_grad else result  # type: ignore[no-untyped-call]


class OneByOne(Function):
    """Lets a gradient pass that is not several at once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _refuse_batched(grad)
        return grad


def _refuse_batched(tensor: Tensor) -> None:
    if is_batched(tensor):  # torch would hand out what nobody has waited for
        raise RuntimeError(
            "collectives between processes take no batched gradients (is_grads_batched=True, "
            "vectorize=True); compute one after the other"
        )
