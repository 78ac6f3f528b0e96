"""Where the replicas of a forward are, for messages: which run, which wait and in which module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType

from torch import nn

from replication._torch import CALL_IMPL
from replication.errors import path_or_root
from replication.modules import layers_of
from replication.warning import frame_of_thread


# A replica may run its forward several times (micro-batches). Its k-th run meets the k-th run
# of the other replicas.
class Progress:
    """How far one replica is with its forwards."""

    def __init__(self) -> None:
        #: The number of nested calls that are under way.
        self.depth = 0
        #: The number of runs that have begun.
        self.runs = 0
        self.thread = 0
        self.is_absent = False

    def is_over(self, run: int) -> bool:
        """Whether the run of this number has ended, or will never begin."""
        return not self.depth and (self.is_absent or self.runs >= run)

    def __str__(self) -> str:
        if self.depth:
            return "runs"
        if self.is_absent:
            return "does not run"
        return "has ended" if self.runs else "has not begun"


def site(path: str, call: int) -> str:
    return f"`{path}`, call {call}"


def positions(
    progress_of: Sequence[Progress], waits: Iterable[tuple[int, str]], locations: Sequence[str]
) -> str:
    """A line for each replica, given the sites of waits and the locations of what runs."""
    texts = []
    for replica, progress in enumerate(progress_of):
        location = locations[replica] if locations and progress.depth else ""
        texts.append(f"{progress} {location}".rstrip())
    for replica, where in waits:
        texts[replica] = f"waits at {where}"
        if not progress_of[replica].depth:
            texts[replica] += (
                ", outside the forward (in a recomputation, by another method, or through a part "
                "of the replica)"
            )
    return "".join(f"\n  replica {r}: {text}" for r, text in enumerate(texts))


def location(replica: nn.Module | None, thread: int) -> str:
    """The submodule and the line where a thread runs a replica; "" if it is unknown."""
    frame = frame_of_thread(thread)
    if frame is None or replica is None:
        return ""
    line = f"at {frame.f_code.co_filename}:{frame.f_lineno}"
    paths: dict[int, str] = {}
    with suppress(Exception):  # the replica changes while it runs
        paths = paths_of(replica)
    while frame is not None:  # in one variable: it may be this very frame
        path = path_of_call(frame, paths)
        frame = frame.f_back
        if path is not None:
            return f"in `{path_or_root(path)}`, {line}"
    return line


def failing_path(error: BaseException, root: nn.Module) -> str | None:
    """The path of the innermost module in the traceback, if there is one."""
    paths, innermost = paths_of(root), None
    traceback = error.__traceback__
    while traceback is not None:
        path = path_of_call(traceback.tb_frame, paths)
        innermost = innermost if path is None else path
        traceback = traceback.tb_next
    return innermost


def paths_of(root: nn.Module) -> dict[int, str]:
    return {id(module): path for path, module in layers_of(root)}


def path_of_call(frame: FrameType, paths: dict[int, str]) -> str | None:
    # Only torch's own frames: the locals of a frame that holds the error would make a cycle.
    if frame.f_code.co_name != CALL_IMPL:
        return None
    return paths.get(id(frame.f_locals.get("self")))
