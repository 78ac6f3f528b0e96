"""`CallbackContext`: what the copies of one layer share in one forward."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from replication.group import Group, SoloGroup
from replication.rendezvous import Rendezvous, ReplicationError
from replication.replica_group import replica_groups

__all__ = ["CallbackContext"]


class CallbackContext:
    """What the copies of one layer share in one forward: any attribute that they set on it.

    Attributes:
        num_copies: Number of copies.
        devices: The device of each copy; None where it is not known, as that of a copy without
            any tensor in somebody else's `torch.nn.DataParallel`.
        path: The layer's path in the replicated module, as in ``named_modules()``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        num_copies: int = 1,
        devices: Sequence[torch.device | None] | None = None,
        path: str = "",
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.num_copies = num_copies
        self.devices = tuple(devices or [None] * num_copies)
        self.path = path
        # What `group` needs is out of the way of attributes that copies may set.
        self._meeting = Meeting(num_copies, path or "(root)", rendezvous)

    def group(self, copy_id: int) -> Group:
        """Returns a copy's `Group`: it and the other copies of this layer in this forward.

        For a single copy that is a `SoloGroup`. Collectives are called in forward, not in the
        callback. Every call with the same ``copy_id`` returns the same group.

        Raises:
            TypeError: ``copy_id`` is no int.
            IndexError: There is no such copy.
        """
        return self._meeting.group(copy_id)


class Meeting:
    """Makes the groups of one layer's copies, when the first of them is asked for."""

    def __init__(self, size: int, path: str, rendezvous: Rendezvous | None) -> None:
        self._size = size
        self._path = path
        self._rendezvous = rendezvous
        self._groups: list[Group] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._size, self._path, None)  # a copy belongs to no forward

    def group(self, copy_id: int) -> Group:
        """See `CallbackContext.group`."""
        if isinstance(copy_id, bool) or not isinstance(copy_id, int):
            raise TypeError(f"a copy_id is an int (got {copy_id!r})")
        if not 0 <= copy_id < self._size:
            raise IndexError(
                f"`{self._path}` has copies 0 to {self._size - 1} (got copy_id {copy_id})"
            )
        if self._size == 1:
            return SoloGroup()
        if self._rendezvous is None:
            raise ReplicationError(
                f"`{self._path}`: the context is a copy, or was made by hand, and belongs to no "
                "forward; execute_replication_callbacks makes one that does"
            )
        with self._lock:
            if not self._groups:
                self._groups = replica_groups(self._rendezvous, self._path, range(self._size))
        return self._groups[copy_id]
