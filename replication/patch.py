"""Adds the replication callback to an existing `torch.nn.DataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import new_class
from typing import Any
from weakref import ref

from torch import nn

from replication._torch import HOOKS
from replication.callbacks import execute_replication_callbacks
from replication.modules import layers_of
from replication.sync.lifecycle import first_failure_wins, rendezvous_of

__all__ = ["PatchHandle", "patch_replication_callback"]

#: The attribute of a method ``replicate`` that already runs the callbacks.
RUNS_CALLBACKS = "runs_replication_callbacks"

#: The attribute of a patched DataParallel with the methods that its user set on the object.
_OWN_METHODS = "_unpatched_methods"


class Patched:
    """A mixin in front of the original class of a patched DataParallel.

    As methods of a class, they act on copies of the object as well: copies by ``copy``,
    ``deepcopy`` or ``pickle``, and replicas in another DataParallel.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Does nothing, so that a hook of the original class does not run."""

    def replicate(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the replicas, gives them their own hooks, and runs their callbacks."""
        replicas = self._unpatched("replicate")(*args, **kwargs)
        roots = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)]
        originals = {id(module) for root in roots for _, module in layers_of(root)}
        for replica in replicas:
            for _, module in layers_of(replica):
                if id(module) not in originals:  # else its class returns itself as its replica
                    state = vars(module)
                    state.update({name: state[name].copy() for name in HOOKS})
        if rendezvous_of(replicas) is None:  # else the method called them itself
            execute_replication_callbacks(replicas)
        return replicas

    def parallel_apply(self, replicas: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Runs the replicas and raises the first error."""
        return first_failure_wins(self._unpatched("parallel_apply"), replicas, *args, **kwargs)

    def _unpatched(self, name: str) -> Callable[..., Any]:
        own = vars(self)[_OWN_METHODS]
        return own[name] if name in own else getattr(super(), name)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Patched classes are made at run time, so the original class is pickled instead.
        patched, original = type(self), unpatched_class(self)
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        make, *args = (original if part is patched else part for part in (make, *args))
        return _make_patched, (make, *args), *rest


def _make_patched(make: Callable[..., Any], *args: Any) -> Any:
    data_parallel = make(*args)
    patch_class(data_parallel)
    return data_parallel


def patch_class(data_parallel: Any) -> None:
    """Changes the class of an object to a `Patched` class of the same name."""
    kind = type(data_parallel)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    patched = new_class(kind.__name__, (Patched, kind), exec_body=lambda body: body.update(names))
    object.__setattr__(data_parallel, "__class__", patched)
    vars(data_parallel).setdefault(_OWN_METHODS, {})  # a copy may come without its attributes


def unpatched_class(data_parallel: Any) -> Any:
    """Returns the original class of a patched object."""
    return type(data_parallel).__bases__[-1]


class PatchHandle:
    """Undoes `patch_replication_callback`: by ``remove()``, or at the end of a ``with`` block."""

    def __init__(self, data_parallel: nn.DataParallel[Any] | None = None) -> None:
        self._data_parallel = (lambda: None) if data_parallel is None else ref(data_parallel)
        # Identifies this patch, because the object may be patched again later.
        self._own_methods = self._current_own_methods()

    def _current_own_methods(self) -> Any:
        data_parallel = self._data_parallel()
        return None if data_parallel is None else vars(data_parallel).get(_OWN_METHODS)

    def remove(self) -> None:
        """Removes the callbacks. May be called more than once."""
        data_parallel, own_methods = self._data_parallel(), self._current_own_methods()
        if own_methods is not None and own_methods is self._own_methods:
            object.__setattr__(data_parallel, "__class__", unpatched_class(data_parallel))
            del vars(data_parallel)[_OWN_METHODS]
            vars(data_parallel).update(own_methods)

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> PatchHandle:
    """Adds the replication callback to a `DataParallel` object, stock or customized.

    From now on its ``replicate`` calls `execute_replication_callbacks`, and its ``parallel_apply``
    raises the first of several errors. The class of the object becomes a derived class with the
    same name. Copies of the object are patched as well. Patching twice is the same as patching
    once, and either handle undoes the patch.

    >>> from torch import nn
    >>> from replication import patch_replication_callback
    >>> model = nn.DataParallel(nn.Linear(3, 2))
    >>> handle = patch_replication_callback(model)
    >>> handle.remove()

    See also `DataParallel`.

    Returns:
        A handle whose ``remove()`` undoes the patch.

    Raises:
        TypeError: ``data_parallel`` is not a `torch.nn.DataParallel`.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise TypeError(
            "expected a torch.nn.DataParallel, or an object of a class derived from it "
            f"(got {type(data_parallel).__name__})"
        )
    if isinstance(data_parallel, Patched):
        return PatchHandle(data_parallel)
    if has_replication_callback(data_parallel):
        return PatchHandle()
    state = vars(data_parallel)
    state[_OWN_METHODS] = {
        name: state.pop(name) for name in ("replicate", "parallel_apply") if name in state
    }
    patch_class(data_parallel)
    return PatchHandle(data_parallel)


def has_replication_callback(data_parallel: nn.DataParallel[Any]) -> bool:
    """Returns whether a DataParallel runs the callbacks, by its class or because of a patch."""
    return isinstance(data_parallel, Patched) or getattr(
        type(data_parallel).replicate, RUNS_CALLBACKS, False
    )
