"""The replication callback: each layer of each copy is told that it has been replicated.

A layer opts in with a method ``__data_parallel_replicate__(self, ctx, copy_id)``. After
replication, and before any forward, it is called on every copy that has it:

    copy 0:  root, first child, ...      all of the master copy first
    copy 1:  root, first child, ...      then the others, in order

The n copies of one layer share one `CallbackContext`, through which they get a `Group`. For a
layer whose class cannot be changed there is `register_replication_callback`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from replication._torch import IS_REPLICA, compiled_module, current_backward
from replication.devices import DeviceLike, check_module, device_of, parse_devices
from replication.errors import path_or_root
from replication.groups.replicas import CallbackContext
from replication.sync.current import CurrentReplica, set_current_replica
from replication.sync.lifecycle import add_note, watch

__all__ = [
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "register_replication_callback",
]

CALLBACK = "__data_parallel_replicate__"


#: Where a module keeps what `register_replication_callback` was given; its replicas share it.
_REGISTERED = "_replication_callbacks"

Callback = Callable[[nn.Module, CallbackContext, int], object]


class Position(NamedTuple):
    """One submodule and its copies, one per replica."""

    path: str
    copies: tuple[nn.Module, ...]

    def __str__(self) -> str:
        return f"`{self.path}`" if self.path else f"the root ({type(self.copies[0]).__name__})"


def register_replication_callback(module: nn.Module, callback: Callback) -> RemovableHandle:
    """Gives a module a callback of replication without changing its class.

    ``callback(copy, ctx, copy_id)`` is called for each copy of ``module`` where
    ``copy.__data_parallel_replicate__(ctx, copy_id)`` would be, and after it if there is one. It
    is not called where nothing is replicated, on a single device that is. A deep copy of
    ``module`` has the callbacks, too, and is otherwise independent.

    >>> import torch
    >>> from replication import DataParallel
    >>> def number(copy, ctx, copy_id):
    ...     print(f"copy {copy_id} of {ctx.num_copies}")
    >>> net = nn.Sequential(nn.Linear(2, 1))
    >>> handle = register_replication_callback(net[0], number)
    >>> y = DataParallel(net, ["cpu"] * 2)(torch.ones(4, 2))
    copy 0 of 2
    copy 1 of 2
    >>> handle.remove()

    Args:
        module: Any module, alone or part of one that will be replicated.
        callback: What it sets on the copy is gone after the forward. To be pickled with the
            module it must be a function of a Python module.

    Returns:
        A handle whose ``remove()`` takes the callback away.

    Raises:
        TypeError: ``module`` is no module, or a DataParallel, or a replica; or ``callback`` is not
            callable.
    """
    check_module(module)
    module = compiled_module(module)  # of which copies are made
    if isinstance(module, nn.DataParallel):
        raise TypeError("a DataParallel has no replicas of itself; register with its .module")
    if getattr(module, IS_REPLICA, False):
        raise TypeError("a replica shares its callbacks with the original; register with that one")
    if not callable(callback):
        raise TypeError(f"expected a callable (got {type(callback).__name__})")
    callbacks = module.__dict__.setdefault(_REGISTERED, OrderedDict())
    handle = RemovableHandle(callbacks)
    while handle.id in callbacks:  # of a module that was pickled in another process
        handle = RemovableHandle(callbacks)
    callbacks[handle.id] = callback
    return handle


def execute_replication_callbacks(
    modules: Sequence[nn.Module], devices: Sequence[DeviceLike] | None = None
) -> None:
    """Calls ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule that has it.

    And what `register_replication_callback` was given.

    Guarantees:
        * All callbacks of copy 0 come before any of copy 1, and so on. Within a copy they come in
          the order of ``modules()``.
        * A submodule that is registered under several names is called once per copy.
        * Nobody is called unless everybody can be: the copies are checked first.
        * From now on the copies' forwards belong together: if one fails or ends, the others do
          not wait for it, whoever runs them (see `replication.sync.rendezvous`).

    Args:
        modules: The copies of one module, the master copy first.
        devices: The device of each, for `CallbackContext`; by default that of its first tensor.

    Raises:
        ValueError: ``modules`` is empty, the copies differ in structure, or there are not as many
            ``devices``.
        TypeError: An item is no module, or an attribute ``__data_parallel_replicate__`` is not
            callable.
        Exception: What a callback raises; a note names the module's path and the copy.
    """
    positions = [position for position in paired(modules) if has_callbacks(position)]
    if devices is not None and len(devices) != len(modules):
        raise ValueError(
            f"expected one device for each of {len(modules)} copies (got {len(devices)})"
        )
    on = [device_of(module) for module in modules] if devices is None else parse_devices(devices)
    rendezvous = watch(modules)
    listeners = [
        (position, CallbackContext(len(modules), on, position.path, rendezvous))
        for position in positions
    ]
    backward = current_backward()
    for copy_id in range(len(modules)):
        for position, context in listeners:
            for name, callback in callbacks_of(position.copies[copy_id]):
                here = CurrentReplica(rendezvous, copy_id, backward, path_or_root(position.path))
                try:
                    with set_current_replica(here):
                        callback(context, copy_id)
                except BaseException as error:
                    add_note(error, f"in {name} of {position}, copy {copy_id} of {len(modules)}")
                    raise


exec_data_parallel_replication_callback = execute_replication_callbacks


def has_callbacks(position: Position) -> bool:
    """Whether some copy has callbacks.

    Raises:
        TypeError: An attribute ``__data_parallel_replicate__`` is not callable.
    """
    found = False
    for copy_id, module in enumerate(position.copies):
        method = method_of(module)
        if method is not None and not callable(method):
            raise TypeError(
                f"{CALLBACK} of {position}, copy {copy_id}, must be callable "
                f"(got {type(method).__name__})"
            )
        found = found or method is not None or bool(vars(module).get(_REGISTERED))
    return found


def method_of(module: nn.Module) -> Any:
    """The attribute ``__data_parallel_replicate__`` of a module, or None."""
    # A module is slow to say that it has no such attribute.
    if (
        hasattr(type(module), CALLBACK)
        or CALLBACK in vars(module)
        or type(module).__getattr__ is not nn.Module.__getattr__
    ):
        return getattr(module, CALLBACK, None)
    return None


def callbacks_of(module: nn.Module) -> list[tuple[str, Callable[[Any, int], object]]]:
    """What is to be called with the context and the copy's number, and its name."""
    method, registered = method_of(module), vars(module).get(_REGISTERED)
    callbacks = [] if method is None else [(CALLBACK, method)]
    if registered:
        functions = (partial(function, module) for function in registered.values())
        callbacks += [("a registered callback", function) for function in functions]
    return callbacks


