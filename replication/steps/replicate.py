"""Replicas of a module on any list of devices; their gradients are summed into the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import (
    COMPILED_CALL_IMPL,
    HOOKS,
    compiled_module,
    has_other_derivatives,
    make_shell,
)
from replication.checks import check_module
from replication.containers import SCALARS, open_builtin
from replication.devices import DeviceLike, parse_devices, to_device
from replication.errors import lost_derivatives
from replication.modules import check_initialized, layers_of, with_class
from replication.steps.broadcast import broadcast, copy_buffers
from replication.sync.lifecycle import TrackedForward
from replication.tree import leaves_of, replace_leaves

__all__ = ["replicate"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: A replica's parameters, buffers and submodules, by the id of the original. None maps to None.
CopyById = dict[int, Any]

#: Attributes that every module has. None of them holds a tensor of the user's.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
#: The dictionaries of a module that each replica copies. torch's replicas share the hooks: a hook
#: that one replica registers in its forward would run in all others.
_DICTIONARIES = ("_buffers", "_modules", *HOOKS)
#: The name that a wrapper of `torch.compile` gives its module.
_WRAPPED = "_orig_mod"
#: Leaves of plain attributes that may be another object in a replica.
_REPLACED = (Tensor, nn.Module, MethodType, PackedSequence)


def replicate(
    network: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Makes one replica of ``network`` for each device.

    Just as in `torch.nn.parallel.replicate`, a replica's parameters are plain tensors, which are
    attributes under the original names (``parameters()`` of a replica is empty). Gradients flow
    through them to the parameters of ``network``, and are summed there in replica order.

    On the device of the original, replicas share the storage of its parameters (and of buffers
    that require a gradient, which are treated like parameters). Replica 0 also shares the other
    buffers, so its in-place updates persist. The other replicas have their own copies of them.

    Tensors in plain attributes move to the replica's device. References to the module's own
    parameters, buffers, submodules and bound methods become references to the replica's. Both
    apply to attributes and to what is inside a list, tuple or dict. Everything else is shared, for
    example a deque, a dataclass, or a closure that refers to the original. Hooks of the original
    run in all replicas. Hooks that a replica registers stay in that replica. Compiled modules run
    uncompiled in replicas.

    >>> from torch import nn
    >>> from replication import replicate
    >>> replicas = replicate(nn.Linear(3, 2), ["cpu"] * 2)
    >>> len(replicas), len(list(replicas[0].parameters()))
    (2, 0)

    Args:
        network: Any module. Parameters and submodules may be shared (tied) or ``None``.
        devices: Indices of accelerators, strings or `torch.device`. Devices may repeat.
        detach: Whether the replicas are detached from the graph of the original.

    Raises:
        TypeError: ``network`` contains a ScriptModule, or a compiled module with its own hooks.
        RuntimeError: A lazy layer is not initialized.
        NotImplementedError: A transform of `torch.func` or a forward-mode derivative is active.
    """
    check_module(network)
    targets = parse_devices(devices)
    modules, wrappers = _modules_to_copy(network)
    tensors = {
        id(tensor): tensor
        for layer in modules
        for tensor in (*layer._parameters.values(), *layer._buffers.values())
        if tensor is not None
    }
    if has_other_derivatives(tensors.values()):
        raise lost_derivatives("replicate")
    if not targets:
        return []
    buffers = {
        id(buffer): buffer
        for layer in modules
        for buffer in layer._buffers.values()
        if buffer is not None and not buffer.requires_grad
    }
    shared = [tensor for key, tensor in tensors.items() if key not in buffers]
    keys = [*map(id, shared), *buffers, *map(id, modules), id(None)]
    attributes = list(map(_attributes_to_replace, modules))
    replicas: list[Any] = []
    for device, shared_copies, buffer_copies in zip(
        targets,
        broadcast(shared, targets, detach),
        copy_buffers(list(buffers.values()), targets),
        strict=True,
    ):
        shells = list(map(make_shell, modules))
        copies = dict(zip(keys, (*shared_copies, *buffer_copies, *shells, None), strict=True))
        copies.update({wrapper: copies[inner] for wrapper, inner in wrappers.items()})
        for shell, original, replaced in zip(shells, modules, attributes, strict=True):
            _fill(shell, original, copies)
            if replaced:
                vars(shell).update(_replaced(replaced, copies, device))
        replicas.append(shells[0])
    return replicas


def _modules_to_copy(root: nn.Module) -> tuple[list[nn.Module], dict[int, int]]:
    """Returns the modules to copy, and the ids of wrappers and of the modules in them."""
    # A wrapper of `torch.compile` is not copied: a replica has its copy of the module instead.
    modules: list[nn.Module] = []
    wrappers: dict[int, int] = {}
    for path, module in layers_of(root):
        check_initialized(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "DataParallel can't replicate a torch.jit.ScriptModule "
                f"(got {with_class(path, module)}); pass the original nn.Module instead"
            )
        if _WRAPPED in module._modules and (inner := compiled_module(module)) is not module:
            if any(vars(module).get(name) for name in HOOKS):
                raise TypeError(
                    "hooks on the result of torch.compile would be lost in replicas "
                    f"(got {with_class(path, module)}); register them before compiling"
                )
            wrappers[id(module)] = id(inner)
        else:
            modules.append(module)
    return modules, wrappers


def _fill(shell: nn.Module, original: nn.Module, copies: CopyById) -> None:
    """Gives a shell its own children, parameters, buffers and hooks."""
    # By its dictionary, in half the time of `setattr`: `nn.Module.__setattr__` would look for
    # parameters and submodules each time.
    state = vars(shell)
    for name in _DICTIONARIES:
        state[name] = state[name].copy()
    # torch exposes the copies of the parameters here as well.
    state["_former_parameters"] = former = {}
    for name, child in original._modules.items():
        state["_modules"][name] = copies[id(child)]
    for name, buffer in original._buffers.items():
        state["_buffers"][name] = copies[id(buffer)]
    for name, parameter in original._parameters.items():
        if parameter is None:
            state["_parameters"][name] = None
        else:
            state[name] = former[name] = copies[id(parameter)]
    state.pop(COMPILED_CALL_IMPL, None)  # the compiled call would run the original
    if "forward" in state:  # of a replica that is replicated again
        TrackedForward.detach(shell)


def _attributes_to_replace(module: nn.Module) -> dict[str, Any]:
    """Returns the plain attributes of a module that may be other objects in a replica."""
    found = {}
    # A copy, because another thread may run the module, which may set attributes.
    for name, value in vars(module).copy().items():
        kind = type(value)
        if (
            name in _MODULE_ATTRIBUTES
            or kind in SCALARS
            or (kind in (tuple, list) and SCALARS.issuperset(map(type, value)))
        ):
            continue  # nearly all
        if any(isinstance(leaf, _REPLACED) for leaf in leaves_of(value, open_builtin)):
            found[name] = value
    return found


def _replaced(
    attributes: Mapping[str, Any], copies: CopyById, device: torch.device
) -> dict[str, Any]:
    """Returns the attributes that are other objects in the replica with these copies."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copies.get(id(compiled_module(leaf)), leaf)
        if isinstance(leaf, (Tensor, PackedSequence)):
            return copies[id(leaf)] if id(leaf) in copies else to_device(leaf, device)
        if isinstance(leaf, MethodType) and id(leaf.__self__) in copies:
            return MethodType(leaf.__func__, copies[id(leaf.__self__)])
        return leaf

    new = replace_leaves(replaced, attributes, open_builtin)
    return {name: value for name, value in new.items() if value is not attributes[name]}
