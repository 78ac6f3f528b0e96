"""`Group`: collectives as in `torch.distributed` that return results, in threads or processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import has_other_derivatives, is_dtensor
from replication.checks import is_int
from replication.errors import ReplicasDiverged, lost_derivatives
from replication.sync.lifecycle import Phase, phase
from replication.texts import listed

__all__ = ["Group", "SoloGroup"]

T = TypeVar("T")

ReduceOp = Literal["sum", "mean", "max", "min", "product"]

#: Whether an op is defined for a dtype. Each returns a single tensor as it is (see `SoloGroup`).
_OPS: dict[str, Callable[[torch.dtype], bool]] = {
    "sum": lambda dtype: dtype is not torch.bool,
    "mean": lambda dtype: dtype.is_floating_point or dtype.is_complex,
    "max": lambda dtype: not dtype.is_complex,
    "min": lambda dtype: not dtype.is_complex,
    "product": lambda dtype: dtype is not torch.bool,
}

#: The dtypes that every backend supports. Complex numbers travel as pairs of reals.
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
)

Tensors = tuple[Tensor, ...]

#: The dtypes and shapes of some tensors. The string ``"*"`` is a dimension that may differ.
Layouts = tuple[tuple[torch.dtype, tuple[int | str, ...]], ...]


class Signature(NamedTuple):
    """The parts of a collective call that must match on every member."""

    #: The collective, with its ``op`` or ``src``: ``"all_reduce(op='sum')"``.
    name: str
    layouts: Layouts = ()
    #: Whether autograd records the call. None where it may differ.
    requires_grad: bool | None = None

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"
            for dtype, shape in self.layouts
        )
        text = f"{self.name} of {tensors}" if tensors else self.name
        if self.requires_grad is not None:
            text += f" that {'requires' if self.requires_grad else 'does not require'} gradients"
        return text


def check_same_call(
    calls: Sequence[tuple[object, str]], where: str, members: Sequence[int], kind: str
) -> None:
    """Raises `ReplicasDiverged` unless all members make the same call."""
    # Each call is a value that is equal where calls match, and the text that names it.
    callers: dict[tuple[object, str], list[int]] = {}
    for member, call in zip(members, calls, strict=True):
        callers.setdefault(call, []).append(member)
    if len(callers) > 1:
        found = "; ".join(f"{listed(ranks, kind)}: {text}" for (_, text), ranks in callers.items())
        raise ReplicasDiverged(
            f"{where}: the calls do not match: {found}. All must make the same calls in the "
            "same order, with tensors of one dtype and shape (but all_gather takes any first "
            "dimension; where others differ, flatten, and gather the shapes): is a layer in "
            "eval() on some of them?"
        )


class Group(ABC):
    """The copies of one layer, and the collectives between them.

    This member is rank ``rank`` of ``size``, counted from 0. Every member must call the same
    collectives in the same order. Results have the dtype and the device of the argument, and share
    no memory with it or with other members' results.

    Gradients are derivatives of the sum of the losses of *all* members, so the gradient of a sum
    is the sum of the gradients. They can be differentiated any number of times. Under
    `torch.no_grad` a member's results are constants.

    Raises:
        TypeError: An argument has the wrong type. Raised before any waiting.
        ValueError: An argument has the wrong value. Raised before any waiting.
        ReplicasDiverged: The calls of the members do not match, or a replica does not call.
        ReplicaFailed: Another member raised.
        NotImplementedError: A transform of `torch.func` or a forward-mode derivative is active.
            Raised before any waiting. Not in a group of one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    @property
    def recomputes(self) -> bool:
        """Whether this call recomputes a checkpoint, so that a layer must not update its state."""
        return phase() is not Phase.FORWARD

    @property
    def where(self) -> str:
        """The layer and the member, for messages."""
        return repr(self)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduces the tensors of all members, and returns the result to every member.

        Args:
            tensor: Any shape, the same on every member. Like all tensors here, it is dense and of
                dtype float16, bfloat16, float32, float64, complex64, complex128, bool, uint8,
                int8, int32 or int64.
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"product"``, elementwise. The
                gradient of a maximum or minimum is divided evenly among the members that attain
                it, as in `torch.amax`.
        """
        return self._check_and_run("all_reduce", (tensor,), op=op)[0]

    def all_gather(self, tensor: Tensor, *, same_shape: bool = False) -> tuple[Tensor, ...]:
        """Returns the tensors of all members, in the order of their ranks.

        Concatenate them to get the whole batch: ``torch.cat(group.all_gather(x))``. The gradient
        of a member's tensor is the sum of the gradients of its copies on all members.

        Args:
            tensor: ``(N, ...)`` in any dtype. N may differ between members and may be 0. The other
                dimensions, and the dtype, must match.
            same_shape: Whether the caller says that first dimensions do not differ. Processes then
                exchange no lengths. So the host does not wait for an accelerator, the call may be
                captured in a CUDA graph, and `torch.compile` keeps it in its graph.
        """
        # Only where it is given, because it is part of the name of the call.
        option = {"same_shape": True} if same_shape else {}
        return self._check_and_run("all_gather", (tensor,), **option)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Tensor:
        """Reduces one tensor per member, and returns the result for this member.

        Args:
            tensors: One tensor for each member, in the order of their ranks, of one dtype and on
                one device. Tensors for different members may differ in shape.
            op: See `all_reduce`.

        Returns:
            ``op`` of the tensors at index ``rank`` of all members.
        """
        is_list = isinstance(tensors, Sequence)
        if not is_list or len(tensors) != self.size:
            got = len(tensors) if is_list else describe_argument(tensors)
            raise (ValueError if is_list else TypeError)(
                f"{self.where}: reduce_scatter takes a list of {self.size} tensors, one for each "
                f"member (got {got}); split one tensor by list(tensor.chunk({self.size}))"
            )
        return self._check_and_run("reduce_scatter", tensors, op=op)[0]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Returns the tensor of the member of rank ``src``.

        Args:
            tensor: Any shape. Shape and dtype must match on every member.
            src: A rank of this group.
        """
        if not is_int(src) or not 0 <= src < self.size:
            raise ValueError(
                f"{self.where}: broadcast takes a src from 0 to {self.size - 1} (got {src!r})"
            )
        return self._check_and_run("broadcast", (tensor,), src=src)[0]

    @abstractmethod
    def barrier(self) -> None:
        """Waits until all members have called it."""

    @abstractmethod
    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns the objects of all members, in the order of their ranks.

        Between processes the objects are pickled. Between replicas they are passed as they are.
        """

    def split(self, size: int) -> Group:
        """Divides the group into parts of ``size`` ranks, and returns the part of this member.

        All members must pass the same ``size``. The last part may be smaller.
        """
        if not is_int(size) or size < 1:
            raise (ValueError if is_int(size) else TypeError)(
                f"{self.where}: split and group_size take an int of at least 1 (got {size!r})"
            )
        return self if size >= self.size else self._part(size)

    @abstractmethod
    def _run(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        """Runs the collective ``name``, whose arguments are checked, and returns its results."""

    def _part(self, size: int) -> Group:
        """Returns the part of this member, if there are several."""
        raise NotImplementedError

    # -- checks before any waiting -------------------------------------------------------------

    def _check_and_run(self, name: str, tensors: Sequence[Any], **option: Any) -> Tensors:
        where = f"{self.where}: {name}"
        for tensor in tensors:
            if (
                not isinstance(tensor, Tensor)
                or is_dtensor(tensor)
                or tensor.layout is not torch.strided
                or tensor.dtype not in _DTYPES
            ):
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                got = type(tensor).__name__
                if isinstance(tensor, Tensor):
                    got += f" of {tensor.dtype} and {tensor.layout}"
                raise TypeError(
                    f"{where} takes dense, local tensors of {names} (got {got}); torch.tensor "
                    "makes one of a number, x.to_dense() of a sparse tensor, and x.to_local() of "
                    "a DTensor"
                )
        if self.size > 1 and has_other_derivatives(tensors):
            raise lost_derivatives(where)
        kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
        if len(kinds) > 1:
            got = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
            raise ValueError(f"{where} takes tensors of one dtype on one device (got {got})")
        if "op" in option:
            op, dtype = option["op"], tensors[0].dtype
            if not isinstance(op, str) or op not in _OPS:
                raise ValueError(f"{where} knows the ops {', '.join(_OPS)} (got {op!r})")
            if not _OPS[op](dtype):
                raise TypeError(
                    f"{where} has no {op} of this dtype (got {dtype}); convert the tensor first"
                )
        return self._run(name, tuple(tensors), **option)


def describe_argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return type(value).__name__


def signature_of(name: str, tensors: Tensors, option: dict[str, Any]) -> Signature:
    """Names a collective with its argument ``op`` or ``src``, and the layouts of its tensors."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in option.items())
    layouts = layouts_of(tensors, any_length=name == "all_gather" and not option)
    return Signature(f"{name}({arguments})" if option else name, layouts)


