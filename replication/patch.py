"""Adds the replication callback to an existing `torch.nn.DataParallel`."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

from torch import nn

from replication.callbacks import execute_replication_callbacks, runs_callbacks, with_callbacks
from replication.devices import parse_devices
from replication.steps.parallel_apply import run_replicas
from replication.sync.lifecycle import first_failure_wins, rendezvous_of

__all__ = ["PatchHandle", "patch_replication_callback"]


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
            run = partial(run_replicas, devices=parse_devices(self.device_ids[: len(replicas)]))
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

    From now on its ``replicate`` calls `execute_replication_callbacks`, and its ``parallel_apply``
    raises the first of several errors. If that method is torch's own, it uses the threads of
    `replication.parallel_apply`. Its class becomes a derived class of the same name, so copies of
    the object are patched as well, but it cannot be pickled: save its ``state_dict``. A second
    patch of the same object changes nothing, and the handle of either call undoes the patch.

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
