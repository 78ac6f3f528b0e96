"""Checks of arguments, for several rooms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TypeGuard

from torch import nn

__all__: list[str] = []


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is a whole number (of NumPy's, say), and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_list(name: str, items: object) -> None:
    """Raises TypeError on what has no items by index: mappings, generators."""
    if isinstance(items, (Mapping, str)) or not (
        hasattr(items, "__len__") and hasattr(items, "__getitem__")
    ):
        raise TypeError(
            f"{name} must be a list with one item per replica (got {type(items).__name__})"
        )


def check_module(value: object) -> None:
    """Raises TypeError on what is no module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"expected a torch.nn.Module (got {type(value).__name__})")


def checked_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names of leaves, as a tuple.

    Raises:
        TypeError: Not a list of names; a single name is none.
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a list of names (got {names!r})")
    found = tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a list of names (got {list(found)})")
    return found
