"""Checks of arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TypeGuard

from torch import nn


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
