"""Replicas of a module on any list of devices; their gradients are summed into the original."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from replication.attributes import Moving, needs_moving
from replication.checks import check_module
from replication.devices import DeviceLike, are_distinct_cuda, to_device, usable_devices
from replication.torch_internals import (
    COMPILED_CALL_IMPL,
    HOOKS,
    MAKE_SHELL,
    compiled_module,
    is_compiled_wrapper,
    make_shell,
)
from replication.watch import is_watched, unwatch

__all__ = ["replicate"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: One list of tensors per device.
Copies = list[list[Tensor]]

#: Attributes that every module has; none of them holds a tensor of the user's.
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


def replicate(
    module: ModuleT, devices: Sequence[DeviceLike], detach: bool = False
) -> list[ModuleT]:
    """Makes one replica of ``module`` for each device.

    As with `torch.nn.parallel.replicate`, a replica's parameters are plain tensors, attributes
    under their old names (``parameters()`` of a replica is empty). Gradients flow through them to
    the parameters of ``module``, where those of all replicas are summed in replica order, so that
    the sum is the same in every run.

    Memory. On the device where the original is, replicas share the storage of its parameters.
    Buffers are shared with copy 0 only, so that what copy 0 writes into them in place lasts; the
    other copies have their own.

    Plain attributes, and what is in a list, tuple or dict that is one: tensors are moved to the
    replica's device if they are elsewhere; the module's own parameters, buffers, submodules and
    bound methods become the replica's. Everything else is shared by all replicas and the original,
    closures that refer to the original included. Hooks of the original are run by all replicas;
    those that a replica registers in its forward are its own. What is compiled, by
    ``module.compile()`` or ``torch.compile(module)``, runs uncompiled in replicas.

    Args:
        module: Any module; parameters and submodules may be shared (tied) or ``None``.
        devices: ints (accelerators), strings or `torch.device`; may repeat, may be the CPU.
        detach: Whether the replicas are cut off from the graph of the original.

    Returns:
        The replicas, in the order of ``devices``; no replicas for no devices.

    Raises:
        TypeError: ``module`` is no module, or is or contains a ScriptModule, or what
            ``torch.compile(module)`` returns with hooks of its own.
        ValueError: This machine has no such device.
    """
    check_module(module)
    targets = usable_devices(devices)
    # A wrapper's attributes are those of what it wraps; so are its replicas.
    modules: list[nn.Module] = []
    wrappers: list[nn.Module] = []
    for submodule in module.modules():
        (wrappers if is_compiled_wrapper(submodule) else modules).append(submodule)
    for wrapper in wrappers:
        if any(vars(wrapper).get(name) for name in HOOKS):
            raise TypeError(
                "what torch.compile(module) returns has hooks of its own, which replicas would "
                "not run, as they run the module itself; register them on the module"
            )
    for submodule in modules:
        if isinstance(submodule, torch.jit.ScriptModule):
            raise TypeError("a ScriptModule cannot be replicated; wrap the module it was made of")
    methods = [getattr(submodule, MAKE_SHELL) for submodule in modules]
    shells = [[make_shell(method) for method in methods] for _ in targets]
    if not targets:
        return []
    parameters, buffers = list(module.parameters()), list(module.buffers())
    parameter_copies = broadcast(parameters, targets, detach)
    buffer_copies = copied_buffers(buffers, targets, detach)
    parts = [Parts(submodule) for submodule in modules]
    originals = [id(thing) for thing in (*parameters, *buffers, *modules)]
    for device, copies, own_parameters, own_buffers in zip(
        targets, shells, parameter_copies, buffer_copies, strict=True
    ):
        # The copy of each parameter, buffer and submodule, by the identity of the original.
        copied = dict(zip(originals, (*own_parameters, *own_buffers, *copies), strict=True))
        copied |= {id(wrapper): copied[id(compiled_module(wrapper))] for wrapper in wrappers}
        for of_submodule, copy in zip(parts, copies, strict=True):
            of_submodule.fill(copy, copied, device)
    return [cast(ModuleT, copies[0]) for copies in shells]


class Parts:
    """What a module consists of, looked up once for all of its copies."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By the identity of the original; None stays None.
        self._children = [
            (name, id(child)) for name, child in module._modules.items() if child is not None
        ]
        self._buffers = [(name, id(b)) for name, b in module._buffers.items() if b is not None]
        self._parameters = [
            (name, id(p)) for name, p in module._parameters.items() if p is not None
        ]
        self._missing = [name for name, p in module._parameters.items() if p is None]
        self._constants = _constants(module)
        #: Whether a class has a say in its attributes (RNNs).
        self._sets_attributes = type(module).__setattr__ is not nn.Module.__setattr__
        self._is_watched = is_watched(module)
        self._is_compiled = vars(module).get(COMPILED_CALL_IMPL) is not None

    def fill(self, copy: nn.Module, copied: dict[int, Any], device: torch.device) -> None:
        """Gives a shell the copies of its children, parameters and buffers, and its own hooks."""
        state = vars(copy)
        if copy is not self._module:  # as of a class that does not want to be replicated
            own_hooks(state)
        children, buffers = state["_modules"], state["_buffers"]
        for name, child in self._children:
            children[name] = copied[child]
        for name, buffer in self._buffers:
            buffers[name] = copied[buffer]
        for name in self._missing:
            state["_parameters"][name] = None
        attributes = {name: copied[parameter] for name, parameter in self._parameters}
        # torch exposes the copies of the parameters here too.
        state["_former_parameters"] = attributes
        if self._constants:
            attributes = {**attributes, **self._moved_constants(copied, device)}
        if self._sets_attributes:
            for name, value in attributes.items():
                setattr(copy, name, value)
        else:
            state.update(attributes)
        if self._is_watched:  # a replica that is replicated again
            unwatch(copy)
        if self._is_compiled:  # it would run the original; a replica runs eagerly
            state[COMPILED_CALL_IMPL] = None

    def _moved_constants(self, copied: dict[int, Any], device: torch.device) -> dict[str, Any]:
        moving = Moving(device, copied)
        moved = ((name, value, moving.moved(value)) for name, value in self._constants)
        return {name: new for name, old, new in moved if new is not old}


