"""Errors of a forward whose replicas run together, checks of arguments, and words of messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TypeGuard

from torch import nn

__all__ = ["ReplicaFailed", "ReplicasDiverged", "ReplicationError"]


def path_or_root(path: str) -> str:
    return path or "(root)"


def describe_error(error: BaseException) -> str:
    """Returns ``ValueError: its text``, or only the type if making the text raises."""
    name = type(error).__name__
    try:
        text = str(error)
        return f"{name}: {text}" if text else name
    except Exception:  # of the error's own method; it must not hide the error
        return name


def lost_derivatives(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{where}: torch.func transforms and forward-mode derivatives do not reach other copies, "
        "so they are not supported across replicas and processes; compute them on one device"
    )


def listed(numbers: Iterable[int], kind: str = "replica") -> str:
    """Returns ``"replicas 0, 2"`` for ``[0, 2]``."""
    texts = [str(number) for number in numbers]
    return f"{kind}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


def first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = sys.maxsize
) -> str:
    """Aligns cells under their titles: to the right from column ``numbers_from`` on."""
    columns = []
    for index, column in enumerate(zip(titles, *rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index >= numbers_from else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


class ReplicationError(RuntimeError):
    """The base class of all errors of this package."""


class ReplicaFailed(ReplicationError):
    """Another replica raised, so the value that this replica waits for cannot arrive.

    Its ``__cause__`` is that error, which the caller of the forward gets. It has none after a
    Ctrl-C in the caller.
    """


class ReplicasDiverged(ReplicationError):
    """The calls of the replicas do not match, so the values that they wait for cannot arrive.

    For example, a replica skips a layer, or passes a tensor of another shape or dtype.
    """


def add_note(error: BaseException, note: str) -> None:
    """Like `BaseException.add_note`, but once per note, and even for an error that is frozen."""
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list) and note not in notes:  # one error may be raised again and again
        notes.append(note)


def origin(index: int, size: int) -> str:
    return f"in replica {index} of {size}"


# -- checks of arguments --------------------------------------------------------------------------


def is_int(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_list(name: str, items: object) -> None:
    """Raises TypeError if ``items`` is not a list: a mapping or a generator, for example."""
    is_sequence = hasattr(items, "__len__") and hasattr(items, "__getitem__")
    if isinstance(items, (Mapping, str)) or not is_sequence:
        raise TypeError(
            f"{name} must be a list with one item per replica (got {type(items).__name__})"
        )


def check_module(value: object) -> None:
    if not isinstance(value, nn.Module):
        raise TypeError(f"expected a torch.nn.Module (got {type(value).__name__})")


def checked_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns a list of names as a tuple, or raises TypeError if it is a single name, say."""
    is_list = isinstance(names, Iterable) and not isinstance(names, (str, bytes))
    result = tuple(names) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in result):
        raise TypeError(f"{argument} must be a list of names (got {names!r})")
    return result
