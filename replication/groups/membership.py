"""The membership of this process in groups of `torch.distributed`, and the state of the groups."""

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

#: Its ``WORLD`` is None unless `torch.distributed` is initialized. None in builds without it.
GroupMember: Any = getattr(distributed, "GroupMember", None)


class ProcessGroupState:
    """The number of calls made with a process group, and the groups split from it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: The number of calls, by the name of the layer and whether a backward makes them.
        self.calls: Counter[tuple[str, bool]] = Counter()
        #: The groups made of this one, by the size of the parts.
        self.parts: dict[int, Any] = {}


_states: WeakKeyDictionary[Any, ProcessGroupState] = WeakKeyDictionary()


def state_of(process_group: Any) -> ProcessGroupState:
    """Returns the state of a process group, which lives as long as the group."""
    return _states.setdefault(process_group, ProcessGroupState())


def has_other_processes(process_group: Any = None) -> bool:
    """Whether a group, by default the group of all processes, is more than this process.

    Also true if this process is not a member or the group is destroyed: using it raises.
    """
    if process_group is not None:
        return not is_usable(process_group) or distributed.get_world_size(process_group) > 1
    is_distributed = distributed.is_available() and distributed.is_initialized()
    return is_distributed and distributed.get_world_size() > 1


def processes_are_not_connected() -> bool:
    """Whether torchrun started several processes and `torch.distributed` is not initialized."""
    return (
        not torch.compiler.is_compiling()  # older compilers cannot read the environment
        and distributed.is_available()
        and not distributed.is_initialized()
        and distributed.is_torchelastic_launched()
        and os.environ.get("WORLD_SIZE", "1") != "1"
    )


def is_usable(process_group: Any) -> bool:
    """Whether this process is in a group, and the group is not destroyed."""
    try:
        distributed.get_backend(process_group)
    except (ValueError, TypeError):  # older releases of torch raise TypeError
        return False
    return True


def is_non_member(process_group: Any) -> bool:
    """Whether it is the value that `torch.distributed.new_group` returns to non-members."""
    outside = distributed.GroupMember.NON_GROUP_MEMBER
    return type(process_group) is type(outside) and process_group == outside


def check_process_group(value: Any) -> None:
    """Raises TypeError if the value is not a group of `torch.distributed`."""
    is_group = distributed.is_available() and (
        isinstance(value, distributed.ProcessGroup) or is_non_member(value)
    )
    if not is_group:
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup or None "
            f"(got {type(value).__name__}); for a DeviceMesh, pass mesh.get_group()"
        )


class ProcessGroupHandle:
    """An attribute of a layer that holds a process group.

    A copy of the layer keeps the group. A layer that is pickled and loaded has no group.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> ProcessGroupHandle:
        return self

    def __reduce__(self) -> tuple[type[ProcessGroupHandle], tuple[()]]:
        if self.process_group is not None:
            warn(
                "a process_group is not pickled with a layer; set it again where it is loaded, or "
                "the layer will use all processes",
            )
        return ProcessGroupHandle, ()


def debugging() -> bool:
    """Whether ``TORCH_DISTRIBUTED_DEBUG`` enables slow checks."""
    # Not `is`, because every call returns a new object.
    return distributed.get_debug_level() != distributed.DebugLevel.OFF  # type: ignore[attr-defined]
