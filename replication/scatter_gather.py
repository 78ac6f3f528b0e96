"""Splits arguments between replicas and joins their outputs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replication.devices import DeviceLike, parse_device, parse_devices, to_device
from replication.torch_internals import TreeSpec, tree_flatten, tree_is_leaf, tree_unflatten

__all__ = ["gather", "scatter", "scatter_kwargs"]


def scatter(inputs: Any, devices: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Splits the tensors in ``inputs`` along ``dim``, one part per replica.

    Sizes are those of `torch.chunk`: 9 samples on 4 devices are parts of 3, 3 and 3, so that three
    replicas run. Containers keep their types. 0-dim tensors and other objects go to every replica
    that has data; an empty batch goes to one.

    Args:
        inputs: A tensor, or any nesting of containers; see `torch.utils._pytree`.
        devices: Where the parts go.
        dim: The batch dimension of all tensors.

    Returns:
        One item for each replica that has data, at most ``len(devices)``.

    Raises:
        ValueError: Tensors differ in length along ``dim``, a tensor has no such dimension, or
            there are no devices.
    """
    targets = parse_devices(devices)
    if not targets:
        raise ValueError("expected at least one device (got none)")
    leaves, spec = tree_flatten(inputs)
    parts = _batch_parts(leaves, len(targets), dim)
    split = [_split(leaf, parts, targets, dim) for leaf in leaves]
    return [
        tree_unflatten([leaf[i] for leaf in split], spec)
        for i in range(len(targets) if parts is None else len(parts))
    ]


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    devices: Sequence[DeviceLike],
    dim: int = 0,
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Splits positional and keyword arguments as `scatter` does, into equally many parts.

    Returns:
        The positional arguments and the keyword arguments, one item for each replica that has
        data. Without any tensor to split there is one part: nothing says how to share the work.
    """
    scattered = scatter((tuple(inputs), dict(kwargs or {})), devices, dim)
    if not any(
        isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_flatten((inputs, kwargs))[0]
    ):
        scattered = scattered[:1]
    return tuple(part[0] for part in scattered), tuple(part[1] for part in scattered)


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0) -> Any:
    """Joins the outputs of the replicas, which must be alike in structure.

    Tensors are concatenated along ``dim`` on ``target_device``, in replica order; 0-dim tensors
    become one vector. ``None`` stays ``None``. Any other object becomes a list of one entry per
    replica.

    Args:
        outputs: One output per replica.
        target_device: Where the joined tensors go.
        dim: The batch dimension.

    Raises:
        ValueError: No outputs, or their structures differ.
    """
    if not outputs:
        raise ValueError("expected the output of at least one replica (got none)")
    device = parse_device(target_device)
    spec = tree_flatten(outputs[0])[1]
    leaves = [_leaves_as_in(spec, outputs, index) for index in range(len(outputs))]
    return tree_unflatten([_joined(e, device, dim) for e in zip(*leaves, strict=True)], spec)


def _batch_parts(leaves: list[Any], replicas: int, dim: int) -> list[int] | None:
    """How the batch is split: the lengths of the parts. None if there is no tensor to split."""
    length: int | None = None
    first = torch.Size()
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"cannot split along dimension {dim} a tensor of shape {tuple(leaf.shape)}"
            )
        if length is None:
            length, first = leaf.size(dim), leaf.shape
        elif leaf.size(dim) != length:
            raise ValueError(
                f"tensors must have the same length along the batch dimension {dim} (got shapes "
                f"{tuple(first)} and {tuple(leaf.shape)}); what every replica needs whole must be "
                "something else than a tensor, or 0-dim"
            )
    if length is None:
        return None
    part = max(1, -(-length // replicas))
    return [min(part, length - start) for start in range(0, length, part)] or [0]


def _split(leaf: Any, parts: list[int] | None, devices: list[torch.device], dim: int) -> list[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * len(devices)
    if leaf.dim() == 0 or parts is None:
        return [to_device(leaf, device) for device in devices]
    pieces = [
        to_device(piece, device)
        for piece, device in zip(leaf.split(parts, dim), devices)  # noqa: B905  (fewer parts)
    ]
    if leaf.requires_grad:
        # Views of one tensor: in-place operations of two replicas would meet in one graph.
        pieces = [p.clone() if p.device == leaf.device else p for p in pieces]
    return pieces


def _joined(entries: tuple[Any, ...], device: torch.device, dim: int) -> Any:
    if all(isinstance(entry, Tensor) for entry in entries):
        moved = [to_device(entry, device) for entry in entries]
        if all(entry.dim() == 0 for entry in moved):
            return torch.stack(moved)
        return torch.cat(moved, dim)
    if all(entry is None for entry in entries):
        return None
    return list(entries)


def _leaves_as_in(spec: TreeSpec, outputs: Sequence[Any], index: int) -> list[Any]:
    """The leaves of one output, in the order of those of output 0."""
    try:
        leaves: list[Any] = spec.flatten_up_to(outputs[index])  # the keys may come in any order
        alike = all(map(tree_is_leaf, leaves))
    except ValueError:
        alike = False
    if not alike:
        raise ValueError(
            "the outputs of the replicas must be alike in structure "
            f"(replica 0: {_outline(outputs[0])}, replica {index}: {_outline(outputs[index])})"
        )
    return leaves


def _outline(output: Any) -> str:
    """A container's type and keys or length, for messages."""
    if isinstance(output, dict):
        return f"{type(output).__name__} with keys {list(output)}"
    if isinstance(output, (list, tuple)):
        return f"{type(output).__name__} of length {len(output)}"
    return type(output).__name__
