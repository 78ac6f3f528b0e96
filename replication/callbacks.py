"""The replication callback: tells each layer of each copy about its replication.

A layer opts in with a method ``__data_parallel_replicate__(self, ctx, copy_id)``. It is called on
every copy of the layer after replication and before any forward:

    copy 0:  root, first child, ...      all of copy 0 first
    copy 1:  root, first child, ...      then the others, in order

The n copies of one layer share one `CallbackContext`, which gives them a `Group`. Use
`register_replication_callback` for a layer whose class you cannot change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from replication._torch import IS_REPLICA, compiled_module, current_backward
from replication.devices import DeviceLike, check_module, device_of, parse_devices
from replication.errors import path_or_root
from replication.groups.replicas import CallbackContext
from replication.sync.current import CurrentReplica, current_replica, set_current_replica
from replication.sync.lifecycle import track
from replication.sync.notes import add_note

__all__ = [
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "register_replication_callback",
]

CALLBACK = "__data_parallel_replicate__"

#: The attribute of a module with its registered callbacks, which its replicas share.
_REGISTERED = "_replication_callbacks"

Callback = Callable[[nn.Module, CallbackContext, int], object]


class Position(NamedTuple):
    """One submodule and its copies, one per replica."""

    path: str
    copies: tuple[nn.Module, ...]

    def __str__(self) -> str:
        return f"`{self.path}`" if self.path else f"the root ({type(self.copies[0]).__name__})"


def register_replication_callback(module: nn.Module, callback: Callback) -> RemovableHandle:
    """Gives a module a replication callback without changing its class.

    ``callback(copy, ctx, copy_id)`` is called for each copy of ``module``, where
    ``copy.__data_parallel_replicate__(ctx, copy_id)`` would be called, and after that method if
    the copy has it. It is not called without replication, for example on a single device. A deep
    copy of ``module`` keeps its callbacks and is otherwise independent.

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
        module: Any module, alone or part of a module that will be replicated.
        callback: The function to call. Attributes that it sets on the copy are discarded after
            the forward. To be pickled with the module it must be a function of a Python module.

    Returns:
        A handle whose ``remove()`` removes the callback.

    Raises:
        TypeError: ``module`` is not a module, or is a DataParallel or a replica, or ``callback``
            is not callable.
    """
    check_module(module)
    module = compiled_module(module)  # the copies are made of the wrapped module
    if isinstance(module, nn.DataParallel):
        raise TypeError("a DataParallel has no replicas of itself; register with its .module")
    if getattr(module, IS_REPLICA, False):
        raise TypeError("a replica shares its callbacks with the original; register with that one")
    if not callable(callback):
        raise TypeError(f"expected a callable (got {type(callback).__name__})")
    callbacks = module.__dict__.setdefault(_REGISTERED, OrderedDict())
    handle = RemovableHandle(callbacks)
    while handle.id in callbacks:  # the module was pickled in another process
        handle = RemovableHandle(callbacks)
    callbacks[handle.id] = callback
    return handle


def execute_replication_callbacks(
    modules: Sequence[nn.Module], devices: Sequence[DeviceLike] | None = None
) -> None:
    """Calls ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule that has it.

    Also calls the callbacks of `register_replication_callback`.

    Guarantees:
        * All callbacks of copy 0 run before any callback of copy 1, and so on. Within a copy they
          run in the order of ``modules()``.
        * A submodule that is registered under several names is called once per copy.
        * The copies are checked first: no callback runs if the copies do not match.
        * The copies' forwards belong together from now on. If one of them fails or ends, the
          others do not wait for it, however they are run (see `replication.sync.rendezvous`).

    Args:
        modules: The copies of one module, copy 0 first.
        devices: The device of each copy, for `CallbackContext`. The default is the device of the
            copy's first tensor.

    Raises:
        ValueError: ``modules`` is empty, the copies differ in structure, or the number of
            ``devices`` is another one.
        TypeError: An item is not a module, or an attribute ``__data_parallel_replicate__`` is not
            callable.
        Exception: A callback raised. A note names the module's path and the copy.
    """
    if devices is not None and len(devices) != len(modules):
        raise ValueError(
            f"expected one device for each of {len(modules)} copies (got {len(devices)})"
        )
    run_callbacks(modules, None if devices is None else parse_devices(devices))


exec_data_parallel_replication_callback = execute_replication_callbacks


def run_callbacks(
    modules: Sequence[nn.Module], devices: Sequence[torch.device | None] | None
) -> None:
    """Does what `execute_replication_callbacks` does, for devices that are parsed already."""
    positions = [position for position in paired(modules) if has_callbacks(position)]
    rendezvous = track(modules)
    if not positions:
        return
    size = len(modules)
    devices = [device_of(module) for module in modules] if devices is None else devices
    contexts = [CallbackContext(size, list(devices), p.path, rendezvous) for p in positions]
    backward = current_backward()
    # The outer block restores the thread's state if a Ctrl-C arrives while an inner one begins.
    with set_current_replica(current_replica()):
        for copy_id in range(size):
            for position, context in zip(positions, contexts, strict=True):
                path = path_or_root(position.path)
                current = CurrentReplica(rendezvous, copy_id, backward, path)
                for name, callback in callbacks_of(position.copies[copy_id]):
                    try:
                        with set_current_replica(current):
                            callback(context, copy_id)
                    except BaseException as error:
                        add_note(error, f"in {name} of {position}, copy {copy_id} of {size}")
                        raise


def has_callbacks(position: Position) -> bool:
    """Returns whether any copy has callbacks.

    Raises:
        TypeError: An attribute ``__data_parallel_replicate__`` is not callable.
    """
    has_any = False
    for copy_id, module in enumerate(position.copies):
        method = method_of(module)
        if method is not None and not callable(method):
            raise TypeError(
                f"{CALLBACK} of {position}, copy {copy_id}, must be callable "
                f"(got {type(method).__name__})"
            )
        has_any = has_any or method is not None or bool(vars(module).get(_REGISTERED))
    return has_any


def method_of(module: nn.Module) -> Any:
    """Returns the attribute ``__data_parallel_replicate__`` of a module, or None."""
    # `getattr` alone would be slow: nn.Module raises an error for each missing attribute.
    if (
        hasattr(type(module), CALLBACK)
        or CALLBACK in vars(module)
        or type(module).__getattr__ is not nn.Module.__getattr__
    ):
        return getattr(module, CALLBACK, None)
    return None


def callbacks_of(module: nn.Module) -> list[tuple[str, Callable[[Any, int], object]]]:
    """Returns the names and functions to be called with the context and the copy's index."""
    method, registered = method_of(module), vars(module).get(_REGISTERED, {})
    callbacks = [] if method is None else [(CALLBACK, method)]
    functions = (partial(function, module) for function in registered.values())
    return [*callbacks, *(("a registered callback", function) for function in functions)]


