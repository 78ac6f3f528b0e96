"""Flattens nested containers to leaves with paths, and rebuilds them with other leaves.

Arguments and outputs may hold all containers that torch's pytree knows, dataclasses, `UserDict`
and `UserList`. Plain attributes of modules are searched in containers of the standard library
only. One class opens and rebuilds each kind of container: `Builtin`, `Registered` or `Record`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import GetAttrKey, MappingKey, SequenceKey, pytree_node

__all__ = ["Scattered"]


class Scattered(tuple[Any, ...]):
    """One entry per replica, in replica order.

    `DataParallel` returns a `Scattered` for each output that it does not gather. As an argument of
    another network, or anywhere inside an argument, entry i of a `Scattered` goes to replica i
    unchanged. In all other respects it is a tuple. Slices and sums of it are plain tuples::

        features = extract(images)            # gather_to_one_device=False
        doubled = Scattered(2 * f for f in features)
        scores = classify(doubled)

    Use it as the ``collate_fn`` of a `torch.utils.data.DataLoader` if each item of the data set is
    a batch for one replica.

    >>> import torch
    >>> from replication import DataParallel, Scattered
    >>> net = DataParallel(torch.nn.Identity(), ["cpu"] * 2)
    >>> net(Scattered([torch.zeros(1), torch.ones(2)]))
    tensor([0., 1., 1.])

    See also `DataParallel`, `DataParallelCriterion`, `scatter` and `gather`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Scattered{super().__repr__()}"


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


class DifferentStructure(ValueError):
    """Two trees differ in their containers or in the keys of a container."""

    def __init__(self, path: Path, index: int, first: Any, other: Any) -> None:
        super().__init__(f"tree {index} differs from tree 0 at `{path}`")
        self.path = path
        self.index = index
        self.first = first
        self.other = other


# -- containers --------------------------------------------------------------------------------

#: The old and the new object, by the id of the old one, which is kept so that its id stays unique.
Made = dict[int, tuple[Any, Any]]

_BASES = (list, tuple, OrderedDict, defaultdict, dict, deque)
_DICTS = (dict, OrderedDict, defaultdict)
#: Types whose objects hold nothing. Most items and attributes are of these.
PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))
#: Types that are certainly no containers.
_LEAVES = PLAIN | {Tensor, nn.Parameter}
#: Tuples that are never opened.
_WHOLE = (PackedSequence, Scattered)


class Container:
    """An opened container. Two have the same structure if their kinds and their keys match."""

    def __init__(self, original: Any, kind: Any, values: Iterable[Any]) -> None:
        self.original = original
        self.kind = kind
        self.values = list(values)
        self._keys: list[Any] | None = None

    @property
    def keys(self) -> list[Any]:
        """One key for each value: an index, a key of a mapping or the name of a field."""
        # Not a `functools.cached_property`: on Python 3.11 it holds a lock while it computes.
        if self._keys is None:
            self._keys = self._made_keys()
        return self._keys

    def _made_keys(self) -> list[Any]:
        raise NotImplementedError

    def values_of(self, keys: list[Any]) -> list[Any]:
        """Returns the values in the order of ``keys``."""
        if keys == self.keys:
            return self.values
        by_key = dict(zip(self.keys, self.values, strict=True))
        return [by_key[key] for key in keys]

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        """Returns the same container around other values, as a new object.

        A container that can be made empty is noted in ``made`` before the first value is
        requested.
        """
        raise NotImplementedError


class Builtin(Container):
    """A list, tuple, dict or deque. Methods of derived classes are never called."""

    def __init__(self, original: Any) -> None:
        kind = type(original)
        is_base = kind in _BASES  # nearly always
        base: Any = kind if is_base else next(b for b in kind.__mro__ if b in _BASES)
        self._base: Any = base
        # Read in one call, because a replica of another forward may change the original meanwhile.
        if issubclass(base, dict):
            items = list(base.items(original))
            self._names = [name for name, _ in items]
            values = [value for _, value in items]
        else:
            snapshot = original.copy() if is_base and kind is not tuple else original
            values = base.__iter__(snapshot)
        super().__init__(original, dict if kind in _DICTS else kind, values)

    def _made_keys(self) -> list[Any]:
        if issubclass(self._base, dict):
            return [MappingKey(name) for name in self._names]
        names = _field_names(type(self.original)) if self._base is tuple else ()
        return _attribute_keys(names, len(self.values))

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        old, base = self.original, self._base
        if base is tuple:
            if hasattr(type(old), "n_sequence_fields"):  # made in C, as torch.return_types.max is
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


