"""Nested containers: their leaves, the paths to the leaves, and the same containers around others.

Two kinds of trees are walked. Arguments and outputs may hold anything that torch's pytree knows,
and dataclasses, `UserDict` and `UserList`. Plain attributes of modules are searched in the
containers of the standard library only. How a container is opened and made again is one class
for each kind of container (`Builtin`, `Registered`, `Wrapper`, `Record`).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import GetAttrKey, MappingKey, SequenceKey, pytree_node

__all__ = ["Scattered"]


class Scattered(tuple[Any, ...]):
    """One entry per replica, in replica order.

    `DataParallel` returns it where it does not gather, and takes it apart again among the
    arguments of the next network: entry i goes to replica i, as it is. It may stand for any
    argument, or anywhere inside one. Otherwise it is a tuple. A slice or a sum of it is a plain
    tuple::

        features = extract(images)            # gather_to_one_device=False
        doubled = Scattered(2 * f for f in features)
        scores = classify(doubled)

    As the ``collate_fn`` of a `torch.utils.data.DataLoader` it turns n items of a data set, each
    of them a batch for one replica, into the argument for n replicas.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Scattered{super().__repr__()}"


class Path(tuple[Any, ...]):
    """The keys that lead to a leaf, as torch's pytree has them. Its text is dotted: ``a.0.b``."""

    __slots__ = ()

    def __str__(self) -> str:
        return ".".join(map(name_of, self))


def name_of(key: Any) -> str:
    """The name of one step of a path: ``[2]``, ``["out"]`` and ``.out`` are "2", "out", "out"."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Leaf(NamedTuple):
    """An object that is not opened, and the path to it."""

    path: Path
    value: Any


class DifferentStructure(ValueError):
    """Two trees are not made of the same containers with the same keys."""

    def __init__(self, path: Path, index: int, first: Any, other: Any) -> None:
        super().__init__(f"tree {index} differs from tree 0 at `{path}`")
        self.path = path
        self.index = index
        self.first = first
        self.other = other


# -- containers --------------------------------------------------------------------------------

#: New objects by the identity of the old ones, which are kept so that no identity is used again.
Made = dict[int, tuple[Any, Any]]

_BASES = (list, tuple, OrderedDict, defaultdict, dict, deque)
_DICTS = (dict, OrderedDict, defaultdict)
#: Types whose objects hold nothing. Most items and attributes are of these.
PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))
#: Tuples that are never opened.
_WHOLE = (PackedSequence, Scattered)


class Container:
    """An opened container. Two have the same structure if their kinds and their keys match."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.kind: Any = type(original)
        self.values: list[Any] = []

    @cached_property
    def keys(self) -> list[Any]:
        """One key for each value: its position, its key or the name of its field."""
        raise NotImplementedError

    def values_of(self, keys: list[Any]) -> list[Any]:
        """The values in the order of ``keys``."""
        if keys == self.keys:
            return self.values
        by_key = dict(zip(self.keys, self.values, strict=True))
        return [by_key[key] for key in keys]

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        """The same container around other values, as a new object.

        One that can be made empty is noted in ``made`` before the first value is asked for.
        """
        raise NotImplementedError