def paired(modules: Sequence[nn.Module]) -> list[Position]:
    """Lists the submodules of the copies, in the order of ``modules()``, each with its copies.

    Raises:
        ValueError: No copies, or the copies differ in structure.
        TypeError: An item is not a module.
    """
    roots = tuple(modules)
    if not roots:
        raise ValueError("expected at least one copy of a module (got none)")
    for index, root in enumerate(roots):
        if not isinstance(root, nn.Module):
            raise TypeError(f"copy {index} must be a module (got {type(root).__name__})")
    positions: list[Position] = []
    # By the identity of copy 0's module: where it is tied, the others' must be tied alike.
    seen: dict[int, tuple[nn.Module, ...]] = {}
    pending = [Position("", roots)]
    while pending:
        position = pending.pop()
        master = position.copies[0]
        known = seen.get(id(master))
        if known is not None:
            if any(a is not b for a, b in zip(known, position.copies, strict=True)):
                raise ValueError(f"the copies must be alike: they tie {position} differently")
            continue
        seen[id(master)] = position.copies
        positions.append(position)
        children = []
        names = list(master._modules)
        for copy_id, module in enumerate(position.copies):
            if type(module) is not type(master) or list(module._modules) != names:
                raise ValueError(
                    f"the copies must be alike: {position} is {outlined(master)} in copy 0 "
                    f"but {outlined(module)} in copy {copy_id}"
                )
        for name in names:
            copies = tuple(module._modules[name] for module in position.copies)
            path = f"{position.path}.{name}" if position.path else name
            present = tuple(child for child in copies if child is not None)
            if len(present) == len(copies):
                children.append(Position(path, present))
            elif present:
                raise ValueError(f"the copies must be alike: only some of them have `{path}`")
        pending.extend(reversed(children))
    return positions


def outlined(module: nn.Module) -> str:
    """A module's type and children, for messages."""
    return f"{type(module).__name__}({', '.join(module._modules)})"
