"""Joins the outputs of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from replication._torch import SequenceKey
from replication.checks import check_list, checked_names
from replication.containers import Scattered, open_any
from replication.devices import DeviceLike, parse_device, to_device
from replication.tree import Path, flatten_together, name_of
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
    """Joins the outputs of the replicas, which must have the same structure.

    Tensors are concatenated along ``dim`` on ``target_device``, in the order of ``outputs``. 0-dim
    tensors become a vector. ``None`` stays ``None``. Any other object becomes a list with one
    entry per replica. Containers keep their types, and their entries are joined one by one, so a
    list with one tensor per sample is wrong: it mixes samples of different replicas. Return such
    results in an object of a class that is not a container.

    >>> import torch
    >>> from replication import gather
    >>> gather([{"x": torch.ones(2), "n": 2}, {"x": torch.ones(1), "n": 1}], "cpu")
    {'x': tensor([1., 1., 1.]), 'n': [2, 1]}

    Args:
        gather_to_one_device: If False, nothing is joined: each leaf becomes a `Scattered`.
        except_keywords: Names of outputs that become `Scattered`; see `DataParallel`.

    Raises:
        ValueError: The outputs differ in structure, or tensors cannot be joined.
    """
    return join_leaves(
        outputs,
        partial(_joined, parse_device(target_device), dim),
        gather_to_one_device,
        checked_names("except_keywords", except_keywords),
    )


def join_leaves(
    outputs: Sequence[Any],
    join: Callable[[Path, tuple[Any, ...]], Any],
    gather_to_one_device: bool,
    except_keywords: Collection[str],
) -> Any:
    """Joins outputs of the same structure into one. ``join`` makes one leaf of several."""
    check_list("outputs", outputs)
    if not len(outputs):
        raise ValueError("expected the output of at least one replica (got none)")
    rows, rebuild = flatten_together(outputs)
    if except_keywords:
        _warn_of_unknown(except_keywords, outputs[0], [path for path, _ in rows])
    joined: list[Any] = []
    for path, entries in rows:
        stays = not gather_to_one_device or any(name in except_keywords for name in _names(path))
        if all(entry is None for entry in entries):
            joined.append(None)
        else:
            joined.append(Scattered(entries) if stays else join(path, entries))
    return rebuild(joined)


def _joined(device: torch.device, dim: int, path: Path, entries: tuple[Any, ...]) -> Any:
    if not all(isinstance(entry, Tensor) for entry in entries):
        return list(entries)
    tensors = [to_device(entry, device) for entry in entries]
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    try:
        return torch.cat(tensors, dim)
    except (RuntimeError, IndexError) as error:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"can't concatenate the replicas' outputs{f' `{path}`' if path else ''} along "
            f"dimension {dim} (got shapes {shapes}); to get one entry per replica instead, pass "
            "their name to DataParallel in except_keywords, or gather_to_one_device=False"
        ) from error


def _names(path: Path) -> list[str]:
    """Returns the keys and fields on a path. Positions in lists have no name."""
    return [name_of(key) for key in path if not isinstance(key, SequenceKey)]


def _names_in(output: Any) -> list[str]:
    """Returns the keys and fields of an output at any depth, even of empty containers."""
    container = open_any(output)
    if container is None:
        return []
    keys = container.keys()
    names = [name_of(key) for key in keys if not isinstance(key, SequenceKey)]
    return names + [name for value in container.values for name in _names_in(value)]


def _warn_of_unknown(names: Collection[str], output: Any, paths: list[Path]) -> None:
    known = _names_in(output)
    if unknown := [repr(name) for name in names if name not in known]:
        has = ", ".join(f"`{path}`" for path in paths if path) or "none"
        warn(f"except_keywords names {', '.join(unknown)}, which the output lacks; it has {has}")
