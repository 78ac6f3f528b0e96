"""Containers that arguments, outputs and attributes may have: opened, and rebuilt.

Arguments and outputs may hold all containers that torch's pytree knows, dataclasses, `UserDict`
and `UserList`. Attributes of modules are searched in lists, tuples and dicts only.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import GetAttrKey, MappingKey, SequenceKey, pytree_nodes

__all__ = ["Scattered"]


class Scattered(tuple[Any, ...]):
    """One entry per replica, in replica order.

    Use it where the batch is not one tensor that can be split: for lists with an item per sample,
    or for shards of sizes that you choose. `DataParallel` returns a `Scattered` for each output
    that it does not gather. As an argument of
    another network, or anywhere inside an argument, entry i of a `Scattered` goes to replica i
    unchanged. Everywhere else, for example in a module that runs without replicas, it is a plain
    tuple. Slices and sums of it lose the type, so wrap what you compute from it again::

        features = extract(images)            # gather_to_one_device=False
        scores = classify(Scattered(2 * f for f in features))

    It can be the ``collate_fn`` of a `torch.utils.data.DataLoader` whose items are each a batch
    for one replica.

    >>> import torch
    >>> from replication import DataParallel, Scattered
    >>> net = DataParallel(torch.nn.Identity(), ["cpu"] * 2)
    >>> net(Scattered([torch.zeros(1), torch.ones(2)]))
    tensor([0., 1., 1.])

    Args:
        iterable: The entries, of any type. Tensors may differ in their first dimension, and the
            tensors beside them in the call are split to the same lengths.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Scattered{super().__repr__()}"


BASES = (list, tuple, OrderedDict, defaultdict, dict)
#: Types whose objects hold nothing. Most items and attributes are of these.
SCALARS = frozenset((int, float, complex, bool, str, bytes, type(None)))
#: Types that are never opened, even if a derived class is a dataclass. `object.__new__` cannot
#: make errors, strings and numbers.
_CLOSED = (Tensor, nn.Module, BaseException, str, bytes, int, float, complex)


class Opened(NamedTuple):
    """An opened container. Two have the same structure if their kinds and their keys match."""

    kind: Any
    values: list[Any]
    #: Returns one key for each value: an index, a key of a mapping or the name of a field.
    keys: Callable[[], list[Any]]
    #: Returns the same container around other values, as a new object.
    rebuild: Callable[[list[Any]], Any]

    def values_of(self, keys: list[Any]) -> list[Any] | None:
        """Returns the values in the order of ``keys``, or None if it has other keys."""
        own = self.keys()
        if own == keys:
            return self.values
        by_key = dict(zip(own, self.values, strict=True))
        return [by_key[key] for key in keys] if by_key.keys() == set(keys) else None


def open_builtin(old: Any) -> Opened | None:
    """Opens a list, tuple or dict, or returns None; no method of a derived class runs."""
    kind = type(old)
    if not issubclass(kind, BASES) or issubclass(kind, (PackedSequence, Scattered)):
        return None
    if issubclass(kind, dict):
        return _open_dict(old)
    return _open_tuple(old) if issubclass(kind, tuple) else _open_list(old)


# Lists and dicts are copied first, because a replica of another forward may change the original
# meanwhile: reading its items may collect garbage, and thereby let another thread run.


def _open_list(old: Any) -> Opened:
    kind, values = type(old), list.copy(old)

    def rebuild(values: list[Any]) -> Any:
        new = list.__new__(kind)
        list.extend(new, values)
        if kind is not list:
            _copy_attributes(old, new)
        return new

    return Opened(kind, values, lambda: _field_keys(kind, len(values)), rebuild)


def _open_tuple(old: Any) -> Opened:
    kind: Any = type(old)
    values = list(tuple.__iter__(old))

    def rebuild(values: list[Any]) -> Any:
        if hasattr(kind, "n_sequence_fields"):  # made in C, such as torch.return_types.max
            return kind(values)
        new = tuple.__new__(kind, values)
        if kind is not tuple:
            _copy_attributes(old, new)
        return new

    return Opened(kind, values, lambda: _field_keys(kind, len(values)), rebuild)


def _open_dict(old: Any) -> Opened:
    kind: Any = type(old)
    base: Any = next(base for base in kind.__mro__ if base in BASES)
    if base is not OrderedDict:
        copied = dict.copy(old)
    else:  # of a derived class, its `copy` would run the constructor
        copied = OrderedDict.copy(old) if kind is OrderedDict else old
    items = list(base.items(copied))

    def rebuild(values: list[Any]) -> Any:
        new = base.__new__(kind)
        if base is defaultdict:
            defaultdict.__init__(new, old.default_factory)
        for (name, _), value in zip(items, values, strict=True):
            base.__setitem__(new, name, value)
        if kind is not base:
            _copy_attributes(old, new)
        return new

    values = [value for _, value in items]
    return Opened(kind, values, lambda: [MappingKey(name) for name, _ in items], rebuild)


def _open_registered(old: Any) -> Opened:
    node = pytree_nodes[type(old)]
    values, context = node.flatten_fn(old)
    values = list(values)

    def keys() -> list[Any]:
        if node.flatten_with_keys_fn is not None:
            return [key for key, _ in node.flatten_with_keys_fn(old)[0]]
        if isinstance(old, dict) and len(old) == len(values):
            return [MappingKey(key) for key in old]
        return _field_keys(type(old), len(values))

    return Opened((type(old), context), values, keys, lambda new: node.unflatten_fn(new, context))


def _open_fields(old: Any) -> Opened | None:
    """Opens a dataclass, `UserDict` or `UserList`, whose constructor does not run again."""
    kind: Any = type(old)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if hasattr(old, field.name)]
    elif issubclass(kind, (UserDict, UserList)):
        names = ["data"]
    else:
        return None

    def rebuild(values: list[Any]) -> Any:
        new = object.__new__(kind)
        _copy_attributes(old, new)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # works on a frozen dataclass as well
        return new

    values = [getattr(old, name) for name in names]
    return Opened(kind, values, lambda: list(map(GetAttrKey, names)), rebuild)


def open_any(value: Any) -> Opened | None:
    """Opens all containers that arguments and outputs may have. Returns None for other objects."""
    kind = type(value)
    if issubclass(kind, _CLOSED):
        return None
    if kind not in BASES and kind in pytree_nodes:
        return _open_registered(value)
    return open_builtin(value) or _open_fields(value)


def _field_keys(kind: type, count: int) -> list[Any]:
    # Namedtuples, dataclasses and tuples that are made in C have fields.
    names = getattr(kind, "_fields", None) or getattr(kind, "__match_args__", ())
    if isinstance(names, (tuple, list)) and len(names) == count:
        return [GetAttrKey(name) for name in names]
    return list(map(SequenceKey, range(count)))


def _copy_attributes(old: Any, new: Any) -> None:
    """Copies the attributes of ``old``. An attribute that is also an item becomes the new item."""
    # As of transformers' ModelOutput, a dict whose items are its attributes as well.
    attributes = getattr(old, "__dict__", {})
    if attributes is old:  # its keys are its attributes
        object.__setattr__(new, "__dict__", new)
        return
    for name, value in attributes.items():
        mirrors = isinstance(old, dict) and dict.get(old, name, dict) is value
        vars(new)[name] = dict.__getitem__(new, name) if mirrors else value
