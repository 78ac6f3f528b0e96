"""Errors of a forward whose replicas run together, and helpers for error messages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ReplicaFailed", "ReplicasDiverged", "ReplicasTimedOut", "ReplicationError"]


def path_or_root(path: str) -> str:
    """Returns the path of a submodule, or ``(root)`` for the empty path."""
    return path or "(root)"


#: The maximal number of characters that a message quotes of an error.
_LONGEST = 1_000


def describe_error(error: BaseException) -> str:
    """Returns ``ValueError: its text``, with a very long text cut off.

    If the error cannot be converted to a string, only its type is returned.
    """
    name = type(error).__name__
    try:
        text = str(error)
        if len(text) > _LONGEST:
            text = text[:_LONGEST] + "..."
        return f"{name}: {text}" if text else name
    except BaseException:  # must not hide the error
        return name


def has_type(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an error is a ``kind``, without running any code of the error.

    `isinstance` reads ``__class__``, which a class may define as a property.
    """
    return issubclass(type(error), kind)


def listed(numbers: Iterable[int], kind: str = "replica") -> str:
    """Returns ``"replicas 0, 2"`` for ``[0, 2]``."""
    texts = [str(number) for number in numbers]
    return f"{kind}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


class ReplicationError(RuntimeError):
    """The base class of all errors of this package."""


class ReplicaFailed(ReplicationError):
    """Another replica raised, so the value that this replica waits for cannot arrive.

    The ``__cause__`` is the error of the other replica. The caller of the forward gets that error,
    not this follow-up.
    """


class ReplicasDiverged(ReplicationError):
    """The calls of the replicas do not match, so the values that they wait for cannot arrive.

    For example, a replica skips a layer, calls layers in a different order, calls another
    collective, or passes a tensor of another shape or dtype.
    """


class ReplicasTimedOut(ReplicationError):
    """The replicas did not end within the ``timeout`` of the `DataParallel`.

    Some of them may still run or hang. The caller does not wait for them.
    """
