"""`CallbackContext`: what the copies of one layer share in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from replication.group import Group
from replication.rendezvous import Rendezvous
from replication.replica_group import Members
from replication.wording import path_or_root

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
        self._members = Members(rendezvous, path_or_root(path), range(num_copies))

    def group(self, copy_id: int) -> Group:
        """Returns a copy's `Group`: it and the other copies of this layer in this forward.

        For a single copy that is a `SoloGroup`. Collectives are called in forward, not in the
        callback. Every call with the same ``copy_id`` returns the same group.

        Raises:
            TypeError: ``copy_id`` is no int.
            IndexError: There is no such copy.
            ReplicationError: The context is a copy, and belongs to no forward.
        """
        return self._members.group(copy_id)
