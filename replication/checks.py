"""Checks of arguments that several modules share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TypeGuard

from torch import nn

__all__: list[str] = []


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is a whole number, such as one of NumPy's, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_list(name: str, items: object) -> None:
    """Raises TypeError if ``items`` is not a list, such as a mapping or a generator."""
    if isinstance(items, (Mapping, str)) or not (
        hasattr(items, "__len__") and hasattr(items, "__getitem__")
    ):
        raise TypeError(
            f"{name} must be a list with one item per replica (got {type(items).__name__})"
        )


def check_module(value: object) -> None:
    """Raises TypeError if ``value`` is not a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"expected a torch.nn.Module (got {type(value).__name__})")


def checked_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Makes a tuple of a list of names.

    Raises:
        TypeError: ``names`` is not a list of names. A single name is not one either.
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a list of names (got {names!r})")
    found = tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a list of names (got {list(found)})")
    return found
