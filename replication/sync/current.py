"""The replica whose forward or callback a thread runs, and so its rendezvous."""

from __future__ import annotations

import threading
from typing import NamedTuple

from replication._torch import NO_BACKWARD, current_backward
from replication.sync.rendezvous import Rendezvous


class CurrentReplica(NamedTuple):
    rendezvous: Rendezvous
    replica: int
    #: The `current_backward` of the thread when the forward or the callback began.
    backward: int
    #: The path of the module whose callback runs. It is empty in a forward.
    path: str = ""

    @property
    def is_one_of_several(self) -> bool:
        """Whether it is one of several replicas, or inside one."""
        rendezvous: Rendezvous | None = self.rendezvous
        while rendezvous is not None and (rendezvous.size or 0) < 2:
            rendezvous = rendezvous.outer
        return rendezvous is not None


class _Local(threading.local):
    current: CurrentReplica | None = None


#: Its attribute ``current`` is the innermost forward or callback that this thread runs, or None.
this_thread = _Local()


def current_replica() -> CurrentReplica | None:
    return this_thread.current


def is_recomputation() -> bool:
    """Whether this thread, or the caller of the replica that it runs, is in a backward.

    There a forward normally recomputes an activation checkpoint.
    """
    current = this_thread.current
    is_in_backward = current is not None and current.rendezvous.in_backward
    return is_in_backward or current_backward() != NO_BACKWARD
