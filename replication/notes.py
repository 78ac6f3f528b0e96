"""Notes on errors: in which replica and submodule one was raised, and which others there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import FrameType

from torch import nn

from replication.devices import device_in_use, device_of
from replication.errors import ReplicationError
from replication.rendezvous import Failure
from replication.torch_internals import CALL_IMPL
from replication.wording import described, listed

__all__: list[str] = []


#: Of every exception, whatever its class defines under these names.
_ATTRIBUTES = vars(BaseException)["__dict__"]
_TRACEBACK = vars(BaseException)["__traceback__"]


def add_others(error: BaseException, failures: Sequence[Failure]) -> None:
    """Notes on an error which replicas failed as well, but for those that failed because of it."""
    also: dict[str, list[int]] = {}
    for replica, other in failures:
        if other is not error and not issubclass(type(other), ReplicationError):
            also.setdefault(described(other), []).append(replica)
    for text, replicas in also.items():
        add_note(error, f"{listed(sorted(replicas))} failed, too: {text}")


def add_note(error: BaseException, note: str) -> None:
    """Does what `BaseException.add_note` of Python 3.11 does, but runs no method of the error.

    An error whose ``__notes__`` is not a list stays as it is. On Python 3.10 tracebacks do not
    show the notes.
    """
    notes = _ATTRIBUTES.__get__(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def has_origin(error: BaseException, index: int, size: int | None) -> bool:
    """Whether a note on an error says that it came from this replica."""
    notes = _ATTRIBUTES.__get__(error).get("__notes__")
    begin = re.compile(re.escape(origin(index, size)) + r"\b")
    return type(notes) is list and any(
        type(note) is str and begin.match(note) is not None for note in notes
    )


def add_failure_note(
    error: BaseException, replica: nn.Module, index: int, size: int | None
) -> None:
    """Notes on an error which replica it came from, on which device, and in which submodule."""
    try:
        device = device_in_use() or device_of(replica)
        path = failing_path(error, replica)
    except Exception:  # from a method of the replica, say: it must not hide the error
        device, path = None, ""
    add_note(
        error,
        origin(index, size)
        + (f" on {device}" if device is not None else "")
        + (f", module `{path}`" if path else ""),
    )


def origin(index: int, size: int | None) -> str:
    """Returns how a note on an error begins that says where the error came from."""
    return f"in replica {index} of {size}"


def failing_path(error: BaseException, root: nn.Module) -> str:
    """Returns the path of the innermost submodule that the error passed; empty for the root."""
    paths = paths_of(root)
    innermost = ""
    traceback = _TRACEBACK.__get__(error)
    while traceback is not None:
        path = path_of_call(traceback.tb_frame, paths)
        innermost = innermost if path is None else path
        traceback = traceback.tb_next
    return innermost


def paths_of(root: nn.Module) -> dict[int, str]:
    """Returns the paths of the submodules, by their identity."""
    return {id(module): path for path, module in root.named_modules()}


def path_of_call(frame: FrameType, paths: dict[int, str]) -> str | None:
    """Returns the path of the submodule that this frame is a call of, if it is one."""
    # Only torch's own frames: to look at the locals of a frame can make a cycle of it and an
    # error, if it has the error in a variable.
    if frame.f_code.co_name != CALL_IMPL:
        return None
    return paths.get(id(frame.f_locals.get("self")))
