"""Collectives between processes as functions, and the mean of a whole batch as a loss.

    from replication import functional

    everyone = torch.cat(functional.all_gather(embeddings))
    loss = functional.global_mean(losses, weight=targets != 255)

Names and arguments are those of `torch.distributed.nn.functional` where the two agree. The methods
of `Group` do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from replication._torch import is_dtensor
from replication.errors import ReplicationError
from replication.groups.base import (
    Group,
    ReduceOp,
    SoloGroup,
    WithDerivative,
    describe_argument,
)
from replication.groups.processes import process_group_of
from replication.groups.registry import as_process_group
from replication.sync.lifecycle import this_thread

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "global_mean",
    "reduce_scatter",
]

T = TypeVar("T")


def all_reduce(tensor: Tensor, op: ReduceOp | Any = "sum", group: Any = None) -> Tensor:
    """Reduces the tensors of all members of a group, and returns the result to every member.

    Like all functions here, it returns a copy of its argument in one process alone, and its
    gradients are derivatives of the sum of what *all* members compute from it: the gradient of a
    sum is the sum of the gradients. So the mean of a loss that every rank computes from all
    samples, as `torch.nn.parallel.DistributedDataParallel` takes it, has the gradient of one
    device.

    >>> import torch
    >>> from replication import functional
    >>> functional.all_reduce(torch.tensor([1.0, 2.0]))  # in one process
    tensor([1., 2.])

    Args:
        tensor: Any shape, the same on every member (see `Group.all_reduce`).
        op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"product"``, elementwise; or the
            ``ReduceOp`` of `torch.distributed` of this meaning.
        group: By default all processes. A group of `torch.distributed`, a `DeviceMesh` of one
            dimension, or a `Group`. In replicas it must be a `Group`: that of the layer, which
            `ReplicaAware` calls ``self.group``.

    Raises:
        TypeError: An argument has the wrong type. Raised before any waiting, like ValueError.
        ValueError: An argument has the wrong value, or this process is not in ``group``.
        ReplicationError: A replica calls without a `Group`, or the group is destroyed.
        ReplicasDiverged: See `Group` and `ProcessGroup`.
        NotImplementedError: See `Group`.
    """
    return _as_group(group).all_reduce(tensor, _as_op(op))


def all_gather(
    tensor: Tensor, group: Any = None, *, same_shape: bool = False
) -> tuple[Tensor, ...]:
    """Returns the tensors of all members, in the order of their ranks.

    Args:
        tensor: Any shape. The first dimension may differ between members, and may be 0.
        group: See `functional.all_reduce`.
        same_shape: See `Group.all_gather`.

    Raises:
        Exception: As `functional.all_reduce`.
    """
    return _as_group(group).all_gather(tensor, same_shape=same_shape)


def reduce_scatter(
    tensors: Sequence[Tensor], op: ReduceOp | Any = "sum", group: Any = None
) -> Tensor:
    """Reduces one tensor per member, and returns the result for this member.

    Unlike the function of `torch.distributed.nn`, it takes no tensor for the result.

    Args:
        tensors: One tensor for each member (see `Group.reduce_scatter`).
        op: See `functional.all_reduce`.
        group: See `functional.all_reduce`.

    Raises:
        Exception: As `functional.all_reduce`.
    """
    return _as_group(group).reduce_scatter(tensors, _as_op(op))


def broadcast(tensor: Tensor, src: int = 0, group: Any = None) -> Tensor:
    """Returns the tensor of the member of rank ``src``.

    Args:
        tensor: Any shape. Shape and dtype must match on every member.
        src: A rank of the *group*, counted from 0. In `torch.distributed.nn` it is one of all
            processes.
        group: See `functional.all_reduce`.

    Raises:
        Exception: As `functional.all_reduce`.
    """
    return _as_group(group).broadcast(tensor, src)


def all_gather_object(obj: T, group: Any = None) -> tuple[T, ...]:
    """Returns the objects of all members, in the order of their ranks.

    Unpickling can run any code, so call this only if you trust every process of the group.

    Args:
        obj: Any object. Between processes it is pickled.
        group: See `functional.all_reduce`.

    Raises:
        Exception: As `functional.all_reduce`.
    """
    return _as_group(group).all_gather_object(obj)


def barrier(group: Any = None) -> None:
    """Waits until all members have called it.

    Args:
        group: See `functional.all_reduce`.

    Raises:
        Exception: As `functional.all_reduce`.
    """
    _as_group(group).barrier()


def global_mean(
    losses: Tensor,
    weight: Tensor | None = None,
    *,
    count: float | Tensor | None = None,
    averages: bool = True,
    group: Any = None,
) -> Tensor:
    """Returns the mean loss of the whole batch on every rank, with the gradient of one device.

    Under a wrapper that averages gradients over ranks (DDP, FSDP2), the parameters get the
    gradient of ``(weight * losses).sum() / weight.sum()`` over the samples of all ranks, however
    unevenly these are spread. On one device it is that expression. Every rank gets the same value,
    to the last bit.

    It takes one exchange of two numbers in forward, and none in backward. Derivatives of any order
    by the losses are right. The gradient that flows into the losses of a rank is that of its share
    of the mean, times the number of ranks.

    >>> import torch
    >>> from replication import global_mean
    >>> losses = torch.tensor([1.0, 2.0, float("nan")])
    >>> global_mean(losses, weight=torch.tensor([1, 3, 0]))  # in one process
    tensor(1.7500)

    Args:
        losses: One loss for each sample, pixel, token or box of this rank, in any floating-point
            dtype and of any shape, perhaps without values. Sums are taken in float32, or in
            float64 if ``losses`` are.
        weight: How much each loss counts, such as 0 for pixels to ignore and 1 for others, in any
            real dtype, and of the shape of ``losses`` or broadcast to it. It is a constant. Losses
            of weight 0 may be infinite or NaN, and get the gradient 0. If an operation *before*
            them has an infinite derivative, its own gradient is NaN, as it is after `torch.where`.
        count: What the sum is divided by, a number or a tensor of one value, the same on every
            rank. By default the sum of weights over all ranks. Pass it to accumulate gradients:
            the sum of weights over all ranks *and* micro-batches of a step. The micro-batches'
            results then add up to the mean of the step.
        averages: Whether gradients are averaged over the ranks. Pass False where they are added.
        group: See `functional.all_reduce`. With ``self.group`` it works in replicas too: there,
            take the mean of what the replicas return.

    Returns:
        One number in the dtype of ``losses``. It is NaN if no rank has a weight other than 0, as
        the mean of nothing is.

    Raises:
        TypeError: An argument has the wrong type or dtype. Raised before any waiting.
        ValueError: ``weight`` can't be broadcast to the losses, ``weight`` or ``count`` require
            gradients, or ``count`` has several values. Raised before any waiting.
        Exception: As `functional.all_reduce`.
    """
    members = _as_group(group, "global_mean")
    _check_losses(losses, weight, count)
    dtype = torch.promote_types(losses.dtype, torch.float32)
    values = losses.to(dtype)
    if weight is None:
        own, weights = values.sum(), values.new_full((), values.numel())
    else:
        weight = weight.expand_as(losses)
        # Hidden first, because 0 times NaN is NaN, forward and backward.
        own = (torch.where(weight == 0, 0.0, values) * weight.to(dtype)).sum()
        weights = weight.sum(dtype=dtype)
    # Both numbers even where a count is given, so that all ranks exchange the same.
    total, total_weights = members.all_reduce(torch.stack((own.detach(), weights))).unbind()
    divisor = total_weights if count is None else count
    if isinstance(divisor, Tensor):
        divisor = divisor.reshape(())
    mean, share = total / divisor, own * (members.size if averages else 1) / divisor
    if members.size == 1:
        return share.to(losses.dtype)
    # Not `share + (mean - share).detach()`, which rounds, and makes NaN of what is infinite.
    result: Tensor = WithDerivative.apply(lambda _: mean, lambda grad: grad, share)  # type: ignore[no-untyped-call]
    return result.to(losses.dtype)


# -- arguments -----------------------------------------------------------------------------------


def _as_group(group: Any, name: str = "replication.functional") -> Group:
    """Returns the `Group` that an argument stands for. Its messages begin with the name."""
    if isinstance(group, Group):
        return group
    members = process_group_of(as_process_group(group, "group must be a Group,"), name)
    current = this_thread.current
    is_one_of_several = current is not None and current.rendezvous.size > 1
    if is_one_of_several and (group is None or members is not None):
        raise ReplicationError(
            f"`{name}`: a function cannot know which copies of a layer belong together (called "
            "in a replica without a Group); derive the layer from replication.ReplicaAware, and "
            "pass group=self.group"
        )
    return SoloGroup() if members is None else members


def _as_op(op: ReduceOp | Any) -> ReduceOp:
    """Returns the name of an op, given that name or a ``ReduceOp`` of `torch.distributed`."""
    name = getattr(op, "name", None)
    if name is None:
        return op
    return "mean" if name == "AVG" else name.lower()


def _check_losses(losses: Any, weight: Any, count: Any) -> None:
    """Raises an error unless the arguments of `global_mean` have its types and shapes."""
    for argument, name in ((losses, "losses"), (weight, "weight")):
        if argument is None and name == "weight":
            continue
        if not isinstance(argument, Tensor) or is_dtensor(argument):
            raise TypeError(
                f"global_mean takes {name} as a local tensor (got {type(argument).__name__}); "
                "x.to_local() makes one of a DTensor"
            )
    if not losses.is_floating_point():
        raise TypeError(
            f"global_mean takes losses of a floating-point dtype (got {losses.dtype}); convert "
            "them by .float()"
        )
    if isinstance(count, bool) or not isinstance(count, (Real, Tensor, type(None))):
        raise TypeError(f"global_mean takes a number as count (got {type(count).__name__})")
    if isinstance(count, Tensor):
        devices = losses.device, torch.device("cpu")
        if count.numel() != 1 or count.is_complex() or count.device not in devices:
            raise ValueError(
                f"global_mean takes a count of one real value on {losses.device} or the CPU (got "
                f"{describe_argument(count)} in {count.dtype} on {count.device})"
            )
    if weight is not None:
        if weight.is_complex():
            raise TypeError(f"global_mean takes a weight of a real dtype (got {weight.dtype})")
        sizes = zip(reversed(weight.shape), reversed(losses.shape), strict=False)
        if weight.dim() > losses.dim() or any(size not in (1, full) for size, full in sizes):
            raise ValueError(
                f"global_mean takes a weight of the shape of the losses, {list(losses.shape)}, or "
                f"broadcast to it (got {list(weight.shape)}); perhaps weight[:, None]"
            )
    for argument, name in ((weight, "weight"), (count, "count")):
        if isinstance(argument, Tensor) and argument.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"global_mean takes {name} as a constant (got a tensor that requires gradients); "
                "pass it detached, or divide two results of all_reduce, whose derivatives include "
                "the denominator"
            )
