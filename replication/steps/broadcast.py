"""Copies tensors to several devices, and sums the gradients of the copies in device order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import comm

from replication.devices import current_streams, to_device, use_streams

#: One list of tensors per device.
TensorsByDevice = list[list[Tensor]]


def copy_buffers(buffers: list[Tensor], devices: Sequence[torch.device]) -> TensorsByDevice:
    """Copies buffers to each device. Only copy 0 is the original if that is on the device."""
    copies = _copies(buffers, devices)
    for replica, device in enumerate(devices):
        for i, buffer in enumerate(buffers):
            if buffer.device == device:
                copies[replica][i] = buffer.clone() if replica else buffer
    return copies


def broadcast(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], detach: bool = False
) -> TensorsByDevice:
    """Copies ``tensors`` to each device, and sums gradients of the copies in device order."""
    # A copy on the tensor's own device shares its storage and its version counter, so that
    # autograd detects an in-place change just as it does for the tensor itself.
    if detach or not any(tensor.requires_grad for tensor in tensors):
        with torch.no_grad():
            return _copies(tensors, devices)
    copies = Broadcast.apply(devices, *tensors)  # type: ignore[no-untyped-call]
    return [list(copies[i :: len(devices)]) for i in range(len(devices))]


def _copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> TensorsByDevice:
    """Copies tensors to each device, detached from the graph."""
    if can_coalesce(tensors, devices):
        # Copies many small tensors at once. It returns complex tensors as their real views.
        copies = comm.broadcast_coalesced([tensor.detach() for tensor in tensors], devices)
        for i, tensor in enumerate(tensors):
            for of_device in copies[1:] if tensor.is_complex() else ():
                of_device[i] = torch.view_as_complex(of_device[i])
        return [[tensor.detach() for tensor in tensors], *copies[1:]]
    # Detached once per device: autograd sums the gradients of one tensor in order of arrival.
    return [
        [t.detach() if t.device == device else to_device(t, device) for t in tensors]
        for device in devices
    ]


def can_coalesce(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> bool:
    """Whether torch's coalesced copies support it: CUDA devices that differ, from the first."""
    are_distinct = len(set(devices)) == len(devices) and all(d.type == "cuda" for d in devices)
    return are_distinct and len(tensors) > 0 and all(t.device == devices[0] for t in tensors)


# All parameters of a module share one node. With a view for each copy instead, the engine would
# sum the gradients of the views in the order in which the threads built the graph.
class Broadcast(torch.autograd.Function):
    """Returns the copies of the first tensor on all devices, then of the second tensor, ..."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sources = [tensor.device for tensor in tensors]
        ctx.copies = len(devices)
        ctx.streams = current_streams([*devices, *ctx.sources])
        ctx.is_coalesced = can_coalesce(tensors, devices)
        of_tensors = list(zip(*_copies(tensors, devices), strict=True))
        pairs = zip(tensors, of_tensors, strict=True)
        ctx.mark_non_differentiable(*chain(*[own for t, own in pairs if not t.requires_grad]))
        return tuple(chain(*of_tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        n, sources = ctx.copies, ctx.sources
        # A gradient is read, and its memory reused, in the order of the stream of its device.
        with use_streams(ctx.streams):
            # torch's coalesced sum has no derivative, and takes dense gradients of every copy.
            if ctx.is_coalesced and not torch.is_grad_enabled() and all(map(_is_dense, grads)):
                of_devices: Any = [grads[i::n] for i in range(n)]
                return None, *comm.reduce_add_coalesced(of_devices, sources[0].index)
            of_tensors = [grads[i * n : (i + 1) * n] for i in range(len(sources))]
            return None, *map(_summed, of_tensors, sources)


def _is_dense(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is torch.strided and not grad.is_complex()


def _summed(grads: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Adds the gradients that are not None on ``device``, from left to right."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            if grad.device != device:
                grad = to_device(grad, device)
            if total is not None and total.is_sparse:  # torch does not add dense to sparse
                total, grad = grad, total
            total = grad if total is None else total + grad
    return total
