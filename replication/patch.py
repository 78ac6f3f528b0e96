"""Adds the replication callback to an existing `torch.nn.DataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from torch import nn

from replication._torch import HOOKS
from replication.callbacks import execute_replication_callbacks
from replication.data_parallel import DataParallel
from replication.modules import layers_of
from replication.sync.lifecycle import first_failure_wins, rendezvous_of
from replication.sync.rendezvous import RenewedLock

__all__ = ["PatchHandle", "patch_replication_callback"]


class extended:
    """Makes a method that extends the one of the unpatched object, and gets it as an argument."""

    # With `__set__` it comes before an attribute of the object. So a method that the user sets on
    # the object stays where it is, before, during and after the patch, and is extended as well.

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self._name = method, method.__name__

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        if owner is None:  # as in `type(model).replicate(model, ...)`
            return self._call
        own = vars(owner).get(self._name)
        unpatched = getattr(super(Patched, owner), self._name) if own is None else own
        return partial(self._method, owner, unpatched)

    def _call(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(owner)(*args, **kwargs)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        if vars(owner).pop(self._name, None) is None:
            raise AttributeError(self._name)


# Methods of a class, so that they also act on copies of the object (by ``copy``, ``deepcopy``
# or ``pickle``) and on its replicas in another DataParallel.
class Patched:
    """A mixin in front of the original class of a patched DataParallel."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Does nothing, so that a hook of the original class does not run."""

    @extended
    def replicate(self: Any, unpatched: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes the replicas, gives them their own hooks, and runs their callbacks."""
        replicas = unpatched(*args, **kwargs)
        originals = {id(module) for _, module in layers_of(self.module)}
        for replica in replicas:
            for _, module in layers_of(replica):
                if id(module) not in originals:  # else its class returns itself as its replica
                    state = vars(module)
                    state.update({name: state[name].copy() for name in HOOKS})
        if rendezvous_of(replicas) is None:  # else the method called them itself
            execute_replication_callbacks(replicas)
        return replicas

    @extended
    def parallel_apply(self, unpatched: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the replicas and raises the first error."""
        return first_failure_wins(unpatched, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Patched classes are made at run time, so the original class is pickled instead.
        patched, original = type(self), type(self).__bases__[-1]
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        make, *args = (original if part is patched else part for part in (make, *args))
        return _make_patched, (make, *args), *rest


def _make_patched(make: Callable[..., Any], *args: Any) -> Any:
    data_parallel = make(*args)
    patch_replication_callback(data_parallel)
    return data_parallel


_lock = RenewedLock()


def _change_class(data_parallel: Any, before: Any, after: Any) -> None:
    """Changes the class of an object, unless another thread has changed it meanwhile."""
    # This is the only change to the object, so an interrupt leaves it patched or not.
    with _lock():
        if type(data_parallel) is before:
            object.__setattr__(data_parallel, "__class__", after)


class PatchHandle:
    """Undoes `patch_replication_callback`: by ``remove()``, or at the end of a ``with`` block."""

    def __init__(self, data_parallel: nn.DataParallel[Any]) -> None:
        self._data_parallel = ref(data_parallel)
        # Identifies this patch, because the object may be patched again later.
        self._patched = type(data_parallel)

    def remove(self) -> None:
        """Removes the callbacks. May be called more than once."""
        if issubclass(self._patched, Patched):  # else the object's own class runs the callbacks
            _change_class(self._data_parallel(), self._patched, self._patched.__bases__[-1])

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> PatchHandle:
    """Adds the replication callback to a `DataParallel` object, stock or customized.

    From now on its ``replicate`` calls `execute_replication_callbacks`, and its ``parallel_apply``
    raises the first of several errors. Its class becomes a derived class of the same name. Copies
    of the object are patched as well. Patching twice is patching once: either handle undoes it.

    >>> from torch import nn
    >>> from replication import patch_replication_callback
    >>> model = nn.DataParallel(nn.Linear(3, 2))
    >>> handle = patch_replication_callback(model)
    >>> handle.remove()

    Returns:
        A handle whose ``remove()`` undoes the patch.

    Raises:
        TypeError: ``data_parallel`` is not a `torch.nn.DataParallel`.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(f"expected a torch.nn.DataParallel (got {type(data_parallel).__name__})")
    kind = type(data_parallel)  # read once: another thread may patch it
    if not runs_callbacks(kind):
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        patched = type(kind.__name__, (Patched, kind), names)
        _change_class(data_parallel, kind, patched)
    return PatchHandle(data_parallel)


def runs_callbacks(kind: type[nn.DataParallel[Any]]) -> bool:
    """Whether a class runs the replication callbacks, by itself or because of a patch."""
    return issubclass(kind, Patched) or kind.replicate is DataParallel.replicate
