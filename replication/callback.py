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
from types import new_class
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle

from replication.checks import check_module
from replication.context import CallbackContext
from replication.devices import DeviceLike, device_of, parse_devices
from replication.notes import add_note
from replication.place import Place, standing_at
from replication.replicate import own_hooks
from replication.torch_internals import IS_REPLICA, compiled_module, current_backward
from replication.watch import first_failure_wins, rendezvous_of, watch
from replication.wording import path_or_root

__all__ = [
    "PatchHandle",
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "patch_replication_callback",
    "register_replication_callback",
]

CALLBACK = "__data_parallel_replicate__"

#: A method ``replicate`` with this attribute true calls the callbacks by itself.
RUNS_CALLBACKS = "runs_replication_callbacks"


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
          not wait for it, whoever runs them (see `replication.rendezvous`).

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
                here = Place(rendezvous, copy_id, backward, path_or_root(position.path))
                try:
                    with standing_at(here):
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
