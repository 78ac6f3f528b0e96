"""The replication callback: tells each layer of each copy about its replication.

A layer opts in with a method ``__data_parallel_replicate__(self, ctx, copy_id)``. It is called on
every copy of the layer after replication and before any forward:

    copy 0:  root, first child, ...      all of copy 0 first
    copy 1:  root, first child, ...      then the others, in order

The copies of a layer share one `CallbackContext`, which gives them a `Group`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from replication._torch import IS_REPLICA, compiled_module, current_backward
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import add_note, check_module, path_or_root
from replication.groups.replicas import CallbackContext
from replication.modules import Position, paired, with_class
from replication.sync.lifecycle import CurrentReplica, attach_rendezvous, this_thread

__all__ = [
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "register_replication_callback",
]

CALLBACK = "__data_parallel_replicate__"

#: The attribute of a module with its registered callbacks, which its replicas share.
_REGISTERED = "_replication_callbacks"

Callback = Callable[[nn.Module, CallbackContext, int], object]
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def register_replication_callback(module: nn.Module, callback: Callback) -> RemovableHandle:
    """Gives a module a replication callback without changing its class.

    ``callback(copy, ctx, copy_id)`` is called for each of several copies, after the copy's own
    ``__data_parallel_replicate__``. A deep copy of ``module`` keeps its callbacks.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel, register_replication_callback
    >>> net = nn.Linear(2, 1)
    >>> handle = register_replication_callback(
    ...     net, lambda copy, ctx, copy_id: print(f"copy {copy_id} of {ctx.num_copies}")
    ... )
    >>> y = DataParallel(net, ["cpu"] * 2)(torch.ones(4, 2))
    copy 0 of 2
    copy 1 of 2

    Args:
        module: Any module, alone or part of a module that will be replicated.
        callback: The function. Attributes that it sets on the copy are discarded after the
            forward. To pickle the module, use a top-level function.

    Returns:
        A handle whose ``remove()`` removes the callback.

    Raises:
        TypeError: ``module`` is a DataParallel or a replica.
    """
    check_module(module)
    module = compiled_module(module)  # the copies are made of the wrapped module
    if isinstance(module, nn.DataParallel) or getattr(module, IS_REPLICA, False):
        raise TypeError("a DataParallel or a replica has no callbacks; register with its module")
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

    >>> from torch import nn
    >>> from replication import execute_replication_callbacks, replicate
    >>> class Numbered(nn.Module):
    ...     def __data_parallel_replicate__(self, ctx, copy_id):
    ...         print(f"copy {copy_id} of {ctx.num_copies}")
    >>> execute_replication_callbacks(replicate(Numbered(), ["cpu"] * 2))
    copy 0 of 2
    copy 1 of 2

    All callbacks of copy 0 run first, in the order of ``modules()``, then those of copy 1, and so
    on. A submodule under several names is called once per copy. From then on, if the forward of
    one copy fails or ends, the others do not wait for it, however they are run.

    Args:
        modules: The copies of one module, copy 0 first.
        devices: The device of each copy, by default the device of its first tensor.

    Raises:
        ValueError: The copies differ in structure, or ``devices`` has another length. No callback
            has run.
        Exception: A callback raised. A note names the module's path and the copy.
    """
    if devices is not None and len(devices) != len(modules):
        raise ValueError(f"expected one device per copy, {len(modules)} (got {len(devices)})")
    parsed = None if devices is None else parse_devices(devices)
    connect_copies(paired(modules), parsed)


exec_data_parallel_replication_callback = execute_replication_callbacks


def with_callbacks(replicate: MethodT) -> MethodT:
    """Marks a method ``replicate`` as one that runs the callbacks."""
    vars(replicate)["runs_callbacks"] = True
    return replicate


def runs_callbacks(kind: type[nn.DataParallel[Any]]) -> bool:
    return "runs_callbacks" in vars(kind.replicate)


def connect_copies(
    positions: Sequence[Position], devices: Sequence[torch.device | None] | None
) -> None:
    """Gives the copies their rendezvous, and runs the callbacks of each layer's copies."""
    roots = positions[0][1]
    size = len(roots)
    # On a module, `getattr` would be slow: nn.Module raises an error for each missing attribute.
    kinds = {kind for kind in {type(c[0]) for _, c in positions} if hasattr(kind, CALLBACK)}
    devices = tuple(map(device_of, roots) if devices is None else devices)
    rendezvous = attach_rendezvous(roots)
    contexts: dict[str, CallbackContext] = {}
    backward, current = current_backward(), this_thread.current
    try:
        for copy_id, (path, copies) in product(range(size), positions):
            copy = copies[copy_id]
            state = copy.__dict__
            if type(copy) not in kinds and CALLBACK not in state and _REGISTERED not in state:
                continue  # nearly all
            if path not in contexts:
                contexts[path] = CallbackContext(size, devices, path, rendezvous)
            this_thread.current = CurrentReplica(rendezvous, copy_id, backward, path_or_root(path))
            for name, callback in _callbacks_of(copy):
                try:
                    callback(contexts[path], copy_id)
                except BaseException as error:
                    where = with_class(path, copy)
                    add_note(error, f"in {name} of {where}, copy {copy_id} of {size}")
                    raise
    finally:
        this_thread.current = current  # not in an `__exit__`, which a Ctrl-C may keep from running


def _callbacks_of(copy: nn.Module) -> list[tuple[str, Callable[..., object]]]:
    method = getattr(copy, CALLBACK, None)
    callbacks = [] if method is None else [(CALLBACK, method)]
    # At once, because another thread may register one: an `OrderedDict` would notice.
    for function in list(dict.values(vars(copy).get(_REGISTERED, {}))):
        callbacks.append(("a registered callback", partial(function, copy)))
    return callbacks