class Registered(Container):
    """A container that is registered with torch's pytree."""

    def __init__(self, original: Any) -> None:
        self._node = pytree_node(type(original))
        values, self._context = self._node.flatten_fn(original)
        super().__init__(original, (type(original), self._context), values)

    def _made_keys(self) -> list[Any]:
        old, count = self.original, len(self.values)
        if self._node.flatten_with_keys_fn is not None:
            return [key for key, _ in self._node.flatten_with_keys_fn(old)[0]]
        if isinstance(old, dict) and len(old) == count:
            return [MappingKey(key) for key in old]
        if dataclasses.is_dataclass(old):
            return _attribute_keys([field.name for field in dataclasses.fields(old)], count)
        return _attribute_keys(_field_names(type(old)), count)

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        return self._node.unflatten_fn(list(values), self._context)


class Record(Container):
    """An object opened by its fields: a dataclass, or the ``data`` of a `UserDict` or `UserList`.

    The constructor does not run again.
    """

    def __init__(self, original: Any) -> None:
        if dataclasses.is_dataclass(original):
            names = (field.name for field in dataclasses.fields(original))
            self._names = [name for name in names if hasattr(original, name)]
        else:
            self._names = ["data"]
        values = (getattr(original, name) for name in self._names)
        super().__init__(original, type(original), values)

    def _made_keys(self) -> list[Any]:
        return _attribute_keys(self._names, len(self.values))

    def rebuilt(self, values: Iterable[Any], made: Made) -> Any:
        new = object.__new__(type(self.original))
        made[id(self.original)] = self.original, new
        _copy_attributes(self.original, new)
        for name, value in zip(self._names, values, strict=True):
            object.__setattr__(new, name, value)  # works on a frozen dataclass as well
        return new


def _field_names(kind: type) -> Sequence[str]:
    """Returns the names of the fields of a namedtuple, or of a tuple that is made in C."""
    names = getattr(kind, "_fields", None) or getattr(kind, "__match_args__", ())
    return names if isinstance(names, (tuple, list)) else ()


def _attribute_keys(names: Sequence[str], count: int) -> list[Any]:
    """Returns a key for each of ``count`` values: its name, or its index if names are missing."""
    if len(names) == count:
        return [GetAttrKey(name) for name in names]
    return list(map(SequenceKey, range(count)))


def _copy_attributes(old: Any, new: Any) -> None:
    """Copies the attributes of ``old``. An attribute that is also an item becomes the new item."""
    for kind in type(old).__mro__:
        for slot in vars(kind).values() if kind not in _BASES else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # the slot is not set
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


def open_builtin(value: Any) -> Container | None:
    """Opens containers of the standard library. Returns None for any other object."""
    kind = type(value)
    if kind in PLAIN or not issubclass(kind, _BASES) or issubclass(kind, _WHOLE):
        return None
    return Builtin(value)


def open_any(value: Any) -> Container | None:
    """Opens all containers that arguments and outputs may have; None for any other object."""
    kind = type(value)
    if kind in PLAIN or issubclass(kind, (Tensor, nn.Module, *_WHOLE)):
        return None
    if kind not in _BASES and pytree_node(kind) is not None:
        return Registered(value)
    if issubclass(kind, _BASES):
        return Builtin(value)
    if issubclass(kind, (UserDict, UserList)) or dataclasses.is_dataclass(kind):
        return Record(value) if _is_made_by_object(kind) else None
    return None


def _is_made_by_object(kind: type) -> bool:
    """Whether ``object.__new__`` accepts a class. It refuses subclasses of str, for example."""
    is_heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has defined
    return next(base for base in kind.__mro__ if not base.__flags__ & is_heap_type) is object


# -- walks -------------------------------------------------------------------------------------


def leaves_of(tree: Any, opened: Callable[[Any], Container | None] = open_any) -> Iterator[Any]:
    """Yields the leaves of a tree except for plain numbers and strings, in any order.

    A container that the tree holds several times is searched once.
    """
    pending, seen = [tree], {}
    while pending:
        value = pending.pop()
        container = opened(value)
        if container is None:
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value  # kept, so that no other object gets its identity
            pending += [item for item in container.values if type(item) not in PLAIN]


class Spec(NamedTuple):
    """The containers around some leaves."""

    container: Container | None
    children: list[Spec]


