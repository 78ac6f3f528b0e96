"""Replicas of a module on any list of devices; their gradients are summed into the original."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import (
    CALL_IMPL,
    COMPILED_CALL_IMPL,
    HOOKS,
    MAKE_SHELL,
    compiled_module,
    is_compiled_wrapper,
    shell_state,
)
from replication.devices import DeviceLike, check_module, to_device, usable_devices
from replication.modules import Position
from replication.steps.broadcast import broadcast, copied_buffers
from replication.sync.lifecycle import untrack
from replication.tree import PLAIN, Made, leaves_of, open_builtin, replace_leaves

__all__ = ["replicate"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: The copies of a replica's parameters, buffers and submodules, by the identity of the original.
Copied = dict[int, Any]

#: Attributes that every module has. None of them holds a tensor of the user's.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
#: The dictionaries of a module. torch's replicas share those of hooks: a hook that one replica
#: registers in its forward would run in all others.
_DICTIONARIES = ("_parameters", "_buffers", "_modules", *HOOKS)
#: Leaves of plain attributes that may be another object in a replica.
_REPLACED = (Tensor, nn.Module, MethodType, PackedSequence)


def replicate(
    module: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Makes one replica of ``module`` for each device.

    As in `torch.nn.parallel.replicate`, a replica's parameters are plain tensors, which are
    attributes under the original names (``parameters()`` of a replica is empty). Gradients flow
    through them to the parameters of ``module``, and are summed there in replica order, so that
    the sum is the same in every run.

    On the device of the original, replicas share the storage of its parameters. Copy 0 also shares
    the buffers, so that its in-place updates of them last. The other copies have their own
    buffers.

    Tensors in plain attributes move to the replica's device if they are elsewhere. References in
    plain attributes to the module's own parameters, buffers, submodules and bound methods become
    references to the replica's. Both hold directly and in a list, tuple, dict or deque. Everything
    else is shared by all replicas and the original, including closures that refer to the original.

    Hooks of the original run in all replicas. Hooks that a replica registers in its forward stay
    in that replica. A module compiled by ``module.compile()`` or ``torch.compile(module)`` runs
    uncompiled in replicas.

    Args:
        module: Any module. Parameters and submodules may be shared (tied) or ``None``.
        devices: Indices of accelerators, strings or `torch.device`. Devices may repeat and may be
            the CPU.
        detach: Whether the replicas are detached from the graph of the original.

    Returns:
        The replicas, in the order of ``devices``.

    Raises:
        TypeError: ``module`` is not a module, is or contains a ScriptModule, or contains the
            result of ``torch.compile(module)`` with its own hooks.
        ValueError: This machine has no such device.
    """
    check_module(module)
    replicas, _ = make_replicas(module, usable_devices(devices), detach)
    return replicas


def make_replicas(
    module: ModuleT, devices: Sequence[torch.device], detach: bool
) -> tuple[list[ModuleT], list[Position] | None]:
    """Does what `replicate` does, for devices that are checked already.

    Returns:
        The replicas, and each submodule with its copies, as `paired` would find them. The latter
        is None if it is unknown, because a class has a part in making its copies.
    """
    templates, wrappers = _templates_of(module)
    if not devices:
        return [], None
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for template in templates:
        for parameter in template.module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
        for buffer in template.module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    copies_of_parameters = broadcast(list(parameters.values()), devices, detach)
    copies_of_buffers = copied_buffers(list(buffers.values()), devices, detach)
    ids = [*parameters, *buffers, *[id(template.module) for template in templates]]
    replicas: list[list[Any]] = []
    for i, device in enumerate(devices):
        shells = [
            t.kind.__new__(t.kind) if t.state is not None else getattr(t.module, MAKE_SHELL)()
            for t in templates
        ]
        originals = (*copies_of_parameters[i], *copies_of_buffers[i], *shells)
        copied = dict(zip(ids, originals, strict=True))
        for wrapper, inner in wrappers.items():
            copied[wrapper] = copied[inner]
        for template, shell in zip(templates, shells, strict=True):
            template.fill(shell, copied, device)
        replicas.append(shells)
    roots = [shells[0] for shells in replicas]
    paths = [t.path for t in templates if t.state is not None and not t.sets_attributes]
    if len(paths) < len(templates):
        return roots, None
    return roots, list(zip(paths, zip(*replicas, strict=True), strict=True))


