"""The errors that concern the replicas of one forward together."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ReplicaFailed", "ReplicasDiverged", "ReplicasTimedOut", "ReplicationError"]


def path_or_root(path: str) -> str:
    """Returns the path of a submodule, and ``(root)`` for the empty one."""
    return path or "(root)"


#: Characters of an error's text that a message about it repeats.
_LONGEST = 1_000


def described(error: BaseException) -> str:
    """Returns ``ValueError: its text``, whatever the error's own methods do.

    The text is cut where it is very long.
    """
    name = type(error).__name__
    try:
        text = str(error)
        if len(text) > _LONGEST:
            text = text[:_LONGEST] + "..."
        return f"{name}: {text}" if text else name
    except BaseException:  # a method of the error raised, which must not hide the error
        return name


def listed(numbers: Iterable[int], kind: str = "replica") -> str:
    """``[0, 2]`` -> ``"replicas 0, 2"``."""
    texts = [str(number) for number in numbers]
    return f"{kind}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


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
