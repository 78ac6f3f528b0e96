"""Errors of a forward whose replicas run together, and what is added to them."""

from __future__ import annotations

__all__ = ["ReplicaFailed", "ReplicasDiverged", "ReplicationError"]


class ReplicationError(RuntimeError):
    """The base class of all errors of this package."""


class ReplicaFailed(ReplicationError):
    """Another replica raised, so the value that this replica waits for cannot arrive.

    Its ``__cause__`` is that error, which the caller of the forward gets. It has none after a
    Ctrl-C in the caller.
    """


class ReplicasDiverged(ReplicationError):
    """The calls of the replicas do not match, so the values that they wait for cannot arrive.

    For example, a replica skips a layer, or passes a tensor of another shape or dtype.
    """


def add_note(error: BaseException, note: str) -> None:
    """Like `BaseException.add_note`, but once per note, and even for an error that is frozen."""
    notes = vars(error).setdefault("__notes__", [])
    if isinstance(notes, list) and note not in notes:  # one error may be raised again and again
        notes.append(note)


def describe_error(error: BaseException) -> str:
    """Returns ``ValueError: its text``, or only the type if making the text raises."""
    name = type(error).__name__
    try:
        text = str(error)
        return f"{name}: {text}" if text else name
    except Exception:  # of the error's own method; it must not hide the error
        return name


def origin(index: int, size: int) -> str:
    return f"in replica {index} of {size}"


def lost_derivatives(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{where}: torch.func transforms and forward-mode derivatives do not reach other copies, "
        "so they are not supported across replicas and processes; compute them on one device"
    )
