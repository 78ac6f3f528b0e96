"""The replication callback, and the patch that adds it to an existing `torch.nn.DataParallel`.

The callback tells each layer of each copy about its replication.

A layer opts in with a method ``__data_parallel_replicate__(self, ctx, copy_id)``. It is called on
every copy of the layer after replication and before any forward:

    copy 0:  root, first child, ...      all of copy 0 first
    copy 1:  root, first child, ...      then the others, in order

The copies of a layer share one `CallbackContext`, which gives them a `Group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import unwrap
from itertools import product
from typing import Any, TypeVar
from weakref import ref

from torch import nn

from replication._torch import current_backward
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import add_note
from replication.groups.replicas import CallbackContext
from replication.modules import paired, with_class
from replication.steps.parallel_apply import parallel_apply
from replication.sync.lifecycle import (
    CurrentReplica,
    attach_rendezvous,
    first_failure_wins,
    rendezvous_of,
    this_thread,
)
from replication.texts import path_or_root

__all__ = [
    "PatchHandle",
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "patch_replication_callback",
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
    layers, size = paired(modules), len(modules)
    # On a module, `getattr` would be slow: nn.Module raises an error for each missing attribute.
    kinds = {kind for kind in {type(c[0]) for _, c in layers} if hasattr(kind, CALLBACK)}
    parsed = list(map(device_of, modules)) if devices is None else parse_devices(devices)
    rendezvous = attach_rendezvous(modules)
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
                contexts[path] = CallbackContext(size, parsed, path, rendezvous)
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


exec_data_parallel_replication_callback = execute_replication_callbacks


def with_callbacks(replicate: MethodT) -> MethodT:
    """Marks a method ``replicate`` as one that runs the callbacks."""
    vars(replicate)["runs_callbacks"] = True
    return replicate


def runs_callbacks(kind: type[nn.DataParallel[Any]]) -> bool:
    """Whether the ``replicate`` of a class runs the callbacks, or may call by super one that does.

    If super's is not reached after all, the layers warn in the first forward.
    """
    for base in kind.__mro__:
        if "replicate" in vars(base):
            method = vars(base)["replicate"]
            if "runs_callbacks" in vars(method):
                return True
            code = getattr(unwrap(method), "__code__", None)
            if code is not None and "super" not in code.co_names:
                return False
    return False


# -- the patch ----------------------------------------------------------------------------------


# Methods of a class, so that they also act on copies of the object and on its replicas in another
# DataParallel.
class Patched(nn.DataParallel[Any]):
    """A mixin in front of the original class of a patched DataParallel."""

    @with_callbacks
    def replicate(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the replicas, and runs their callbacks."""
        replicas = super().replicate(*args, **kwargs)
        if rendezvous_of(replicas) is None:  # else the method called them itself
            execute_replication_callbacks(replicas)
        return replicas

    def parallel_apply(self, replicas: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the replicas and raises the first error."""
        run = super().parallel_apply
        if getattr(run, "__func__", None) is nn.DataParallel.parallel_apply:  # makes new threads
            run = partial(parallel_apply, devices=self.device_ids[: len(replicas)])
        return first_failure_wins(run, replicas, *args, **kwargs)


class PatchHandle:
    """Undoes `patch_replication_callback` by ``remove()``."""

    def __init__(self, data_parallel: nn.DataParallel[Any]) -> None:
        self._data_parallel = ref(data_parallel)
        # Identifies this patch, because the object may be patched again later.
        self._patched = type(data_parallel)

    def remove(self) -> None:
        """Removes the callbacks. May be called more than once."""
        data_parallel: Any = self._data_parallel()
        if type(data_parallel) is self._patched and issubclass(self._patched, Patched):
            data_parallel.__class__ = self._patched.__bases__[-1]


def check_methods(data_parallel: nn.DataParallel[Any]) -> None:
    """Raises TypeError if a step is set on the object, where it hides the one of the class."""
    for name in ("replicate", "parallel_apply"):
        if name in vars(data_parallel):
            raise TypeError(
                f"{name} must be a method of the class (got an attribute of this "
                f"{type(data_parallel).__name__} object, perhaps from another toolkit's patch); "
                f"remove it by del model.{name}, or override the method in a class"
            )


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> PatchHandle:
    """Adds the replication callback to a `DataParallel` object, stock or customized.

    After this call, layers of its replicas can communicate:

    - ``replicate`` calls `execute_replication_callbacks`.
    - ``parallel_apply`` raises the first of several errors. If that method is torch's own, it uses
      the threads of `replication.parallel_apply`.

    The object's class becomes a derived class of the same name. So copies of the object are
    patched as well, but it cannot be pickled: save its ``state_dict``. A second patch of the same
    object changes nothing, and the handle of either call undoes it.

    >>> from torch import nn
    >>> from replication import patch_replication_callback
    >>> model = nn.DataParallel(nn.Linear(3, 2))
    >>> handle = patch_replication_callback(model)
    >>> handle.remove()

    Returns:
        A handle whose ``remove()`` undoes the patch.

    Raises:
        TypeError: ``data_parallel`` is not a `torch.nn.DataParallel`, or one of the two methods is
            set on the object itself, as the patch of an older toolkit does.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"expected a torch.nn.DataParallel (got {type(data_parallel).__name__})")
    kind = type(data_parallel)
    if not runs_callbacks(kind):
        check_methods(data_parallel)
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        # The only change to the object, so an interrupt leaves it patched or not.
        data_parallel.__class__ = type(kind.__name__, (Patched, kind), names)
    return PatchHandle(data_parallel)
