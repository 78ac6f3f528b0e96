"""Methods of single objects, in place of those of their class."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from replication.errors import ReplicationError

__all__: list[str] = []


class MethodOverride:
    """Stands in for a method of one object, as an attribute of that object.

    It holds the object weakly, so that no cycle keeps a replica (and its parameters) alive, and it
    follows the object through ``deepcopy`` and ``pickle``, where a closure would stay bound to the
    original.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        #: Returns the object, or None when it is gone.
        self.owner: Callable[[], Any] = weakref.ref(owner)
        self.name = name
        # A method that somebody has set on the object before us.
        self.previous: Callable[..., Any] | None = owner.__dict__.get(name)

    def install(self) -> None:
        """Sets it on its owner."""
        self.owner().__dict__[self.name] = self

    def remove(self) -> None:
        """Takes it off its owner."""
        owner = self.owner()
        if owner is not None:
            self.remove_from(owner)

    def remove_from(self, module: nn.Module) -> None:
        """Puts back what was there before, if it is set on ``module``."""
        if module.__dict__.get(self.name) is self:
            if self.previous is None:
                del module.__dict__[self.name]
            else:
                module.__dict__[self.name] = self.previous

    @property
    def original(self) -> Callable[..., Any]:
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
