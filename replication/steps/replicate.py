"""Replicas of a module on any list of devices; their gradients are summed into the original."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from replication._torch import (
    COMPILED_CALL_IMPL,
    HOOKS,
    MAKE_SHELL,
    compiled_module,
    is_compiled_wrapper,
    make_shell,
)
from replication.devices import DeviceLike, check_module, to_device, usable_devices
from replication.steps.broadcast import broadcast, copied_buffers
from replication.sync.lifecycle import is_tracked, untrack
from replication.tree import PLAIN, Made, leaves_of, open_builtin, replace_leaves

__all__ = ["replicate"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: The copies of a replica's parameters, buffers and submodules, by the identity of the original.
Copied = dict[int, Any]

#: Attributes that every module has. None of them holds a tensor of the user's.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
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
    return make_replicas(module, usable_devices(devices), detach)


def make_replicas(module: ModuleT, devices: Sequence[torch.device], detach: bool) -> list[ModuleT]:
    """Does what `replicate` does, for devices that are checked already."""
    modules: list[nn.Module] = []
    # By identity. Wrappers of `torch.compile`: a replica has its copy of the module instead.
    wrapped: dict[int, int] = {}
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for layer in module.modules():
        if is_compiled_wrapper(layer):
            _check_wrapper(layer)
            wrapped[id(layer)] = id(compiled_module(layer))
            continue
        if isinstance(layer, torch.jit.ScriptModule):
            raise TypeError("a ScriptModule cannot be replicated; wrap the module it was made of")
        modules.append(layer)
        parameters |= {id(p): p for p in layer._parameters.values() if p is not None}
        buffers |= {id(b): b for b in layer._buffers.values() if b is not None}
    if not devices:
        return []
    copies_of_parameters = broadcast(list(parameters.values()), devices, detach)
    copies_of_buffers = copied_buffers(list(buffers.values()), devices, detach)
    templates = [Template(layer) for layer in modules]
    ids = [*parameters, *buffers, *map(id, modules)]
    replicas = []
    for i, device in enumerate(devices):
        shells = [make_shell(template.make) for template in templates]
        originals = (*copies_of_parameters[i], *copies_of_buffers[i], *shells)
        copied = dict(zip(ids, originals, strict=True))
        copied |= {wrapper: copied[inner] for wrapper, inner in wrapped.items()}
        for template, shell in zip(templates, shells, strict=True):
            template.fill(shell, copied, device)
        replicas.append(cast(ModuleT, shells[0]))
    return replicas


def _check_wrapper(wrapper: nn.Module) -> None:
    if any(vars(wrapper).get(name) for name in HOOKS):
        raise TypeError(
            "the result of torch.compile(module) must not have its own hooks, because replicas "
            "run the module itself; register the hooks on the module"
        )


class Template:
    """The attributes of one module, looked up once for all of its copies."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        #: Makes an empty copy of the module.
        self.make = getattr(module, MAKE_SHELL)
        # By the identity of the original. None stays None.
        self._children = [(name, id(m)) for name, m in module._modules.items() if m is not None]
        self._buffers = [(name, id(b)) for name, b in module._buffers.items() if b is not None]
        parameters = module._parameters.items()
        self._parameters = [(name, id(p)) for name, p in parameters if p is not None]
        self._missing = [name for name, p in parameters if p is None]
        self._plain = {
            name: value
            for name, value in vars(module).items()
            if name not in _MODULE_ATTRIBUTES and _needs_replacing(value)
        }
        #: Whether the class overrides how attributes are set (RNNs do).
        self._sets_attributes = type(module).__setattr__ is not nn.Module.__setattr__
        self._is_tracked = is_tracked(module)
        self._is_compiled = vars(module).get(COMPILED_CALL_IMPL) is not None

    def fill(self, shell: nn.Module, copied: Copied, device: torch.device) -> None:
        """Gives a shell the copies of its children, parameters and buffers, and its own hooks."""
        state = vars(shell)
        if shell is not self._module:  # some classes return the module itself as its shell
            own_hooks(state)
        for name, child in self._children:
            state["_modules"][name] = copied[child]
        for name, buffer in self._buffers:
            state["_buffers"][name] = copied[buffer]
        for name in self._missing:
            state["_parameters"][name] = None
        attributes = {name: copied[parameter] for name, parameter in self._parameters}
        # torch exposes the copies of the parameters here as well.
        state["_former_parameters"] = attributes
        if self._plain:
            attributes = attributes | replaced_attributes(self._plain, copied, device)
        if self._sets_attributes:
            for name, value in attributes.items():
                setattr(shell, name, value)
        else:
            state.update(attributes)
        if self._is_tracked:  # a replica that is replicated again
            untrack(shell)
        if self._is_compiled:  # the compiled call would run the original
            state[COMPILED_CALL_IMPL] = None


def own_hooks(state: dict[str, Any]) -> None:
    """Gives one module of a replica, by its attributes, its own dictionaries of hooks.

    torch shares the dictionaries: a hook that one replica registers in its forward would run in
    all others.
    """
    for name in HOOKS:
        hooks = state.get(name)
        state[name] = hooks.copy() if hooks else OrderedDict()


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
