"""Joins the outputs of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from replication.checks import check_list, checked_names
from replication.devices import DeviceLike, check_available, parse_device, to_device
from replication.scattered import Scattered
from replication.structure import Key, Leaf, flatten
from replication.warning import warn

__all__ = ["gather"]


def gather(
    outputs: Sequence[Any],
    target_device: DeviceLike,
    dim: int = 0,
    *,
    gather_to_one_device: bool = True,
    except_keywords: Collection[str] = (),
) -> Any:
    """Joins the outputs of the replicas, which must be alike in structure.

    Tensors are concatenated along ``dim`` on ``target_device``, in the order of ``outputs``; 0-dim
    tensors become one vector. ``None`` stays ``None``. Any other object becomes a list of one
    entry per replica. Containers keep their types.

    >>> gather([{"x": torch.ones(2), "n": 2}, {"x": torch.ones(1), "n": 1}], "cpu")
    {'x': tensor([1., 1., 1.]), 'n': [2, 1]}

    Args:
        outputs: One output per replica.
        target_device: Where the joined tensors go.
        dim: The batch dimension.
        gather_to_one_device: If false, nothing is joined: each leaf becomes a `Scattered`.
        except_keywords: What is under these keys becomes `Scattered`; see `DataParallel`.

    Raises:
        ValueError: No outputs, or their structures differ, or tensors cannot be joined; or there
            is no such device.
        TypeError: ``outputs`` is no list, or ``except_keywords`` no list of names.
    """
    device = parse_device(target_device)
    check_available(device)
    except_keywords = checked_names("except_keywords", except_keywords)

    def join(leaf: Leaf, entries: tuple[Any, ...]) -> Any:
        return _joined(leaf, entries, device, dim)

    return join_leaves(outputs, join, gather_to_one_device, except_keywords)


def join_leaves(
    outputs: Sequence[Any],
    join: Callable[[Leaf, tuple[Any, ...]], Any],
    gather_to_one_device: bool = True,
    except_keywords: Collection[str] = (),
) -> Any:
    """Makes one object of several of the same structure; ``join`` makes one leaf of several."""
    check_list("outputs", outputs)
    if not len(outputs):
        raise ValueError("expected the output of at least one replica (got none)")
    leaves, structure = flatten(outputs[0])
    rows = []
    for index, output in enumerate(outputs):
        row = structure.leaves_of(output)
        if row is None:
            raise ValueError(_difference(outputs[0], output, index))
        rows.append(row)
    _report_unknown(except_keywords, leaves)
    joined: list[Any] = []
    for leaf, *entries in zip(leaves, *rows, strict=True):
        keep = not gather_to_one_device or any(_is_under(leaf, name) for name in except_keywords)
        if all(entry is None for entry in entries):
            joined.append(None)
        else:
            joined.append(Scattered(entries) if keep else join(leaf, tuple(entries)))
    return structure.around(joined)


def _joined(leaf: Leaf, entries: tuple[Any, ...], device: torch.device, dim: int) -> Any:
    if not all(isinstance(entry, Tensor) for entry in entries):
        return list(entries)
    tensors = [to_device(entry, device) for entry in entries]
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"the outputs of the replicas{f', `{leaf}`,' if leaf.path else ''} cannot be joined "
            f"along dimension {dim} (got shapes {shapes}); gather_to_one_device=False or "
            "except_keywords leaves them as they are"
        ) from error


def _is_under(leaf: Leaf, name: str) -> bool:
    """Whether a key on the way to the leaf is ``name``, or the way begins with ``name``."""
    parts = tuple(name.split("."))
    keys = [part for part in leaf.path if isinstance(part, Key)]
    return name in keys or leaf.path[: len(parts)] == parts


def _report_unknown(names: Collection[str], leaves: list[Leaf]) -> None:
    unknown = [name for name in names if not any(_is_under(leaf, name) for leaf in leaves)]
    if unknown:
        there = ", ".join(f"`{leaf}`" for leaf in leaves if leaf.path) or "none"
        warn(
            f"except_keywords names {', '.join(map(repr, unknown))}, which the output does not "
            f"have; it has {there}",
        )


def _difference(first: Any, other: Any, index: int) -> str:
    """Says how two outputs differ, as exactly as their leaves tell."""
    mine = {str(leaf) for leaf in flatten(first)[0]}
    theirs = {str(leaf) for leaf in flatten(other)[0]}
    missing = [f"only replica 0 has `{path}`" for path in sorted(mine - theirs)]
    missing += [f"only replica {index} has `{path}`" for path in sorted(theirs - mine)]
    if not missing or "" in mine | theirs:
        missing = [f"replica 0: {_outline(first)}, replica {index}: {_outline(other)}"]
    text = f"the outputs of the replicas must be alike in structure ({'; '.join(missing)})"
    if any(part.isdigit() for path in mine ^ theirs for part in path.split(".")):
        text += (
            "; a list per sample is returned in an object of a class of your own, of which comes "
            "a list with one entry per replica"
        )
    return text


def _outline(output: Any) -> str:
    """A container's type and keys or length, for messages."""
    if isinstance(output, dict):
        return f"{type(output).__name__} with keys {list(output)}"
    if isinstance(output, (list, tuple)):
        return f"{type(output).__name__} of length {len(output)}"
    return type(output).__name__
