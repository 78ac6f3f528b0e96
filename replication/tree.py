"""Walks through trees of containers: finds their leaves, and puts others in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from replication._torch import SequenceKey
from replication.containers import BASES, SCALARS, Opened, Scattered, open_any


class Path(tuple[Any, ...]):
    """The keys that lead to a leaf, in the classes of torch's pytree. ``str`` is ``a.0.b``."""

    __slots__ = ()

    def __str__(self) -> str:
        return ".".join(map(name_of, self))


def name_of(key: Any) -> str:
    """Returns the name of one key: ``[2]``, ``["out"]`` and ``.out`` give "2", "out" and "out"."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Leaf(NamedTuple):
    """An object that is not opened, and the path to it."""

    path: Path
    value: Any


def leaves_of(tree: Any, opened: Callable[[Any], Opened | None] = open_any) -> Iterator[Any]:
    """Yields a tree's leaves except for numbers and strings, in any order, a container once."""
    pending, seen = [tree], {}
    while pending:
        value = pending.pop()
        container = opened(value)
        if container is None:
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value  # kept, so that no other object gets its identity
            pending += [item for item in container.values if type(item) not in SCALARS]


#: Makes the same containers around other leaves, as new objects.
Rebuild = Callable[[Iterable[Any]], Any]

#: A path, and the leaf of each tree at that path.
Row = tuple[Path, tuple[Any, ...]]


def flatten(tree: Any) -> tuple[list[Leaf], Rebuild]:
    """Returns the leaves of an argument or an output, and the containers around them."""
    rows, rebuild = flatten_together([tree])
    return [Leaf(path, values[0]) for path, values in rows], rebuild


def flatten_together(outputs: Sequence[Any]) -> tuple[list[Row], Rebuild]:
    """Returns the leaves of the replicas' outputs at each path, and the containers around them."""
    rows: list[Row] = []
    made_of = _flatten_into(rows, Path(), tuple(outputs))
    return rows, lambda leaves: made_of(iter(leaves))


# At the top of the module, because a function inside of `flatten_together` that refers to itself
# would make a cycle, which keeps the leaves (and their graphs) until the next garbage collection.
def _flatten_into(
    rows: list[Row], path: Path, trees: tuple[Any, ...]
) -> Callable[[Iterator[Any]], Any]:
    """Adds the leaves to the rows. Returns what rebuilds the tree around the next leaves."""
    opened = [open_any(tree) for tree in trees]
    if not any(c is not None and _is_split(t) for c, t in zip(opened, trees, strict=True)):
        rows.append((path, trees))
        return next
    first = opened[0]
    if first is None:
        raise _mismatch(
            path, trees, next(i for i, other in enumerate(opened) if other is not None)
        )
    keys, columns = first.keys(), [first.values]
    for index, other in enumerate(opened[1:], 1):
        values = None
        if other is not None and other.kind == first.kind:
            values = other.values_of(keys)
        if values is None:
            raise _mismatch(path, trees, index)
        columns.append(values)
    rebuild = first.rebuild
    children = [
        _flatten_into(rows, Path((*path, key)), tuple(values))
        for key, *values in zip(keys, *columns, strict=True)
    ]
    return lambda leaves: rebuild([child(leaves) for child in children])


def _mismatch(path: Path, trees: tuple[Any, ...], index: int) -> ValueError:
    return ValueError(
        f"the outputs of the replicas must have the same structure (replica 0: "
        f"{_outline(trees[0])}, replica {index}: {_outline(trees[index])}"
        f"{f' at `{path}`' if path else ''}); to keep one list per sample, wrap it in your own "
        "class"
    )


def _outline(tree: Any) -> str:
    container = open_any(tree)
    keys = container.keys() if container else []
    names = ", ".join(name_of(key) for key in keys if not isinstance(key, SequenceKey))
    items = f" with {names}" if names else f" of length {len(keys)}" if container else ""
    return type(tree).__name__ + items


def _is_split(container: Any) -> bool:
    """Whether a container is standard or a namedtuple, or holds anything to split or join."""
    kind = type(container)
    if kind in BASES or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return True
    return any(isinstance(x, (Tensor, Scattered, PackedSequence)) for x in leaves_of(container))


def replace_leaves(
    function: Callable[[Any], Any],
    tree: Any,
    opened: Callable[[Any], Opened | None] = open_any,
    made: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    # A container stays the same object if its items do. An object that several containers hold is
    # replaced by one new object in all of them: `made` has the old and the new one, by the id of
    # the old one, which is kept so that its id stays unique.
    if type(tree) in SCALARS:
        return tree
    made = {} if made is None else made
    if id(tree) not in made:
        # A container that contains itself still contains the old one: the new one is not yet made.
        made[id(tree)] = tree, tree
        container = opened(tree)
        if container is None:
            new = function(tree)
        else:
            old = container.values
            values = [replace_leaves(function, value, opened, made) for value in old]
            new = tree if all(map(is_, values, old)) else container.rebuild(values)
        made[id(tree)] = tree, new
    return made[id(tree)][1]
