"""Joins the outputs of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from replication._torch import SequenceKey
from replication.devices import (
    DeviceLike,
    check_available,
    check_list,
    checked_names,
    parse_device,
    to_device,
)
from replication.tree import (
    DifferentStructure,
    Path,
    Scattered,
    flatten_together,
    name_of,
    open_any,
    unflatten,
)
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

    def join(path: Path, entries: tuple[Any, ...]) -> Any:
        return _joined(path, entries, device, dim)

    return join_leaves(outputs, join, gather_to_one_device, except_keywords)


def join_leaves(
    outputs: Sequence[Any],
    join: Callable[[Path, tuple[Any, ...]], Any],
    gather_to_one_device: bool = True,
    except_keywords: Collection[str] = (),
) -> Any:
    """Makes one object of several of the same structure; ``join`` makes one leaf of several."""
    check_list("outputs", outputs)
    if not len(outputs):
        raise ValueError("expected the output of at least one replica (got none)")
    try:
        rows, spec = flatten_together(outputs)
    except DifferentStructure as error:
        raise ValueError(_difference(error)) from None
    _report_unknown(except_keywords, [path for path, _ in rows])
    joined: list[Any] = []
    for path, entries in rows:
        keep = not gather_to_one_device or any(_is_under(path, name) for name in except_keywords)
        if all(entry is None for entry in entries):
            joined.append(None)
        else:
            joined.append(Scattered(entries) if keep else join(path, entries))
    return unflatten(spec, joined)


def _joined(path: Path, entries: tuple[Any, ...], device: torch.device, dim: int) -> Any:
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
            f"the outputs of the replicas{f', `{path}`,' if path else ''} cannot be joined "
            f"along dimension {dim} (got shapes {shapes}); gather_to_one_device=False or "
            "except_keywords leaves them as they are"
        ) from error


def _is_under(path: Path, name: str) -> bool:
    """Whether a key or field on the path is called ``name``, or the path begins with ``name``."""
    names = [name_of(key) for key in path if not isinstance(key, SequenceKey)]
    return name in names or f"{path}.".startswith(f"{name}.")


def _report_unknown(names: Collection[str], paths: list[Path]) -> None:
    unknown = [name for name in names if not any(_is_under(path, name) for path in paths)]
    if unknown:
        there = ", ".join(f"`{path}`" for path in paths if path) or "none"
        warn(
            f"except_keywords names {', '.join(map(repr, unknown))}, which the output does not "
            f"have; it has {there}",
        )


def _difference(error: DifferentStructure) -> str:
    """Says how the outputs of two replicas differ."""
    mine, theirs = (_children(error.path, tree) for tree in (error.first, error.other))
    missing = [f"only replica 0 has `{path}`" for path in mine if path not in theirs]
    missing += [f"only replica {error.index} has `{path}`" for path in theirs if path not in mine]
    if missing and type(error.first) is type(error.other):
        what = "; ".join(missing)
    else:
        at = f" at `{error.path}`" if error.path else ""
        what = (
            f"replica 0: {_outline(error.first)}, "
            f"replica {error.index}: {_outline(error.other)}{at}"
        )
    text = f"the outputs of the replicas must be alike in structure ({what})"
    if isinstance(error.first, (list, tuple)) or isinstance(error.other, (list, tuple)):
        text += "; to keep one list per sample, wrap it in a class of your own"
    return text


def _children(path: Path, tree: Any) -> list[Path]:
    """The paths to the parts of a container."""
    container = open_any(tree)
    return [] if container is None else [Path((*path, key)) for key in container.keys]


def _outline(output: Any) -> str:
    """A container's type and keys or length, for messages."""
    if isinstance(output, dict):
        return f"{type(output).__name__} with keys {list(output)}"
    if isinstance(output, (list, tuple)):
        return f"{type(output).__name__} of length {len(output)}"
    return type(output).__name__
