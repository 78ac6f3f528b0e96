"""Copies tensors to several devices, and sums the gradients of the copies in device order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import comm

from replication._torch import is_batched
from replication.devices import current_streams, to_device, use_streams

#: The bytes of a gradient up to which launching a copy takes longer than copying.
_SMALL = 2**20

Copies = list[list[Tensor]]


def are_distinct_cuda(devices: Sequence[torch.device]) -> bool:
    """Whether all devices are CUDA devices and differ, as torch's broadcast requires."""
    return all(d.type == "cuda" for d in devices) and len(set(devices)) == len(devices)


def copy_buffers(buffers: list[Tensor], devices: Sequence[torch.device], detach: bool) -> Copies:
    """Copies buffers to each device. Only copy 0 shares the storage of the original."""
    kinds = {(b.device, b.requires_grad) for b in buffers} | {(d, False) for d in devices}
    if len(kinds) == 1 and not are_distinct_cuda(devices):  # the usual case
        return [buffers, *([buffer.clone() for buffer in buffers] for _ in devices[1:])]
    copies = broadcast(buffers, devices, detach)
    for index, per_device in enumerate(copies):
        for i, (buffer, copy) in enumerate(zip(buffers, per_device, strict=True)):
            if copy.device == buffer.device:
                if index:
                    per_device[i] = copy.clone()
                elif not buffer.requires_grad:
                    per_device[i] = buffer
    return copies


def broadcast(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], detach: bool = False
) -> Copies:
    """Copies ``tensors`` to each device, and sums gradients of the copies in device order."""
    # A copy on the tensor's own device shares its storage and its version counter, so that
    # autograd detects an in-place change as for the tensor itself.
    if detach or not any(tensor.requires_grad for tensor in tensors):
        with torch.no_grad():
            return _copies(tensors, devices)
    copies = Broadcast.apply(devices, *tensors)  # type: ignore[no-untyped-call]
    return [list(copies[i :: len(devices)]) for i in range(len(devices))]


def _copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> Copies:
    """Copies tensors to each device, detached from the graph."""
    if are_distinct_cuda(devices) and tensors and all(t.device == devices[0] for t in tensors):
        tensors = [tensor.detach() for tensor in tensors]
        # Copies many small tensors at once. It returns complex tensors as their real views.
        copies = comm.broadcast_coalesced(tensors, devices)
        for i, tensor in enumerate(tensors):
            for copies_of_device in copies[1:] if tensor.is_complex() else ():
                copies_of_device[i] = torch.view_as_complex(copies_of_device[i])
        return [tensors, *copies[1:]]
    # Detached once per device: autograd sums the gradients of one tensor in order of arrival.
    return [
        [t.detach() if t.device == device else to_device(t, device) for t in tensors]
        for device in devices
    ]


# All parameters of a module share one node. Not a view per copy: the engine would sum the
# gradients of the views in the order in which the threads built the graph.
class Broadcast(torch.autograd.Function):
    """Returns the copies of the first tensor on all devices, then of the second tensor, ..."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sources = [tensor.device for tensor in tensors]
        ctx.copies = len(devices)
        ctx.streams = current_streams([*devices, *ctx.sources])
        of_tensors = list(zip(*_copies(tensors, devices), strict=True))
        pairs = zip(tensors, of_tensors, strict=True)
        ctx.mark_non_differentiable(*chain(*[own for t, own in pairs if not t.requires_grad]))
        return tuple(chain(*of_tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        n, sources = ctx.copies, ctx.sources
        of_copies = [grads[i * n : (i + 1) * n] for i in range(len(sources))]
        # A gradient is read, and its memory reused, in the order of its own device's stream.
        with use_streams(ctx.streams):
            sums: dict[int, Tensor] = {}
            if ctx.streams and not torch.is_grad_enabled():  # several devices, first derivatives
                sums = _summed_together(of_copies, sources)
            return None, *[
                sums[i] if i in sums else _summed(of_copies[i], source)
                for i, source in enumerate(sources)
            ]


def _summed_together(
    of_copies: Sequence[Sequence[Any]], sources: Sequence[torch.device]
) -> dict[int, Tensor]:
    """Adds small gradients as `_summed` does, but all of a dtype in one copy and one addition."""
    # By the index of the tensor.
    groups = defaultdict(list)
    for i, (grads, source) in enumerate(zip(of_copies, sources, strict=True)):
        if _can_be_flat(grads):
            groups[source, grads[0].dtype].append((i, grads))
    sums: dict[int, Tensor] = {}
    for (source, _), members in groups.items():
        if len(members) > 1:
            columns = zip(*[grads for _, grads in members], strict=True)
            flat = [torch.cat([g.as_strided((g.numel(),), (1,)) for g in c]) for c in columns]
            total: Any = _summed(flat, source)
            parts = total.split([grads[0].numel() for _, grads in members])
            for (i, (like, *_)), part in zip(members, parts, strict=True):
                # `data`: each with a version counter of its own.
                sums[i] = part.as_strided(like.shape, like.stride()).data
    return sums


def _can_be_flat(grads: Sequence[Any]) -> bool:
    """Whether every copy has a small gradient, and all are in the same layout, without gaps."""
    if any(type(g) is not Tensor or g.layout is not torch.strided or is_batched(g) for g in grads):
        return False
    # Torch keeps the strides of a tensor without gaps, for example with its channels last.
    strides = torch.empty_like(grads[0], device="meta").stride()
    return grads[0].nbytes <= _SMALL and all(g.stride() == strides for g in grads)


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