class Builtin(Container):
    """A list, tuple, dict or deque, or an object of a derived class, whose own code never runs."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self._base: Any = next(base for base in type(original).__mro__ if base in _BASES)
        self.values = list(self._base.__iter__(original))
        if issubclass(self._base, dict):
            self._names = self.values
            self.values = [dict.__getitem__(original, name) for name in self._names]
        if self.kind in _DICTS:
            self.kind = dict

    @cached_property
    def keys(self) -> list[Any]:
        if issubclass(self._base, dict):
            return [MappingKey(name) for name in self._names]
        names = _field_names(type(self.original)) if self._base is tuple else ()
        if len(names) == len(self.values):
            return [GetAttrKey(name) for name in names]
        return [SequenceKey(index) for index in range(len(self.values))]

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        old, base = self.original, self._base
        if base is tuple:
            if hasattr(type(old), "n_sequence_fields"):  # made in C: torch.return_types.max, say
                return type(old)(values)
            new = tuple.__new__(type(old), values)
        else:
            new = base.__new__(type(old))
            made[id(old)] = old, new
            if base is deque:
                deque.__init__(new, (), old.maxlen)
            if base is defaultdict:
                defaultdict.__init__(new, old.default_factory)
            if issubclass(base, dict):
                for name, value in zip(self._names, values, strict=True):
                    base.__setitem__(new, name, value)
            else:
                for value in values:
                    base.append(new, value)
        if type(old) not in _BASES:
            _copy_attributes(old, new)
        return new


def _copy_attributes(old: Any, new: Any) -> None:
    """Gives ``new`` the attributes of ``old``. An attribute that mirrors an item still does."""
    for kind in type(old).__mro__:
        for slot in vars(kind).values() if kind not in _BASES else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it has not been set
                    slot.__set__(new, slot.__get__(old))
    try:
        attributes = object.__getattribute__(old, "__dict__")
    except AttributeError:  # there are slots only
        return
    if attributes is old:  # its keys are its attributes
        object.__setattr__(new, "__dict__", new)
        return
    copied = object.__getattribute__(new, "__dict__")
    for name, value in attributes.items():
        mirrors = isinstance(old, dict) and dict.get(old, name, dict) is value
        copied[name] = dict.__getitem__(new, name) if mirrors else value


def _field_names(kind: type) -> tuple[str, ...]:
    """The names of the fields of a namedtuple, or of a tuple that is made in C."""
    names = getattr(kind, "_fields", None) or getattr(kind, "__match_args__", ())
    return tuple(names) if isinstance(names, (tuple, list)) else ()


class Registered(Container):
    """A container that is registered with torch's pytree."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self._node = pytree_node(type(original))
        children, self._context = self._node.flatten_fn(original)
        self.values = list(children)
        self.kind = type(original), self._context

    @cached_property
    def keys(self) -> list[Any]:
        old, node = self.original, self._node
        if node.flatten_with_keys_fn is not None:
            keys = [key for key, _ in node.flatten_with_keys_fn(old)[0]]
        elif isinstance(old, dict):
            keys = [MappingKey(key) for key in old]
        elif dataclasses.is_dataclass(old):
            keys = [GetAttrKey(field.name) for field in dataclasses.fields(old)]
        else:
            keys = [GetAttrKey(name) for name in _field_names(type(old))]
        if len(keys) == len(self.values):
            return keys
        return [SequenceKey(index) for index in range(len(self.values))]

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        return self._node.unflatten_fn(list(values), self._context)


class Wrapper(Container):
    """A `UserDict` or `UserList`, which keeps its items in ``data``."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self._data = Builtin(original.data)
        self.values = self._data.values

    @cached_property
    def keys(self) -> list[Any]:
        return self._data.keys

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        new = object.__new__(type(self.original))
        made[id(self.original)] = self.original, new
        _copy_attributes(self.original, new)
        new.data = self._data.rebuilt(values, made)
        return new


class Record(Container):
    """A dataclass, whose constructor does not run again."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self._names = [f.name for f in dataclasses.fields(original) if hasattr(original, f.name)]
        self.values = [getattr(original, name) for name in self._names]

    @cached_property
    def keys(self) -> list[Any]:
        return [GetAttrKey(name) for name in self._names]

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        new = object.__new__(type(self.original))
        made[id(self.original)] = self.original, new
        _copy_attributes(self.original, new)
        for name, value in zip(self._names, values, strict=True):
            object.__setattr__(new, name, value)  # works on a frozen dataclass as well
        return new


def open_builtin(value: Any) -> Container | None:
    """Opens the containers of the standard library; None for everything else."""
    kind = type(value)
    if kind in PLAIN or not issubclass(kind, _BASES) or issubclass(kind, _WHOLE):
        return None
    return Builtin(value)


def open_any(value: Any) -> Container | None:
    """Opens all containers that arguments and outputs may have; None for everything else."""
    kind = type(value)
    if kind in PLAIN or issubclass(kind, (Tensor, nn.Module, *_WHOLE)):
        return None
    if kind not in _BASES and pytree_node(kind) is not None:
        return Registered(value)
    if issubclass(kind, _BASES):
        return Builtin(value)
    if issubclass(kind, (UserDict, UserList)) and type(value.data) in _BASES:
        return Wrapper(value)
    return Record(value) if dataclasses.is_dataclass(kind) else None


# -- walks -------------------------------------------------------------------------------------


def leaves_of(tree: Any, opened: Callable[[Any], Container | None] = open_any) -> Iterator[Any]:
    """The leaves of a tree except for plain numbers and strings, in any order.

    Each container is looked into once, however often the tree holds it.
    """
    pending, seen = [tree], {}
    while pending:
        value = pending.pop()
        container = opened(value)
        if container is None:
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value  # kept, so that no other object gets its identity
            pending += (item for item in container.values if type(item) not in PLAIN)


class Spec(NamedTuple):
    """The containers around some leaves."""

    #: None for a leaf.
    container: Container | None
    children: list[Spec]