def own_hooks(state: dict[str, Any]) -> None:
    """Gives one module of a replica, by its attributes, its own dictionaries of hooks.

    torch shares them: what a replica registers in its forward, all others would run.
    """
    for name in HOOKS:
        hooks = state.get(name)
        state[name] = hooks.copy() if hooks else OrderedDict()


def _constants(module: nn.Module) -> list[tuple[str, Any]]:
    """The plain attributes of a module that hold tensors or modules."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name not in _OWN_ATTRIBUTES and needs_moving(value)
    ]


def copied_buffers(buffers: list[Tensor], devices: list[torch.device], detach: bool) -> Copies:
    """Copies buffers to each device: copy 0 shares the original's storage, the others do not."""
    kinds = {(b.device, b.requires_grad) for b in buffers} | {(d, False) for d in devices}
    if len(kinds) == 1 and not are_distinct_cuda(devices):  # as a rule
        return [buffers, *([buffer.clone() for buffer in buffers] for _ in devices[1:])]
    copies = broadcast(buffers, devices, detach)
    for index, per_device in enumerate(copies):
        for i, (buffer, copy) in enumerate(zip(buffers, per_device, strict=True)):
            if copy.device == buffer.device:
                if index:
                    per_device[i] = copy.clone()
                elif not buffer.requires_grad:
                    per_device[i] = buffer
    return copies


def broadcast(
    tensors: Sequence[Tensor], devices: list[torch.device], detach: bool = False
) -> Copies:
    """Copies ``tensors`` to each device; gradients of the copies are summed in device order.

    Where a tensor is on the device already the copy shares its storage and its version counter,
    so that an in-place change between forward and backward is noticed as for the tensor itself.
    """
    if detach:
        tensors = [tensor.detach() for tensor in tensors]
    learnt = [t for t in tensors if t.requires_grad]
    constant = [t for t in tensors if not t.requires_grad]
    flat = list(Broadcast.apply(devices, *learnt)) if learnt else []  # type: ignore[no-untyped-call]
    copies = []
    for i, constants in enumerate(_copies(constant, devices)):
        learnt_here, constants_here = iter(flat[i :: len(devices)]), iter(constants)
        copies.append([next(learnt_here if t.requires_grad else constants_here) for t in tensors])
    return copies


def _copies(tensors: Sequence[Tensor], devices: list[torch.device]) -> Copies:
    """The tensors on each device, cut off from the graph."""
    tensors = [tensor.detach() for tensor in tensors]
    if are_distinct_cuda(devices) and tensors and all(t.device == devices[0] for t in tensors):
        # Many small tensors at once; of complex ones it copies the real view.
        _, *others = comm.broadcast_coalesced(tensors, devices)
        return [
            tensors,
            *(
                [
                    torch.view_as_complex(copy) if t.is_complex() else copy
                    for t, copy in zip(tensors, copies, strict=True)
                ]
                for copies in others
            ),
        ]
    # Detached for each: autograd adds the gradients of one object in whatever order they come.
    homes = [tensor.device for tensor in tensors]
    return [
        [
            tensor.detach() if home == device else to_device(tensor, device)
            for tensor, home in zip(tensors, homes, strict=True)
        ]
        for device in devices
    ]


class Broadcast(torch.autograd.Function):
    """Copies each tensor to each device, in the order tensor by tensor.

    One node for the whole module: n x P views would be cheap too, but the engine would then sum
    their gradients in the order in which the threads happened to build the graph.
    """

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sources = [tensor.device for tensor in tensors]
        ctx.copies = len(devices)
        copies = _copies(tensors, devices)
        return tuple(copy for of_tensor in zip(*copies, strict=True) for copy in of_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        n = ctx.copies
        return (
            None,
            *(_summed(grads[i * n : (i + 1) * n], source) for i, source in enumerate(ctx.sources)),
        )


def _summed(grads: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """The sum of the gradients that are there, from left to right, on ``device``."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            grad = to_device(grad, device)
            if total is not None and total.is_sparse:  # torch does not add dense to sparse
                total, grad = grad, total
            total = grad if total is None else total + grad
    return total
