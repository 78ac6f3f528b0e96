"""Plain attributes of a module, as each of its replicas should have them.

Tensors on another device are moved; parameters, buffers, submodules and bound methods become the
replica's own. That holds in lists, tuples and dicts, too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from replication.devices import to_device
from replication.torch_internals import compiled_module

__all__: list[str] = []

_CONTAINERS = (list, tuple, dict)
#: What these are made of.
_KINDS = (list, tuple, OrderedDict, defaultdict, dict)
_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))


def needs_moving(value: Any) -> bool:
    """Whether there is anything in it that may be another object in a replica."""
    if type(value) in _PLAIN:  # as most are
        return False
    return any(isinstance(leaf, (Tensor, nn.Module, MethodType)) for leaf in leaves(value))


def leaves(value: Any) -> Iterator[Any]:
    """What is in a container, but for what is plain; each container is looked into once."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if not isinstance(value, _CONTAINERS):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            # Most types are few and plain, also in a container of a million entries.
            pending += (item for _, item in _items(value) if type(item) not in _PLAIN)


def _kind_of(container: Any) -> Any:
    """What a container is made of, whatever class is derived from it."""
    return next(kind for kind in type(container).__mro__ if kind in _KINDS)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    kind = _kind_of(container)
    if issubclass(kind, dict):
        return cast(Iterable[tuple[Any, Any]], kind.items(container))
    return enumerate(kind.__iter__(container))


class Moving:
    """Plain attributes as the replica on ``device`` should have them.

    Args:
        device: Where its tensors are.
        copied: Its parameters, buffers and submodules, by the identity of the original.
    """

    def __init__(self, device: torch.device, copied: dict[int, Any]) -> None:
        self._device = device
        self._copied = copied
        # New containers, and moved tensors, by the identity of the old ones: a container that
        # contains itself does so again.
        self._made: dict[int, Any] = {}

    def moved(self, value: Any) -> Any:
        """The replica's; the same object where it may stay."""
        if not isinstance(value, _CONTAINERS):
            return self._moved_leaf(value)
        if id(value) in self._made:
            return self._made[id(value)]
        return self._rebuilt(value) if self._changes(value) else value

    def _rebuilt(self, value: Any) -> Any:
        # No code of a derived class runs, which may do anything.
        kind = _kind_of(value)
        if kind is tuple:
            items = [self.moved(item) for _, item in _items(value)]
            new = self._made.setdefault(id(value), tuple.__new__(type(value), items))
        else:
            new = self._made[id(value)] = kind.__new__(type(value))
            if kind is defaultdict:
                kind.__init__(new, value.default_factory)
            for key, item in _items(value):
                if kind is list:
                    list.append(new, self.moved(item))
                else:
                    kind.__setitem__(new, key, self.moved(item))
        attributes = vars(value) if hasattr(value, "__dict__") else {}
        if attributes is value:  # keys that are attributes, too
            object.__setattr__(new, "__dict__", new)
        elif attributes:
            vars(new).update((name, self.moved(item)) for name, item in attributes.items())
        return new

    def _changes(self, value: Any) -> bool:
        """Whether anything in it is another object in the replica."""
        return any(self._moved_leaf(leaf) is not leaf for leaf in leaves(value))

    def _moved_leaf(self, value: Any) -> Any:
        if isinstance(value, (Tensor, nn.Module)):
            known = self._copied.get(id(compiled_module(value)))
            if known is not None or isinstance(value, nn.Module):
                return value if known is None else known
            if value.device == self._device:
                return value
            if id(value) not in self._made:
                self._made[id(value)] = to_device(value, self._device)
            return self._made[id(value)]
        if isinstance(value, MethodType):
            owner = self._copied.get(id(value.__self__))
            return value if owner is None else MethodType(value.__func__, owner)
        return value
