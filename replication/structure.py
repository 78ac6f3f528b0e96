"""Nested containers: their leaves, where these are, and the same containers around other leaves.

torch's pytree does the walking, so that containers registered with it travel too. It knows the
exact types of the standard library; what is derived from these, dataclasses, and what has been
registered without names for its parts are opened here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from replication.scattered import Scattered
from replication.torch_internals import (
    MappingKey,
    SequenceKey,
    TreeSpec,
    pytree_node,
    register_pytree_node,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_map,
    tree_unflatten,
)

__all__: list[str] = []


class Key(str):
    """A key of a mapping or the name of a field, on the way to a leaf; positions are plain str."""


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
        return None if any(map(_is_container, leaves)) else leaves


def flatten(tree: Any) -> tuple[list[Leaf], Structure]:
    """Takes an object apart into its leaves and the containers around them.

    An object that is no container is one leaf; so is ``None``, and so are containers of a class of
    their own that hold nothing to be split.
    """
    pairs, spec = tree_flatten_with_path(_opened(tree), is_leaf=_is_whole)
    return [Leaf(tuple(map(_name, path)), value) for path, value in pairs], Structure(spec)


def _name(key: Any) -> str:
    """``[2]``, ``["out"]`` and ``.out`` as parts of a dotted path."""
    if hasattr(key, "idx"):
        return str(key.idx)
    return Key(key.key if hasattr(key, "key") else key.name)


def _is_container(tree: Any) -> bool:
    return not (_is_whole(tree) or tree_is_leaf(tree))


# -- what pytree does not know -----------------------------------------------------------------


class Origin:
    """What an opened object is rebuilt from. Equal where classes, names and contexts are."""

    def __init__(self, original: Any, names: tuple[Any, ...]) -> None:
        self.original = original
        self.names = names

    def _context(self) -> Any:
        node = pytree_node(type(self.original))
        return None if node is None else node.flatten_fn(self.original)[1]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Origin)
            and (type(self.original), self.names) == (type(other.original), other.names)
            and bool(self._context() == other._context())
        )

    def __hash__(self) -> int:
        return hash((type(self.original), self.names))

    def rebuilt(self, values: Iterable[Any]) -> Any:
        """A copy of the original around other values; no constructor runs."""
        original, parts = self.original, dict(zip(self.names, values, strict=True))
        node = pytree_node(type(original))
        if node is not None:
            return node.unflatten_fn(list(parts.values()), self._context())
        if isinstance(original, tuple):
            return tuple.__new__(type(original), parts.values())
        new = copy.copy(original)
        if isinstance(original, (dict, list, deque)):
            if getattr(original, "__dict__", None) is original:  # keys that are attributes, too
                new.__dict__ = new
            for name, value in parts.items():
                new[name] = value
        else:
            for name, value in parts.items():
                object.__setattr__(new, name, value)  # also where the dataclass is frozen
        return new


class Opened:
    """A container that pytree cannot walk, or not with names, as one that it can."""

    def __init__(self, values: list[Any], origin: Origin) -> None:
        self.values = values
        self.origin = origin


def _opened(tree: Any) -> Any:
    return tree_map(_open, tree, is_leaf=_has_no_names)


def _is_whole(tree: Any) -> bool:
    """Whether something that pytree would walk is not to be taken apart."""
    return isinstance(tree, (torch.Size, PackedSequence, Scattered))


def _has_no_names(tree: Any) -> bool:
    """Whether pytree cannot walk a class, or does not know how its parts are called."""
    node = pytree_node(type(tree))
    return _is_whole(tree) or (node is not None and node.flatten_with_keys_fn is None)


def _open(leaf: Any) -> Any:
    parts = None if _is_whole(leaf) else _parts(leaf)
    if parts is None:
        return leaf
    values = [_opened(part) for part in parts.values()]
    if not any(_travels(value) for _, value in tree_flatten_with_path(values, _is_whole)[0]):
        return leaf  # nothing in it to be split or joined
    return Opened(values, Origin(leaf, tuple(parts)))


def _travels(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, Scattered, PackedSequence))


def _parts(container: Any) -> dict[Any, Any] | None:
    """The parts of a container, by their names; None for what is none."""
    node = pytree_node(type(container))
    if node is not None:
        children = node.flatten_fn(container)[0]
        return dict(zip(_names_of(container, len(children)), children, strict=True))
    if isinstance(container, dict):
        return {key: container[key] for key in sorted(container, key=repr)}  # in any order
    if isinstance(container, (list, tuple, deque)):
        return dict(enumerate(container))
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        names = [f.name for f in dataclasses.fields(container) if hasattr(container, f.name)]
        return {name: getattr(container, name) for name in names}
    return None


def _names_of(container: Any, count: int) -> Iterable[Any]:
    """What the parts of a container are probably called that is registered without names."""
    if isinstance(container, dict):
        names = list(container)
    elif dataclasses.is_dataclass(container):
        names = [field.name for field in dataclasses.fields(container)]
    else:
        names = list(getattr(container, "__match_args__", ()))
    return names if len(names) == count else range(count)


def _flatten_opened(opened: Opened) -> tuple[list[Any], Origin]:
    return opened.values, opened.origin


def _flatten_opened_with_keys(opened: Opened) -> tuple[list[tuple[Any, Any]], Origin]:
    keys: list[Any] = [
        SequenceKey(name) if isinstance(name, int) else MappingKey(name)
        for name in opened.origin.names
    ]
    return list(zip(keys, opened.values, strict=True)), opened.origin


def _unflatten_opened(values: Iterable[Any], origin: Origin) -> Any:
    return origin.rebuilt(values)


register_pytree_node(
    Opened,
    _flatten_opened,
    _unflatten_opened,
    flatten_with_keys_fn=_flatten_opened_with_keys,
)
