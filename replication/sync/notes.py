"""Notes on errors: the replica, device and submodule that an error came from."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from types import FrameType

from torch import nn

from replication._torch import CALL_IMPL
from replication.devices import device_in_use, device_of
from replication.errors import (
    ReplicationError,
    describe_error,
    has_type,
    listed,
    path_or_root,
)
from replication.modules import layers_of
from replication.sync.rendezvous import Failure
from replication.warning import frame_of_thread

__all__: list[str] = []


#: Read the attributes of any exception, even if its class redefines them.
_ATTRIBUTES = vars(BaseException)["__dict__"]
_TRACEBACK = vars(BaseException)["__traceback__"]


def add_others(error: BaseException, failures: Sequence[Failure], size: int | None) -> None:
    """Adds a note for each other failure, except for follow-ups of another error.

    Equal failures of several replicas share a note.
    """
    also: dict[tuple[str, str], list[int]] = {}
    for failure in failures:
        if failure.error is not error and not has_type(failure.error, ReplicationError):
            also.setdefault(_where_and_what(failure, size), []).append(failure.replica)
    own = [_where_and_what(f, size) for f in failures if f.error is error] if also else []
    for what, replicas in also.items():
        where, text = ("", "the same error") if what in own else what
        add_note(error, f"{listed(sorted(replicas))} also failed{where}: {text}")


def _where_and_what(failure: Failure, size: int | None) -> tuple[str, str]:
    """Returns the module of a failure, if a note names it, and the error."""
    note = origin_note(failure.error, failure.replica, size) or ""
    module = note.partition(", module ")[2]
    return f" in module {module}" if module else "", describe_error(failure.error)


def add_note(error: BaseException, note: str) -> None:
    """Adds a note as `BaseException.add_note` does, but runs no method of the error.

    An error whose ``__notes__`` is not a list is left unchanged. Tracebacks show notes from Python
    3.11 on.
    """
    notes = _ATTRIBUTES.__get__(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def origin_note(error: BaseException, index: int, size: int | None) -> str | None:
    """Returns the note that names this replica as the origin of an error, if there is one."""
    notes = _ATTRIBUTES.__get__(error).get("__notes__")
    begin = re.compile(re.escape(origin(index, size)) + r"\b")
    for note in notes if type(notes) is list else ():
        if type(note) is str and begin.match(note) is not None:
            return note
    return None


def add_failure_note(
    error: BaseException, replica: nn.Module, index: int, size: int | None
) -> None:
    """Adds a note with the replica, the device and the submodule that an error came from."""
    try:
        device = device_in_use() or device_of(replica)
        path = failing_path(error, replica)
    except Exception:  # raised by a method of the replica; it must not hide the error
        device, path = None, None
    add_note(
        error,
        origin(index, size)
        + (f" on {device}" if device is not None else "")
        + (f", module `{path_or_root(path)}`" if path is not None else ""),
    )


def origin(index: int, size: int | None) -> str:
    """Returns the beginning of a note on where an error came from."""
    return f"in replica {index} of {size}"


def failing_path(error: BaseException, root: nn.Module) -> str | None:
    """Returns the path of the innermost module in the traceback, if there is one."""
    paths = paths_of(root)
    innermost = None
    traceback = _TRACEBACK.__get__(error)
    while traceback is not None:
        path = path_of_call(traceback.tb_frame, paths)
        innermost = innermost if path is None else path
        traceback = traceback.tb_next
    return innermost


def paths_of(root: nn.Module) -> dict[int, str]:
    """Returns the path of each submodule, by the `id` of the submodule."""
    return {id(module): path for path, module in layers_of(root)}


def path_of_call(frame: FrameType, paths: dict[int, str]) -> str | None:
    """Returns the path of the submodule that a frame calls, if it calls one."""
    # Only torch's own frames: reading the locals of a frame that holds the error in a variable
    # would make a reference cycle.
    if frame.f_code.co_name != CALL_IMPL:
        return None
    return paths.get(id(frame.f_locals.get("self")))


class Locator:
    """Finds the submodule and the line that the thread of a replica is in, if it may be read."""

    def __init__(self, replicas: Sequence[nn.Module]) -> None:
        self._replicas = [weakref.ref(replica) for replica in replicas]

    def __call__(self, index: int, thread: int) -> str:
        innermost = frame_of_thread(thread)
        replica = self._replicas[index]()
        if innermost is None or replica is None:
            return ""
        try:
            paths = paths_of(replica)
        except Exception:  # the replica changes while it runs
            paths = {}
        path = ""
        line = f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
        frame: FrameType | None = innermost
        del innermost  # it may be this very frame, which must not refer to itself
        while frame is not None and not path:
            path = path_of_call(frame, paths) or ""
            frame = frame.f_back
        return f"in `{path}`, at {line}" if path else f"at {line}"
