"""The errors that concern the replicas of one forward together."""

from __future__ import annotations

__all__ = ["ReplicaFailed", "ReplicasDiverged", "ReplicasTimedOut", "ReplicationError"]


class ReplicationError(RuntimeError):
    """The base of all errors here."""


class ReplicaFailed(ReplicationError):
    """Another replica raised, so the value that this one waits for cannot come.

    The other replica's error is the ``__cause__``. It, and not this follow-up, is what the caller
    of the forward gets to see.
    """


class ReplicasDiverged(ReplicationError):
    """Replicas do not do the same, so that what they wait for cannot come.

    One replica has skipped a layer, called it more often than the others, or in another order; or
    it has called another collective of a group, or with a tensor of another shape or dtype.
    """


class ReplicasTimedOut(ReplicationError):
    """The replicas have not ended within the ``timeout`` of the `DataParallel`.

    Some may still run, or hang: the caller does not wait for them.
    """
