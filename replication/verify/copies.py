"""Copies of a model and of its batch, in the dtype and on the device of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from replication._torch import compiled_module
from replication.tree import flatten
from replication.verify.quantities import has_fractions

#: What a model is wrapped in before it runs.
Wrap = Callable[[nn.Module], Callable[..., Any]]
#: A function of outputs, and of targets if there are any. It returns a scalar, or named scalars.
Loss = Callable[..., Tensor | Mapping[str, Tensor]]
#: Makes the model and the loss again, if they depend on the number of ranks.
Make = Callable[[], tuple[nn.Module, Loss | None]]


class Step(NamedTuple):
    """What a training step computes with.

    With a loss, backward begins with ``loss(outputs, targets)``, or ``loss(outputs)`` if there are
    no targets. If that has named terms, backward begins with their sum, and another step with each
    of them. Without a loss, it begins with random upstream gradients.
    """

    batch: Any
    targets: Any
    loss: Loss | None
    dtype: torch.dtype
    device: torch.device
    wrap: Wrap | None
    #: Whether each copy keeps the values of its rank, and `wrap` must make them equal.
    strict: bool = False
    #: The rank whose loss alone counts, if it is one.
    only: int | None = None


@torch.inference_mode(False)
def copied(model: nn.Module, step: Step, group: Any = None) -> nn.Module:
    """Copies a model without the wrappers of `torch.compile`, whose modules replicas run.

    Layers of the process group ``group``, by default of any, use all processes instead.
    """
    net = copy.deepcopy(model).to(step.device)
    module: Any
    for module in list(net.modules()):
        for name, child in module._modules.items():
            module._modules[name] = compiled_module(child)
        own = getattr(module, "process_group", None)
        if own is not None and group in (None, own):
            module.process_group = None
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = moved(tensor.data, step)
    return net


def arguments_of(step: Step) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
    """Returns arguments for a model, and the leaves among them, which get gradients."""
    batch = step.batch if isinstance(step.batch, (tuple, list, Mapping)) else [step.batch]
    is_named = isinstance(batch, Mapping)
    named = dict(batch) if is_named else {f"args[{i}]": value for i, value in enumerate(batch)}
    leaves, rebuild = flatten(named)
    inputs, values = {}, []
    for path, value in leaves:
        value = moved(value, step)
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs[str(path)] = value.requires_grad_()
            value = value.clone()  # a layer may change its input in place
        values.append(value)
    named = rebuild(values)
    return ([], named, inputs) if is_named else ([*named.values()], {}, inputs)


def moved(value: Any, step: Step) -> Any:
    """Copies a tensor to the device, in the dtype of the step. Returns other values."""
    if not isinstance(value, Tensor):
        return value
    dtype = step.dtype.to_complex() if value.is_complex() else step.dtype
    return value.detach().to(step.device, dtype if has_fractions(value) else None, copy=True)


def take_tensors(new: nn.Module, old: nn.Module) -> None:
    """Gives a module the values of another one, also of buffers that its state dict leaves out."""
    values = {**dict(old.named_parameters()), **dict(old.named_buffers())}
    for name, tensor in (*new.named_parameters(), *new.named_buffers()):
        value = values.get(name)
        if value is not None and value.shape == tensor.shape:
            tensor.data = value.detach().clone()


def unwrapped(model: nn.Module) -> tuple[nn.Module, int]:
    """Returns the module inside usual wrappers, and the dimension that they split."""
    dim, model = 0, compiled_module(model)
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        # torch's DataParallel sets `dim` only on machines with an accelerator.
        dim, model = getattr(model, "dim", 0), compiled_module(model.module)
    return model, dim