def _templates_of(root: nn.Module) -> tuple[list[Template], dict[int, int]]:
    """Returns a template for each module, in the order of ``modules()``.

    A wrapper of `torch.compile` is not copied: a replica has its copy of the module instead.

    Returns:
        The templates, and the identity of each wrapper with the identity of its module.
    """
    templates: list[Template] = []
    wrappers: dict[int, int] = {}
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", root)]
    while pending:
        path, module = pending.pop()
        children = module._modules
        if "_orig_mod" in children and is_compiled_wrapper(module):
            _check_wrapper(module)
            wrappers[id(module)] = id(compiled_module(module))
            pending.append((path, children["_orig_mod"]))
        elif id(module) not in seen:
            seen.add(id(module))
            templates.append(Template(path, module))
            prefix = path and path + "."
            for name, child in reversed(children.items()):
                if child is not None:
                    pending.append((prefix + name, child))
    return templates, wrappers


def _check_wrapper(wrapper: nn.Module) -> None:
    if any(vars(wrapper).get(name) for name in HOOKS):
        raise TypeError(
            "the result of torch.compile(module) must not have its own hooks, because replicas "
            "run the module itself; register the hooks on the module"
        )


class Template:
    """One module, looked up once for all of its copies."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.kind: Any = type(module)
        #: The attributes of all copies, or None if the class makes each copy in its own way.
        self.state = shell_state(module)
        if self.state is None and isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a ScriptModule cannot be replicated; wrap the module it was made of")
        #: Whether the class overrides how attributes are set (RNNs do).
        self.sets_attributes = self.kind.__setattr__ is not nn.Module.__setattr__
        state = module.__dict__
        self._is_tracked = CALL_IMPL in state
        self._is_compiled = state.get(COMPILED_CALL_IMPL) is not None
        names = state.keys() - _MODULE_ATTRIBUTES
        values: list[Any] = []
        for name in names:
            value = state[name]
            if type(value) is tuple or type(value) is list:
                values += value
            else:
                values.append(value)
        self._plain: dict[str, Any] = {}
        if not PLAIN.issuperset(map(type, values)):  # rarely
            for name, value in state.items():
                if name in names and _needs_replacing(value):
                    self._plain[name] = value

    def fill(self, shell: nn.Module, copied: Copied, device: torch.device) -> None:
        """Gives a shell the copies of its children, parameters and buffers, and its own hooks."""
        module = self.module
        if self.state is None:
            state = shell.__dict__
        else:
            state = self.state.copy()
            # A class's own `__setattr__` would look for parameters.
            object.__setattr__(shell, "__dict__", state)
        if shell is not module:  # some classes return the module itself as its shell
            for name in _DICTIONARIES:
                state[name] = state[name].copy()
        if module._modules:
            children = state["_modules"]
            for name, child in module._modules.items():
                if child is not None:
                    children[name] = copied[id(child)]
        if module._buffers:
            buffers = state["_buffers"]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    buffers[name] = copied[id(buffer)]
        parameters = {}
        if module._parameters:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    state["_parameters"][name] = None
                else:
                    parameters[name] = copied[id(parameter)]
        # torch exposes the copies of the parameters here as well.
        state["_former_parameters"] = parameters
        attributes = parameters
        if self._plain:
            attributes = parameters | replaced_attributes(self._plain, copied, device)
        if self.sets_attributes:
            for name, value in attributes.items():
                setattr(shell, name, value)
        else:
            state.update(attributes)
        if self._is_tracked:  # a replica that is replicated again
            untrack(shell)
        if self._is_compiled:  # the compiled call would run the original
            state[COMPILED_CALL_IMPL] = None


def _needs_replacing(value: Any) -> bool:
    """Returns whether anything in a plain attribute may be another object in a replica."""
    if type(value) in PLAIN:
        return False
    return any(isinstance(leaf, _REPLACED) for leaf in leaves_of(value, open_builtin))


def replaced_attributes(
    attributes: dict[str, Any], copied: Copied, device: torch.device
) -> dict[str, Any]:
    """Returns the plain attributes of a module that are other objects in its replica."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copied.get(id(compiled_module(leaf)), leaf)
        if isinstance(leaf, (Tensor, PackedSequence)):
            known = copied.get(id(leaf))
            return to_device(leaf, device) if known is None else known
        if isinstance(leaf, MethodType) and id(leaf.__self__) in copied:
            return MethodType(leaf.__func__, copied[id(leaf.__self__)])
        return leaf

    made: Made = {}
    new = {
        name: replace_leaves(replaced, value, made, open_builtin)
        for name, value in attributes.items()
    }
    return {name: value for name, value in new.items() if value is not attributes[name]}
