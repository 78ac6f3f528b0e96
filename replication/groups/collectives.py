"""Collectives of `torch.distributed` that return new tensors, and their derivatives.

The functions compute values. `Collective` records one of them in an autograd graph, together with
its derivative, which is also a collective: every rank must run the backward.

Tensors may have any strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from replication._torch import is_batched
from replication.errors import ReplicationError

__all__: list[str] = []


def all_reduce(tensor: Tensor, process_group: Any) -> Tensor:
    """Returns the sum of the tensors of all ranks."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=process_group)
    return total


def broadcast(tensor: Tensor, src: int, process_group: Any) -> Tensor:
    """Returns the tensor of the process whose rank among all processes is ``src``."""
    received = tensor.clone(memory_format=torch.contiguous_format)
    # Older releases of torch leave complex numbers to the backend, which may not support them.
    real = torch.view_as_real(received) if received.is_complex() else received
    distributed.broadcast(real, src, process_group)
    return received


def all_gather(tensor: Tensor, process_group: Any) -> Tensor:
    """Stacks the tensors of all ranks, which have the same shape, to ``(size, *shape)``."""
    tensor = tensor.resolve_conj().contiguous()
    stacked = tensor.new_empty(process_group.size(), *tensor.shape)
    if stacked.numel():  # else there is nothing to send
        # Not all_gather_into_tensor, which gloo lacks in older releases of torch.
        distributed.all_gather(list(stacked), tensor, process_group)
    return stacked


def all_to_all(tensor: Tensor, sent: list[int], received: list[int], process_group: Any) -> Tensor:
    """Sends ``sent[i]`` values of a vector to rank i, and returns ``received[i]`` from it.

    The values for rank 0, and from it, come first.
    """
    result = tensor.new_empty(sum(received))
    if tensor.numel() or result.numel():
        tensor = tensor.resolve_conj().contiguous()
        distributed.all_to_all_single(result, tensor, received, sent, process_group)
    return result


class Collective(Function):
    """Runs a collective in an autograd graph.

    The derivative consists of such collectives, so it is differentiable any number of times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        collective: Callable[[Tensor], Tensor],
        derivative: Callable[[Tensor], Tensor],
        tensor: Tensor,
    ) -> Tensor:
        ctx.derivative = derivative
        return collective(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.derivative(grad)


def differentiable(
    collective: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    tensor: Tensor,
) -> Tensor:
    """Runs a collective in an autograd graph.

    ``derivative`` returns the gradient of ``tensor``, given the gradient of the result. It
    consists of `differentiable` collectives, to be differentiable itself.
    """
    if is_batched(tensor):
        raise ReplicationError(
            "collectives between processes take no batched gradients (is_grads_batched=True, "
            "vectorize=True); compute one after the other"
        )
    return Collective.apply(collective, derivative, tensor)  # type: ignore[no-any-return, no-untyped-call]
