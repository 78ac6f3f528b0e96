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

#: Attributes that every module has; none of them holds a tensor of the user's.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
#: Leaves of plain attributes that may be another object in a replica.
_REPLACED = (Tensor, nn.Module, MethodType, PackedSequence)


def replicate(
    module: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Makes one replica of ``module`` for each device.

    As with `torch.nn.parallel.replicate`, a replica's parameters are plain tensors, attributes
    under their old names (``parameters()`` of a replica is empty). Gradients flow through them to
    the parameters of ``module``, where those of all replicas are summed in replica order, so that
    the sum is the same in every run.

    On the device of the original, replicas share the storage of its parameters. Copy 0 shares the
    buffers as well, so that what it writes into them in place lasts. The other copies have buffers
    of their own.

    Plain attributes, directly or in a list, tuple, dict or deque: tensors are moved to the
    replica's device if they are elsewhere. The module's own parameters, buffers, submodules and
    bound methods become the replica's. Everything else is shared by all replicas and the original,
    including closures that refer to the original.

    Hooks of the original run in all replicas. Hooks that a replica registers in its forward are
    its own. A module that is compiled, by ``module.compile()`` or ``torch.compile(module)``, runs
    uncompiled in replicas.

    Args:
        module: Any module; parameters and submodules may be shared (tied) or ``None``.
        devices: ints (accelerators), strings or `torch.device`; may repeat, may be the CPU.
        detach: Whether the replicas are cut off from the graph of the original.

    Returns:
        The replicas, in the order of ``devices``; no replicas for no devices.

    Raises:
        TypeError: ``module`` is no module, it is or contains a ScriptModule, or it contains the
            result of ``torch.compile(module)`` with hooks of its own.
        ValueError: This machine has no such device.
    """
    check_module(module)
    targets = usable_devices(devices)
    originals = Originals(module)
    originals.check()
    return [cast(ModuleT, replica) for replica in originals.build(targets, detach)]


class Originals:
    """The modules, parameters and buffers of which replicas are made."""

    def __init__(self, module: nn.Module) -> None:
        #: The modules, of which the first is the one to be replicated.
        self.modules: list[nn.Module] = []
        #: What ``torch.compile(module)`` returns. A replica has its copy of the module instead.
        self.wrappers: list[nn.Module] = []
        for found in module.modules():
            (self.wrappers if is_compiled_wrapper(found) else self.modules).append(found)
        self.parameters = list(module.parameters())
        self.buffers = list(module.buffers())

    def check(self) -> None:
        """Raises TypeError for what cannot be replicated."""
        for wrapper in self.wrappers:
            if any(vars(wrapper).get(name) for name in HOOKS):
                raise TypeError(
                    "what torch.compile(module) returns has hooks of its own, which replicas "
                    "would not run, as they run the module itself; register them on the module"
                )
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.modules):
            raise TypeError("a ScriptModule cannot be replicated; wrap the module it was made of")

    def build(self, devices: list[torch.device], detach: bool) -> list[nn.Module]:
        """Makes one replica for each device."""
        if not devices:
            return []
        methods = [getattr(module, MAKE_SHELL) for module in self.modules]
        shells = [[make_shell(method) for method in methods] for _ in devices]
        parameters = broadcast(self.parameters, devices, detach)
        buffers = copied_buffers(self.buffers, devices, detach)
        parts = [Parts(module) for module in self.modules]
        ids = [id(original) for original in (*self.parameters, *self.buffers, *self.modules)]
        wrapped = [(id(wrapper), id(compiled_module(wrapper))) for wrapper in self.wrappers]
        for i, device in enumerate(devices):
            copied = dict(zip(ids, (*parameters[i], *buffers[i], *shells[i]), strict=True))
            copied |= {wrapper: copied[inner] for wrapper, inner in wrapped}
            for of_module, shell in zip(parts, shells[i], strict=True):
                of_module.fill(shell, copied, device)
        return [copies[0] for copies in shells]


class Parts:
    """The parts of one module, looked up once for all of its copies."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By the identity of the original; None stays None.
        self._children = [(name, id(m)) for name, m in module._modules.items() if m is not None]
        self._buffers = [(name, id(b)) for name, b in module._buffers.items() if b is not None]
        parameters = module._parameters.items()
        self._parameters = [(name, id(p)) for name, p in parameters if p is not None]
        self._missing = [name for name, p in parameters if p is None]
        self._plain = {
            name: value
            for name, value in vars(module).items()
            if name not in _OWN_ATTRIBUTES and _needs_replacing(value)
        }
        #: Whether the class has its own way to set attributes (RNNs).
        self._sets_attributes = type(module).__setattr__ is not nn.Module.__setattr__
        self._is_watched = is_tracked(module)
        self._is_compiled = vars(module).get(COMPILED_CALL_IMPL) is not None

    def fill(self, shell: nn.Module, copied: Copied, device: torch.device) -> None:
        """Gives a shell the copies of its children, parameters and buffers, and its own hooks."""
        state = vars(shell)
        if shell is not self._module:  # as it is where a class returns itself as its shell
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
        if self._is_watched:  # a replica that is replicated again
            untrack(shell)
        if self._is_compiled:  # it would run the original; a replica runs eagerly
            state[COMPILED_CALL_IMPL] = None


def own_hooks(state: dict[str, Any]) -> None:
    """Gives one module of a replica, by its attributes, its own dictionaries of hooks.

    torch shares them: a hook that one replica registers in its forward would run in all others.
    """
    for name in HOOKS:
        hooks = state.get(name)
        state[name] = hooks.copy() if hooks else OrderedDict()


def _needs_replacing(value: Any) -> bool:
    """Whether anything in a plain attribute may be another object in a replica."""
    if type(value) in PLAIN:
        return False
    return any(isinstance(leaf, _REPLACED) for leaf in leaves_of(value, open_builtin))


def replaced_attributes(
    attributes: dict[str, Any], copied: Copied, device: torch.device
) -> dict[str, Any]:
    """The plain attributes of one module that are other objects in its replica on ``device``."""

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
    found = {
        name: replace_leaves(replaced, value, made, open_builtin)
        for name, value in attributes.items()
    }
    return {name: value for name, value in found.items() if value is not attributes[name]}
