"""Checks of arguments, for several rooms."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

from torch import nn

__all__: list[str] = []


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_module(value: object) -> None:
    """Raises TypeError on what is no module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"expected a torch.nn.Module (got {type(value).__name__})")


def checked_names(argument: str, names: Collection[str]) -> tuple[str, ...]:
    """Names of leaves, as a tuple.

    Raises:
        TypeError: Not a list of names; a single name is none.
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Collection):
        raise TypeError(f"{argument} must be a list of names (got {names!r})")
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a list of names (got {list(names)})")
    return tuple(names)
