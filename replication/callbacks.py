"""The replication callback: tells each layer of each copy about its replication.

A layer opts in with a method ``__data_parallel_replicate__(self, ctx, copy_id)``. It is called on
every copy of the layer after replication and before any forward:

    copy 0:  root, first child, ...      all of copy 0 first
    copy 1:  root, first child, ...      then the others, in order

The copies of a layer share one `CallbackContext`, which gives them a `Group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn

from replication._torch import current_backward
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import add_note, path_or_root
from replication.groups.replicas import CallbackContext
from replication.modules import Copies, paired, with_class
from replication.sync.lifecycle import CurrentReplica, attach_rendezvous, this_thread

__all__ = [
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
]

CALLBACK = "__data_parallel_replicate__"

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def execute_replication_callbacks(
    modules: Sequence[nn.Module], devices: Sequence[DeviceLike] | None = None
) -> None:
    """Calls ``__data_parallel_replicate__(ctx, copy_id)`` on every submodule that has it.

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
    layers: Sequence[Copies], devices: Sequence[torch.device | None] | None
) -> None:
    """Gives the copies their rendezvous, and runs the callbacks of each layer's copies."""
    roots = layers[0][1]
    size = len(roots)
    # On a module, `getattr` would be slow: nn.Module raises an error for each missing attribute.
    kinds = {kind for kind in {type(c[0]) for _, c in layers} if hasattr(kind, CALLBACK)}
    devices = tuple(map(device_of, roots) if devices is None else devices)
    rendezvous = attach_rendezvous(roots)
    contexts: dict[str, CallbackContext] = {}
    backward, current = current_backward(), this_thread.current
    try:
        for copy_id, (path, copies) in product(range(size), layers):
            copy = copies[copy_id]
            if type(copy) not in kinds and CALLBACK not in copy.__dict__:
                continue  # nearly all
            callback = getattr(copy, CALLBACK)
            if callback is None:  # a class or an object has switched it off
                continue
            if path not in contexts:
                contexts[path] = CallbackContext(size, devices, path, rendezvous)
            this_thread.current = CurrentReplica(rendezvous, copy_id, backward, path_or_root(path))
            try:
                callback(contexts[path], copy_id)
            except BaseException as error:
                where = with_class(path, copy)
                add_note(error, f"in {CALLBACK} of {where}, copy {copy_id} of {size}")
                raise
    finally:
        # A plain assignment: a Ctrl-C may keep an `__exit__` from running.
        this_thread.current = current
