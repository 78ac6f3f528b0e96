"""Nested containers: their leaves, where these are, and the same containers around other leaves.

torch's pytree does the walking, so that containers registered with it travel too. It knows the
exact types of the standard library; dataclasses, classes derived from ``dict``, and what has been
registered without names for its parts are opened here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from replication.torch_internals import (
    MappingKey,
    TreeSpec,
    pytree_node,
    register_pytree_node,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_map,
    tree_unflatten,
)

__all__: list[str] = []


class Leaf(NamedTuple):
    """A leaf, and the keys, field names and positions that lead to it."""

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return ".".join(self.path)


class Structure:
    """The containers around some leaves."""

    def __init__(self, spec: TreeSpec) -> None:
        self._spec = spec

    def around(self, leaves: Iterable[Any]) -> Any:
        """The same containers around other leaves; new objects, of the same types."""
        return tree_unflatten(list(leaves), self._spec)

    def leaves_of(self, tree: Any) -> list[Any] | None:
        """The leaves of an object of the same structure, in the order of this one; else None."""
        try:
            leaves: list[Any] = self._spec.flatten_up_to(_opened(tree))  # keys in any order
        except ValueError:
            return None
        return leaves if all(map(tree_is_leaf, leaves)) else None


def flatten(tree: Any) -> tuple[list[Leaf], Structure]:
    """Takes an object apart into its leaves and the containers around them.

    An object that is no container is one leaf; so is ``None``.
    """
    pairs, spec = tree_flatten_with_path(_opened(tree))
    return [Leaf(tuple(map(_name, path)), value) for path, value in pairs], Structure(spec)


def _name(key: Any) -> str:
    """``[2]``, ``["out"]`` and ``.out`` as parts of a dotted path."""
    for kind in ("idx", "key", "name"):
        if hasattr(key, kind):
            return str(getattr(key, kind))
    return str(key)


# -- what pytree does not know -----------------------------------------------------------------


class Origin:
    """What an opened object is rebuilt from. Equal if classes and names are."""

    def __init__(self, original: Any, names: tuple[Any, ...]) -> None:
        self.original = original
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin) and (type(self.original), self.names) == (
            type(other.original),
            other.names,
        )

    def __hash__(self) -> int:
        return hash((type(self.original), self.names))

    def rebuilt(self, values: Iterable[Any]) -> Any:
        """A copy of the original around other values; no constructor runs."""
        node = pytree_node(type(self.original))
        if node is not None:
            return node.unflatten_fn(list(values), node.flatten_fn(self.original)[1])
        new = copy.copy(self.original)
        for name, value in zip(self.names, values, strict=True):
            if isinstance(new, dict):
                new[name] = value
            else:
                object.__setattr__(new, name, value)  # also where the dataclass is frozen
        return new


class Opened:
    """A container that pytree cannot walk, or not with names, as one that it can."""

    def __init__(self, values: list[Any], origin: Origin) -> None:
        self.values = values
        self.origin = origin


def _opened(tree: Any) -> Any:
    return tree_map(_open, tree, is_leaf=_has_no_names)


def _has_no_names(tree: Any) -> bool:
    """Whether a class is registered with pytree, but not how its parts are called."""
    node = pytree_node(type(tree))
    return node is not None and node.flatten_with_keys_fn is None


def _open(leaf: Any) -> Any:
    parts: dict[Any, Any]
    if _has_no_names(leaf):
        parts = dict(enumerate(pytree_node(type(leaf)).flatten_fn(leaf)[0]))
    elif isinstance(leaf, dict):
        parts = leaf
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    else:
        return leaf
    return Opened([_opened(part) for part in parts.values()], Origin(leaf, tuple(parts)))


def _flatten_opened(opened: Opened) -> tuple[list[Any], Origin]:
    return opened.values, opened.origin


def _flatten_opened_with_keys(opened: Opened) -> tuple[list[tuple[Any, Any]], Origin]:
    keys: list[Any] = [MappingKey(name) for name in opened.origin.names]
    return list(zip(keys, opened.values, strict=True)), opened.origin


def _unflatten_opened(values: Iterable[Any], origin: Origin) -> Any:
    return origin.rebuilt(values)


register_pytree_node(
    Opened,
    _flatten_opened,
    _unflatten_opened,
    flatten_with_keys_fn=_flatten_opened_with_keys,
)
