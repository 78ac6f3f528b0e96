"""Copies tensors to several devices, and sums the gradients of the copies in device order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
    if detach:
        tensors = [tensor.detach() for tensor in tensors]
    trainable = [t for t in tensors if t.requires_grad]
    flat = Broadcast.apply(devices, *trainable) if trainable else ()  # type: ignore[no-untyped-call]
    if len(trainable) == len(tensors):
        return [list(flat[i :: len(devices)]) for i in range(len(devices))]
    copies = _copies([t for t in tensors if not t.requires_grad], devices)
    for i, constants in enumerate(copies):
        sources = iter(flat[i :: len(devices)]), iter(constants)
        copies[i] = [next(sources[0 if t.requires_grad else 1]) for t in tensors]
    return copies


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
    homes = [tensor.device for tensor in tensors]
    return [
        [
            tensor.detach() if home == device else to_device(tensor, device)
            for tensor, home in zip(tensors, homes, strict=True)
        ]
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
        copies = _copies(tensors, devices)
        return tuple(chain.from_iterable(zip(*copies, strict=True)))

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
    grads: Sequence[Sequence[Tensor | None]], sources: Sequence[torch.device]
) -> dict[int, Tensor]:
    """Adds small gradients as `_summed` does, many of them in one copy and one addition."""
    # By the index of the tensor, without tensors that would not gain by it.
    groups = defaultdict(list)
    for i, (of_copies, source) in enumerate(zip(grads, sources, strict=True)):
        given = [grad for grad in of_copies if grad is not None]
        devices = tuple([None if grad is None else grad.device for grad in of_copies])
        if {*devices} - {None, source} and _can_be_flat(given):
            groups[source, given[0].dtype, devices].append((i, given[0]))
    sums = {}
    for (source, _, devices), members in groups.items():
        if len(members) > 1:
            flat = [_flat(grads[i][copy] for i, _ in members) for copy in range(len(devices))]
            total = _summed(flat, source)
            assert total is not None  # as one of the devices is not
            parts = total.split([like.numel() for _, like in members])
            for (i, like), part in zip(members, parts, strict=True):
                # `data`: each with a version counter of its own.
                sums[i] = part.as_strided(like.shape, like.stride()).data
    return sums


def _can_be_flat(grads: Sequence[Tensor]) -> bool:
    """Whether small gradients of one tensor have the same layout, without gaps."""
    if any(type(g) is not Tensor or g.layout is not torch.strided or is_batched(g) for g in grads):
        return False
    first = grads[0]
    # Torch keeps the strides of a tensor without gaps, for example with its channels last.
    has_no_gaps = torch.empty_like(first, device="meta").stride() == first.stride()
    same = all((g.dtype, g.stride()) == (first.dtype, first.stride()) for g in grads)
    return has_no_gaps and same and first.nbytes <= _SMALL


def _flat(grads: Iterable[Tensor | None]) -> Tensor | None:
    """Returns the values of one copy's gradients in the order of memory. None without any."""
    given = [grad.as_strided((grad.numel(),), (1,)) for grad in grads if grad is not None]
    return torch.cat(given) if given else None


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
