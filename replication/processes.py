"""What a process knows of the others, and of the groups of `torch.distributed` that it is in."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from replication.warning import warn

__all__: list[str] = []


class History:
    """What has been done with a group of `torch.distributed`, whichever layers did it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: Number of calls, by the name of the layer, and whether they were in backward.
        self.calls: Counter[tuple[str, bool]] = Counter()
        #: The group of this process' part, by the size of the parts.
        self.parts: dict[int, Any] = {}


_histories: WeakKeyDictionary[Any, History] = WeakKeyDictionary()
_histories_lock = threading.Lock()


def history_of(process_group: Any) -> History:
    """That of a group, for as long as the group exists."""
    with _histories_lock:
        return _histories.setdefault(process_group, History())


def process_count(process_group: Any = None) -> int:
    """The number of processes of a group, by default of all; 1 where there are no others.

    -1 if this process is not in the group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(process_group)


def processes_are_not_connected() -> bool:
    """Whether torchrun has started several processes that do not know of each other."""
    return (
        not torch.compiler.is_compiling()  # whose older ones cannot look at the environment
        and distributed.is_available()
        and not distributed.is_initialized()
        and distributed.is_torchelastic_launched()
        and os.environ.get("WORLD_SIZE", "1") != "1"
    )


def is_known(process_group: Any) -> bool:
    """Whether a group has not been destroyed."""
    try:
        distributed.get_backend(process_group)
    except (ValueError, TypeError):  # the latter of older torch
        return False
    return True


def check_process_group(value: Any) -> None:
    """Raises TypeError on what is no group of `torch.distributed`."""
    known = distributed.is_available() and (
        isinstance(value, distributed.ProcessGroup)
        or _is_of_others(value)  # which `ProcessGroup` refuses
    )
    if not known:
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup or None "
            f"(got {type(value).__name__}); of a DeviceMesh it is mesh.get_group()"
        )


def _is_of_others(value: Any) -> bool:
    """Whether this is what torch gives to those who are not in a new group."""
    nobody = distributed.GroupMember.NON_GROUP_MEMBER
    return type(value) is type(nobody) and value == nobody


class Kept:
    """A group of `torch.distributed` in an attribute of a layer, which may be copied and pickled.

    A copy of the layer talks to the same processes; a pickled one comes back without them.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        if self.process_group is not None:
            warn(
                "a process_group is not pickled with a layer; set it again where it is loaded, or "
                "the layer will talk to all processes",
            )
        return Kept, ()


def debugging() -> bool:
    """Whether ``TORCH_DISTRIBUTED_DEBUG`` asks for checks that cost time."""
    if torch.compiler.is_compiling():  # it could not be asked there
        return False
    # Not by identity: each is a new object.
    return distributed.get_debug_level() != distributed.DebugLevel.OFF  # type: ignore[attr-defined]
