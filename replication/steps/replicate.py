"""Replicas of a module on any list of devices; their gradients are summed into the original."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import (
    COMPILED_CALL_IMPL,
    HOOKS,
    MAKE_SHELL,
    compiled_module,
    has_other_derivatives,
    shell_state,
)
from replication.containers import PLAIN, open_builtin
from replication.devices import DeviceLike, parse_devices, to_device
from replication.errors import check_module, lost_derivatives
from replication.modules import Copies, check_initialized, layers_of
from replication.steps.broadcast import broadcast, copy_buffers
from replication.sync.lifecycle import TrackedForward, untrack
from replication.tree import leaves_of, replace_leaves

__all__ = ["replicate"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: A replica's parameters, buffers and submodules, by the id of the original. None maps to None.
Copied = dict[int, Any]

#: Attributes that every module has. None of them holds a tensor of the user's.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
#: The dictionaries of a module that each replica copies. torch's replicas share the hooks: a hook
#: that one replica registers in its forward would run in all others.
_DICTIONARIES = ("_parameters", "_buffers", "_modules", *HOOKS)
#: How attributes are set, unless a class overrides it, as RNNs do.
_SETATTR: Any = nn.Module.__setattr__
#: The name that a wrapper of `torch.compile` gives its module.
_WRAPPED = "_orig_mod"
#: Leaves of plain attributes that may be another object in a replica.
_REPLACED = (Tensor, nn.Module, MethodType, PackedSequence)


def replicate(
    network: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Makes one replica of ``network`` for each device.

    As in `torch.nn.parallel.replicate`, a replica's parameters are plain tensors, which are
    attributes under the original names (``parameters()`` of a replica is empty). Gradients flow
    through them to the parameters of ``network``, and are summed there in replica order.

    On the device of the original, replicas share the storage of its parameters. Copy 0 also shares
    the buffers, so its in-place updates persist. The other copies have their own buffers.

    Tensors in plain attributes move to the replica's device. References to the module's own
    parameters, buffers, submodules and bound methods become references to the replica's. Both also
    apply inside a list, tuple, dict or deque. Everything else is shared, including closures that
    refer to the original. Hooks of the original run in all replicas. Hooks that a replica
    registers stay in that replica. Compiled modules run uncompiled in replicas.

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
    replicas, _ = make_replicas(network, parse_devices(devices), detach)
    return replicas


def make_replicas(
    module: ModuleT, devices: Sequence[torch.device], detach: bool
) -> tuple[list[ModuleT], list[Copies] | None]:
    """Does what `replicate` does, for devices that are checked already."""
    # Also returns each submodule with its copies, as `paired` would find them. None if a class
    # takes part in making its copies, because they may then differ.
    collects_garbage = gc.isenabled()
    try:
        # Each module of each replica takes a dozen containers. None is garbage, but they would
        # make Python look for garbage many times in a forward, now and then among all objects.
        gc.disable()
        return _make_replicas(module, devices, detach)
    finally:
        if collects_garbage:
            gc.enable()


def _make_replicas(
    module: ModuleT, devices: Sequence[torch.device], detach: bool
) -> tuple[list[ModuleT], list[Copies] | None]:
    layers, wrappers = _layers_to_copy(module)
    paths, modules = zip(*layers, strict=True)
    templates = [shell_state(module) for module in modules]
    for (path, original), template in zip(layers, templates, strict=True):
        if template is None:
            check_initialized(path, original)
            if isinstance(original, torch.jit.ScriptModule):
                raise TypeError("a ScriptModule cannot be replicated; wrap what it was made of")
    if not devices:
        return [], None
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
    if has_other_derivatives((*parameters.values(), *buffers.values())):
        raise lost_derivatives("replicate")
    keys = [*parameters, *buffers, *map(id, modules), id(None)]
    replicas: list[list[Any]] = []
    copied: list[Copied] = []
    for parameters_of_copy, buffers_of_copy in zip(
        broadcast(list(parameters.values()), devices, detach),
        copy_buffers(list(buffers.values()), devices, detach),
        strict=True,
    ):
        shells = [
            getattr(module, MAKE_SHELL)() if template is None else object.__new__(type(module))
            for module, template in zip(modules, templates, strict=True)
        ]
        replicas.append(shells)
        made = *parameters_of_copy, *buffers_of_copy, *shells, None
        copies = dict(zip(keys, made, strict=True))
        copies.update({wrapper: copies[inner] for wrapper, inner in wrappers.items()})
        copied.append(copies)
    positions = list(zip(paths, zip(*replicas, strict=True), strict=True))
    for original, template, (_, of_original) in zip(modules, templates, positions, strict=True):
        _fill(original, template, of_original, copied, devices)
    usual = [type(module).__setattr__ is _SETATTR for module in modules]
    is_known = None not in templates and all(usual)
    return [shells[0] for shells in replicas], positions if is_known else None


def _layers_to_copy(root: nn.Module) -> tuple[list[tuple[str, nn.Module]], dict[int, int]]:
    """Returns the paths and modules to copy, and the ids of wrappers and of their modules."""
    # A wrapper of `torch.compile` is not copied: a replica has its copy of the module instead.
    layers = layers_of(root)
    wrappers: dict[int, int] = {}
    for _, module in layers:
        if _WRAPPED in module._modules and (inner := compiled_module(module)) is not module:
            if any(vars(module).get(name) for name in HOOKS):
                raise TypeError(
                    "a compiled module must not have its own hooks; register them on the module"
                )
            wrappers[id(module)] = id(inner)
    if wrappers:
        layers = [
            (".".join(name for name in path.split(".") if name != _WRAPPED), module)
            for path, module in layers
            if id(module) not in wrappers
        ]
    return layers, wrappers


def _fill(
    module: nn.Module,
    template: dict[str, Any] | None,
    shells: Sequence[nn.Module],
    copied: Sequence[Copied],
    devices: Sequence[torch.device],
) -> None:
    """Gives the shells of a module their children, parameters and buffers, and their own hooks."""
    # `template` holds the attributes of all shells; None if the class has made the shells.
    # A copy, because another thread may run the module, which may set attributes.
    original = module.__dict__.copy()
    children, buffers, parameters = module._modules, module._buffers, module._parameters
    replaced = _attributes_to_replace(original)
    sets_attributes = type(module).__setattr__ is not _SETATTR
    # Of a replica that is replicated again.
    is_tracked = isinstance(original.get("forward"), TrackedForward)
    is_compiled = original.get(COMPILED_CALL_IMPL) is not None
    for shell, copies, device in zip(shells, copied, devices, strict=True):
        if template is None:
            state = shell.__dict__
        else:
            state = template.copy()
            # A class's own `__setattr__` would look for parameters.
            object.__setattr__(shell, "__dict__", state)
        if shell is not module:  # some classes return the module itself as its shell
            for name in _DICTIONARIES:
                state[name] = state[name].copy()
        for name, child in children.items():
            state["_modules"][name] = copies[id(child)]
        for name, buffer in buffers.items():
            state["_buffers"][name] = copies[id(buffer)]
        # torch exposes the copies of the parameters here as well.
        state["_former_parameters"] = attributes = {}
        for name, parameter in parameters.items():
            if parameter is None:
                state["_parameters"][name] = None
            else:
                attributes[name] = copies[id(parameter)]
        if replaced:
            attributes = attributes | replaced_attributes(replaced, copies, device)
        if sets_attributes:
            for name, value in attributes.items():
                setattr(shell, name, value)
        else:
            state.update(attributes)
        if is_tracked:
            untrack(shell)
        if is_compiled:  # the compiled call would run the original
            state[COMPILED_CALL_IMPL] = None


def _attributes_to_replace(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain attributes of a module that may be other objects in a replica."""
    found = {}
    for name, value in state.items():
        kind = type(value)
        if (
            name in _MODULE_ATTRIBUTES
            or kind in PLAIN
            or (kind in (tuple, list) and PLAIN.issuperset(map(type, value)))
        ):
            continue  # nearly all
        if any(isinstance(leaf, _REPLACED) for leaf in leaves_of(value, open_builtin)):
            found[name] = value
    return found


def replaced_attributes(
    attributes: dict[str, Any], copied: Copied, device: torch.device
) -> dict[str, Any]:
    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copied.get(id(compiled_module(leaf)), leaf)
        if isinstance(leaf, (Tensor, PackedSequence)):
            known = copied.get(id(leaf))
            return to_device(leaf, device) if known is None else known
        if isinstance(leaf, MethodType) and id(leaf.__self__) in copied:
            return MethodType(leaf.__func__, copied[id(leaf.__self__)])
        return leaf

    new = replace_leaves(replaced, attributes, open_builtin)
    return {name: value for name, value in new.items() if value is not attributes[name]}