def flatten(tree: Any) -> tuple[list[Leaf], Spec]:
    """The leaves of an argument or an output, and the containers around them.

    An object that is no container is one leaf. So is ``None``, and so is a container that holds
    nothing to be split, unless it is one of the standard library or a namedtuple.
    """
    rows, spec = flatten_together([tree])
    return [Leaf(path, value) for path, (value,) in rows], spec


def flatten_together(trees: Sequence[Any]) -> tuple[list[tuple[Path, tuple[Any, ...]]], Spec]:
    """The leaves that several trees have at each path, and the containers of the first tree.

    Raises:
        DifferentStructure: The trees differ in containers or keys.
    """
    rows: list[tuple[Path, tuple[Any, ...]]] = []
    return rows, _flatten_into(rows, Path(), tuple(trees), ())


# The recursive functions are no closures: one that refers to itself would be in a cycle, which
# keeps tensors alive until the next garbage collection.


def _flatten_into(
    rows: list[tuple[Path, tuple[Any, ...]]],
    path: Path,
    trees: tuple[Any, ...],
    above: tuple[int, ...],
) -> Spec:
    containers = _opened(path, trees, above)
    if containers is None:
        rows.append((path, trees))
        return Spec(None, [])
    first = containers[0]
    entries = zip(*(container.values_of(first.keys) for container in containers), strict=True)
    above = (*above, id(trees[0]))
    children = [
        _flatten_into(rows, Path((*path, key)), values, above)
        for key, values in zip(first.keys, entries, strict=True)
    ]
    return Spec(first, children)


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """The same containers around other leaves, as new objects."""
    return _unflatten_from(iter(leaves), spec)


def _unflatten_from(leaves: Iterator[Any], spec: Spec) -> Any:
    if spec.container is None:
        return next(leaves)
    return spec.container.rebuilt((_unflatten_from(leaves, s) for s in spec.children), {})


def _opened(path: Path, trees: tuple[Any, ...], above: tuple[int, ...]) -> list[Container] | None:
    """Opens what several trees have at a path; None if these are leaves."""
    if not any(_is_standard(type(tree)) or _holds_batch(tree) for tree in trees):
        return None
    if id(trees[0]) in above:
        raise ValueError(
            f"a container that is split or joined must not contain itself (`{path}` does); wrap "
            "what refers to itself in an object of a class of your own"
        )
    containers: list[Any] = [open_any(tree) for tree in trees]
    for index, container in enumerate(containers):
        if not _is_alike(containers[0], container):
            raise DifferentStructure(path, index, trees[0], trees[index])
    return containers


def _is_alike(one: Container | None, other: Container | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    return bool(one.kind == other.kind) and set(one.keys) == set(other.keys)


def _is_standard(kind: type) -> bool:
    """Whether this is a class of the standard library, or of namedtuples: always opened."""
    return kind in _BASES or (
        issubclass(kind, tuple) and hasattr(kind, "_fields") and not issubclass(kind, _WHOLE)
    )


def _holds_batch(value: Any) -> bool:
    """Whether a container holds anything that is split or joined."""
    if open_any(value) is None:
        return False
    return any(isinstance(leaf, (Tensor, Scattered, PackedSequence)) for leaf in leaves_of(value))


def replace_leaves(
    function: Callable[[Any], Any],
    tree: Any,
    made: Made,
    opened: Callable[[Any], Container | None] = open_any,
) -> Any:
    """The tree with ``function(leaf)`` in place of each leaf.

    A container in which no leaf changes stays the object that it is. One that several trees hold
    is replaced by one new object in all of them, and one that contains itself does so again.

    Args:
        function: Returns the new leaf, or the same object if it may stay.
        tree: Any object.
        made: What has been replaced so far. Trees that belong together share one dictionary.
        opened: Opens a container; None for what is a leaf.
    """

    container = opened(tree)
    if container is None:
        return _replaced(function, tree, made)
    if id(tree) in made:
        return made[id(tree)][1]
    if all(_replaced(function, leaf, made) is leaf for leaf in leaves_of(tree, opened)):
        return tree
    values = (replace_leaves(function, value, made, opened) for value in container.values)
    new = container.rebuilt(values, made)
    # A tuple in a cycle has been made already, on the way through the cycle.
    return made.setdefault(id(tree), (tree, new))[1]


def _replaced(function: Callable[[Any], Any], leaf: Any, made: Made) -> Any:
    if type(leaf) in PLAIN:
        return leaf
    if id(leaf) not in made:
        made[id(leaf)] = leaf, function(leaf)
    return made[id(leaf)][1]
