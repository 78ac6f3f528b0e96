"""Adds the replication callback to a `torch.nn.DataParallel` that exists already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import new_class
from typing import Any
from weakref import ref

from torch import nn

from replication.callbacks import execute_replication_callbacks
from replication.steps.replicate import own_hooks
from replication.sync.lifecycle import first_failure_wins, rendezvous_of

__all__ = ["PatchHandle", "patch_replication_callback"]

#: A method ``replicate`` with this attribute true calls the callbacks by itself.
RUNS_CALLBACKS = "runs_replication_callbacks"


#: Where a patched DataParallel keeps the methods that its user has set on the object itself.
_OWN_METHODS = "_unpatched_methods"


class Patched:
    """The methods of a patched DataParallel: a base of its class, in front of the one it had.

    The methods belong to the class and not to the object, so every copy runs them on itself,
    whether made by ``copy``, ``deepcopy`` or ``pickle``, or as a replica in another DataParallel.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Does nothing: the class that is patched need not know of it."""

    def replicate(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the replicas, gives them hooks of their own, and runs their callbacks."""
        replicas = self._unpatched("replicate")(*args, **kwargs)
        given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)]
        originals = {id(module) for arg in given for module in arg.modules()}
        for replica in replicas:
            for module in replica.modules():
                if id(module) not in originals:  # else its class does not want to be replicated
                    own_hooks(vars(module))
        if rendezvous_of(replicas) is None:  # else the method has called them itself
            execute_replication_callbacks(replicas)
        return replicas

    def parallel_apply(self, replicas: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Runs the replicas, and raises the error that came first."""
        return first_failure_wins(self._unpatched("parallel_apply"), replicas, *args, **kwargs)

    def _unpatched(self, name: str) -> Callable[..., Any]:
        own = vars(self)[_OWN_METHODS]
        return own[name] if name in own else getattr(super(), name)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so it is pickled as the one that it was made of.
        made, base = type(self), unpatched_class(self)
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        make, *args = (base if part is made else part for part in (make, *args))
        return _make_patched, (make, *args), *rest


def _make_patched(make: Callable[..., Any], *args: Any) -> Any:
    made = make(*args)
    patch_class(made)
    return made


def patch_class(data_parallel: Any) -> None:
    """Makes an object one of a `Patched` class, which has the name of the one it had."""
    kind = type(data_parallel)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    patched = new_class(kind.__name__, (Patched, kind), exec_body=lambda body: body.update(names))
    object.__setattr__(data_parallel, "__class__", patched)
    vars(data_parallel).setdefault(_OWN_METHODS, {})  # a copy may come without its attributes


def unpatched_class(data_parallel: Any) -> Any:
    """Returns the class that a patched object had before."""
    return type(data_parallel).__bases__[-1]


class PatchHandle:
    """Undoes `patch_replication_callback`. Also a context manager that does so at its end."""

    def __init__(self, data_parallel: nn.DataParallel[Any] | None = None) -> None:
        self._data_parallel = (lambda: None) if data_parallel is None else ref(data_parallel)
        # To tell this patch from a later one.
        self._own_methods = self._kept()

    def _kept(self) -> Any:
        data_parallel = self._data_parallel()
        return None if data_parallel is None else vars(data_parallel).get(_OWN_METHODS)

    def remove(self) -> None:
        """Takes the callbacks away again. May be called more than once."""
        data_parallel, kept = self._data_parallel(), self._kept()
        if kept is not None and kept is self._own_methods:
            object.__setattr__(data_parallel, "__class__", unpatched_class(data_parallel))
            del vars(data_parallel)[_OWN_METHODS]
            vars(data_parallel).update(kept)

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> PatchHandle:
    """Adds the replication callback to a `DataParallel` object, stock or customized.

    Its ``replicate`` calls `execute_replication_callbacks` from now on, and of several errors its
    ``parallel_apply`` raises the first. The object becomes one of a derived class with the same
    name. Its copies are patched as well. Patching twice is the same as patching once, and either
    handle undoes it::

        model = nn.DataParallel(net, device_ids=[0, 1])
        patch_replication_callback(model)

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
    """Whether the callbacks are called already: by its class, or because it was patched."""
    return isinstance(data_parallel, Patched) or getattr(
        type(data_parallel).replicate, RUNS_CALLBACKS, False
    )