def flatten(tree: Any) -> tuple[list[Leaf], Spec]:
    """Returns the leaves of an argument or an output, and the containers around them.

    ``None`` and objects that are not containers are leaves. A container without tensors is also a
    leaf, unless it is from the standard library or a namedtuple.
    """
    rows, spec = flatten_together([tree])
    return [Leaf(path, values[0]) for path, values in rows], spec


#: A path, and the leaf of each tree at that path.
Row = tuple[Path, tuple[Any, ...]]


def flatten_together(trees: Sequence[Any]) -> tuple[list[Row], Spec]:
    """Returns the leaves of several trees at each path, and the containers of the first tree.

    Raises:
        DifferentStructure: The trees differ in containers or keys.
    """
    rows: list[Row] = []
    spec = _flatten_into(rows, Path(), tuple(trees), ())
    return rows, spec


# The recursions are functions of the module: a nested function that refers to itself makes a
# cycle, which keeps the leaves (and their graphs) until the next garbage collection.


def _flatten_into(
    rows: list[Row], path: Path, trees: tuple[Any, ...], parents: tuple[int, ...]
) -> Spec:
    containers = _open_together(path, trees)
    if not containers:
        rows.append((path, trees))
        return Spec(None, [])
    if id(trees[0]) in parents:
        raise ValueError(
            f"a container that is split or joined must not contain itself (`{path}` does); wrap "
            "it in a class of your own"
        )
    first = containers[0]
    keys = first.keys
    others = [container.values_of(keys) for container in containers[1:]]
    columns = zip(first.values, *others, strict=True)
    parents = (*parents, id(trees[0]))
    children = [
        _flatten_into(rows, Path((*path, key)), values, parents)
        for key, values in zip(keys, columns, strict=True)
    ]
    return Spec(first, children)


def _open_together(path: Path, trees: tuple[Any, ...]) -> list[Container]:
    """Opens the values of several trees at a path. Returns an empty list for leaves."""
    if _LEAVES.issuperset(map(type, trees)):  # nearly always
        return []
    opened = [open_any(tree) for tree in trees]
    if not any(container is not None and _is_opened(container) for container in opened):
        return []
    first = opened[0]
    containers: list[Container] = []
    for index, container in enumerate(opened):
        if (
            first is None
            or container is None
            or container.kind != first.kind
            or (container is not first and set(container.keys) != set(first.keys))
        ):
            other = index or next(i for i, c in enumerate(opened) if c is not None)
            raise DifferentStructure(path, other, trees[0], trees[other])
        containers.append(container)
    return containers


def _is_opened(container: Container) -> bool:
    """Whether a container is standard or a namedtuple, or holds anything to split or join."""
    kind = type(container.original)
    if kind in _BASES or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return True
    return any(
        isinstance(leaf, (Tensor, Scattered, PackedSequence))
        for leaf in leaves_of(container.original)
    )


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Returns the same containers around other leaves, as new objects."""
    return _unflatten_from(iter(leaves), spec)


def _unflatten_from(leaves: Iterator[Any], spec: Spec) -> Any:
    if spec.container is None:
        return next(leaves)
    return spec.container.rebuilt([_unflatten_from(leaves, c) for c in spec.children], {})


def replace_leaves(
    function: Callable[[Any], Any],
    tree: Any,
    made: Made,
    opened: Callable[[Any], Container | None] = open_any,
) -> Any:
    """Returns the tree with ``function(leaf)`` in place of each leaf.

    ``function`` returns the same object to keep it. A container stays the same object if none of
    its leaves change. A container that several trees hold is replaced by one new object in all of
    them, if these share ``made``. One that contains itself still does so.
    """
    container = opened(tree)
    if container is None:
        return _new_leaf(function, tree, made)
    if id(tree) in made:
        return made[id(tree)][1]
    if all(_new_leaf(function, leaf, made) is leaf for leaf in leaves_of(tree, opened)):
        return tree
    values = (replace_leaves(function, value, made, opened) for value in container.values)
    new = container.rebuilt(values, made)
    # The walk around a cycle may have replaced a tuple already.
    return made.setdefault(id(tree), (tree, new))[1]


def _new_leaf(function: Callable[[Any], Any], leaf: Any, made: Made) -> Any:
    if type(leaf) in PLAIN:
        return leaf
    if id(leaf) not in made:
        made[id(leaf)] = leaf, function(leaf)
    return made[id(leaf)][1]