def layouts_of(tensors: Sequence[Tensor], any_length: bool) -> Layouts:
    """Dtypes and shapes for a `Signature`. With ``any_length``, first dimensions may differ."""
    if any_length:
        return tuple((t.dtype, ("*", *t.shape[1:]) if t.dim() else ()) for t in tensors)
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def reduce_tensors(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Applies ``op`` to tensors of one shape and device, from left to right, in their dtype."""
    # In pairs, because `torch.sum` and `torch.prod` return float32 under a CUDA autocast.
    if op in ("max", "min"):
        extreme = torch.amax if op == "max" else torch.amin
        # A copy, because autograd saves the result itself.
        return extreme(torch.stack(tuple(tensors)), 0).clone()
    count = len(tensors)
    if op == "mean" and may_overflow(tensors[0]):
        return reduce(torch.add, [tensor / count for tensor in tensors])
    total = reduce(torch.mul if op == "product" else torch.add, tensors)
    return total / count if op == "mean" else total


def may_overflow(tensor: Tensor) -> bool:
    """Whether a sum of such tensors may overflow, so that a mean divides before it adds."""
    return tensor.dtype is torch.float16


class WithDerivative(Function):
    """Runs a collective in an autograd graph. ``derivative`` consists of such collectives."""

    @staticmethod
    def forward(ctx: Any, collective: Any, derivative: Any, tensor: Tensor) -> Tensor:
        ctx.derivative = derivative
        return collective(tensor)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.derivative(grad)


class SoloGroup(Group):
    """A group of one member: each collective returns a copy of its argument at once.

    >>> import torch
    >>> from replication import SoloGroup
    >>> group = SoloGroup()
    >>> group.rank, group.size
    (0, 1)
    >>> group.all_gather(torch.tensor([1.0, 2.0]))
    (tensor([1., 2.]),)
    """

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def barrier(self) -> None:
        pass

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        return (obj,)

    def _run(self, name: str, tensors: Tensors, **option: Any) -> Tensors:
        return tuple(tensor.clone() for tensor in tensors)
