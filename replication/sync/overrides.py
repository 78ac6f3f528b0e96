"""Overrides a method of one object, but not of its copies."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from replication.errors import ReplicationError

__all__: list[str] = []


#: The method that ``copy``, ``deepcopy`` and ``pickle`` look up on an object before its class.
_REDUCE = "__reduce_ex__"


def _without_overrides(owner: Callable[[], Any], protocol: Any) -> Any:
    """Reduces an object as if its methods were not overridden."""
    kind: Any = type(owner())
    reduced = kind.__reduce_ex__(owner(), protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    make, args, state, *rest = reduced
    state = {name: value for name, value in state.items() if name != _REDUCE}
    for name, value in list(state.items()):
        if isinstance(value, MethodOverride):
            del state[name]
            if value.previous is not None:
                state[name] = value.previous
    return make, args, state, *rest


class MethodOverride:
    """Overrides a method of one object, as an attribute of that object.

    It refers to the object weakly, so that no cycle keeps a replica and its parameters alive.
    Copies of the object (``copy``, ``deepcopy``, ``pickle``) do not get the override, which would
    run the method of the original object.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        #: Returns the object, or None when it is gone.
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self.name = name
        previous = owner.__dict__.get(name)
        #: A method that was set on the object before. The latest override replaces older ones.
        self.previous: Callable[..., Any] | None = (
            previous.previous if isinstance(previous, MethodOverride) else previous
        )

    def install(self) -> None:
        """Overrides the method."""
        state = self.owner().__dict__
        state[self.name] = self
        state[_REDUCE] = partial(_without_overrides, self.owner)

    def remove(self) -> None:
        """Restores the method."""
        owner = self.owner()
        if owner is not None:
            self.remove_from(owner)

    def remove_from(self, module: nn.Module) -> None:
        """Restores the method of ``module``, which may be a copy of the owner."""
        module.__dict__.pop(_REDUCE, None)
        if module.__dict__.get(self.name) is self:
            if self.previous is None:
                del module.__dict__[self.name]
            else:
                module.__dict__[self.name] = self.previous

    @property
    def original(self) -> Callable[..., Any]:
        """The method that is overridden."""
        if self.previous is not None:
            return self.previous
        owner = self.owner()
        if owner is None:
            raise ReplicationError(
                f"the replica is gone; keep the replica, not only its `{self.name}`"
            )
        return partial(getattr(type(owner), self.name), owner)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.owner(), self.name), {"previous": self.previous}