def paired(modules: Sequence[nn.Module]) -> list[Position]:
    """Returns each submodule with its copies, in the order of ``modules()``.

    Raises:
        ValueError: There are no copies, or the copies differ in structure.
        TypeError: An item is not a module.
    """
    roots = tuple(modules)
    if not roots:
        raise ValueError("expected at least one copy of a module (got none)")
    for index, root in enumerate(roots):
        if not isinstance(root, nn.Module):
            raise TypeError(f"copy {index} must be a module (got {type(root).__name__})")
    # By the identity of copy 0's submodule. A submodule that it ties must be tied in all copies.
    positions: dict[int, Position] = {}
    pending = [Position("", roots)]
    while pending:
        position = pending.pop()
        path, (first, *others) = position
        known = positions.setdefault(id(first), position)
        if known is not position:
            if any(a is not b for a, b in zip(known.copies, position.copies, strict=True)):
                raise ValueError(f"the copies must match: they tie {position} differently")
            continue
        names = list(first._modules)
        for copy_id, module in enumerate(others, 1):
            if type(module) is not type(first) or list(module._modules) != names:
                raise ValueError(
                    f"the copies must match: {position} is {outlined(first)} in copy 0 "
                    f"but {outlined(module)} in copy {copy_id}"
                )
        for name in reversed(names):
            copies = [module._modules[name] for module in position.copies]
            present = tuple(child for child in copies if child is not None)
            child_path = f"{path}.{name}" if path else name
            if len(present) == len(copies):
                pending.append(Position(child_path, present))
            elif present:
                raise ValueError(f"the copies must match: only some of them have `{child_path}`")
    return list(positions.values())


def outlined(module: nn.Module) -> str:
    """Returns a module's type and children, for messages."""
    return f"{type(module).__name__}({', '.join(module._modules)})"
