"""Notes on errors: of which replica and submodule one is, and which others failed, too."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

from torch import nn

from replication.devices import device_in_use, device_of
from replication.errors import ReplicationError
from replication.rendezvous import Failure
from replication.torch_internals import CALL_IMPL
from replication.wording import described, listed

__all__: list[str] = []


def add_others(error: BaseException, failures: Sequence[Failure]) -> None:
    """Notes on an error which other replicas failed; not those that failed because of it."""
    also: dict[str, list[int]] = {}
    for replica, other in failures:
        if other is not error and not isinstance(other, ReplicationError):
            also.setdefault(described(other), []).append(replica)
    for text, replicas in also.items():
        add_note(error, f"{listed(sorted(replicas))} failed, too: {text}")


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note` of Python 3.11; on 3.10 tracebacks do not show the notes."""
    try:
        error.__notes__ = [*(getattr(error, "__notes__", None) or ()), note]
    except Exception:  # an exception that takes no attributes goes without
        return


def add_failure_note(
    error: BaseException, replica: nn.Module, index: int, size: int | None
) -> None:
    """Notes on an error which replica it came from, on which device, and in which submodule."""
    device = device_in_use() or device_of(replica)
    path = failing_path(error, replica)
    add_note(
        error,
        origin(index, size)
        + (f" on {device}" if device is not None else "")
        + (f", module `{path}`" if path else ""),
    )


def origin(index: int, size: int | None) -> str:
    """How a note on an error begins that says where the error came from."""
    return f"in replica {index} of {size}"


def failing_path(error: BaseException, root: nn.Module) -> str:
    """The path of the innermost submodule that the error passed; empty for the root itself."""
    paths = paths_of(root)
    innermost = ""
    traceback = error.__traceback__
    while traceback is not None:
        path = path_of_call(traceback.tb_frame, paths)
        innermost = innermost if path is None else path
        traceback = traceback.tb_next
    return innermost


def paths_of(root: nn.Module) -> dict[int, str]:
    """The paths of the submodules, by their identity."""
    return {id(module): path for path, module in root.named_modules()}


def path_of_call(frame: FrameType, paths: dict[int, str]) -> str | None:
    """The path of the submodule that this frame is a call of, if it is one."""
    # Only torch's own frames: to look at the locals of a frame can make a cycle of it and an
    # error, if it has the error in a variable.
    if frame.f_code.co_name != CALL_IMPL:
        return None
    return paths.get(id(frame.f_locals.get("self")))
