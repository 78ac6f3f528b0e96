"""The groups of `torch.distributed` in this process, and the state that is kept beside each."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from replication._torch import COMPILES_COLLECTIVES, is_usable, timeout_of
from replication.errors import ReplicationError
from replication.warning import warn


class ProcessGroupState:
    def __init__(self) -> None:
        #: Numbers the calls that this rank makes.
        self.calls = count(1)
        #: The groups made of this one, by the size of the parts.
        self.parts: dict[int, Any] = {}
        #: Each `ProcessGroup` of a layer, by its name.
        self.groups: dict[str, Any] = {}


_states: WeakKeyDictionary[Any, ProcessGroupState] = WeakKeyDictionary()


def state_of(process_group: Any) -> ProcessGroupState:
    state = _states.get(process_group)
    return _states.setdefault(process_group, ProcessGroupState()) if state is None else state


def part_of(process_group: Any, size: int) -> Any:
    """Returns the part of a group to which this process belongs, if its parts have some size."""
    state, ranks = state_of(process_group), range(process_group.size())
    if size not in state.parts:
        # All processes must make all groups. Processes outside this group do not come here, so its
        # members use local synchronization.
        is_world = process_group is distributed.group.WORLD
        parts = [ranks[start : start + size] for start in ranks[::size]]
        own = parts[process_group.rank() // size]
        for part in parts if is_world else [own]:
            made = distributed.new_group(
                [distributed.get_global_rank(process_group, rank) for rank in part],
                timeout=timeout_of(process_group),
                backend=distributed.get_backend(process_group),
                use_local_synchronization=not is_world,
            )
            if part == own:
                state.parts[size] = made
    return state.parts[size]


_IS_AVAILABLE = distributed.is_available()


def world() -> Any:
    """The group of all processes, or None."""
    # `torch.compile` looks at this object again, and not at `is_initialized`.
    return distributed.group.WORLD if _IS_AVAILABLE else None


def has_other_processes(process_group: Any = None) -> bool:
    """Whether a group, by default all processes, is more than this process."""
    # Also true if this process is not a member or the group is destroyed: using it raises.
    if process_group is not None:
        return not is_usable(process_group) or distributed.get_world_size(process_group) > 1
    everyone = world()
    # Where torch 2.6 compiles this, even None is not None.
    return everyone is not None and distributed.is_initialized() and everyone.size() > 1


def name_in_graph(process_group: Any) -> str | None:
    """Returns the name of a group, by default all processes, in operators of a compiled graph.

    None if this process cannot use the group, or if the release of torch cannot keep collectives
    in a graph.
    """
    process_group = distributed.group.WORLD if process_group is None else process_group
    is_usable_here = COMPILES_COLLECTIVES and is_usable(process_group)
    return process_group.group_name if is_usable_here else None


def as_process_group(value: Any, expected: str = "process_group must be") -> Any:
    """Returns a group of `torch.distributed`: itself, or the one of a mesh. None stays None.

    ``expected`` is how the text of a TypeError begins.
    """
    if isinstance(value, DeviceMesh):
        if value.ndim > 1:
            raise ValueError(
                f"process_group must be one dimension of a mesh (got {value.ndim}); pass the one "
                "that splits the batch, such as mesh['dp'], or None if all dimensions do"
            )
        return value.get_group()
    is_group = distributed.is_available() and (
        isinstance(value, distributed.ProcessGroup)
        or value is distributed.GroupMember.NON_GROUP_MEMBER
    )
    if value is not None and not is_group:
        raise TypeError(
            f"{expected} a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None "
            f"(got {type(value).__name__})"
        )
    return value


def check_usable(process_group: Any, name: str) -> None:
    """Raises an error if this process is not in a group, or if the group is destroyed."""
    if is_usable(process_group):
        return
    if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"`{name}`: process_group must contain this process")
    raise ReplicationError(
        f"`{name}`: the process group has been destroyed; call "
        "torch.distributed.destroy_process_group after the last forward and backward that use it, "
        "and set another process_group, or None, in layers that stay in use"
    )


class ProcessGroupHandle:
    """A process group of a layer. Copies of the layer keep it, and pickling drops it."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> ProcessGroupHandle:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        warn("a process_group is not pickled with a layer; set it where the layer is loaded")
        return type(None), ()  # loaded as None
