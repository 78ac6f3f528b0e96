"""A recording of one training step: what a copy of a model computes, forward and backward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from replication._torch import compiled_module
from replication.data_parallel import DataParallel
from replication.errors import add_note
from replication.sync.lifecycle import current_replica, is_recomputation
from replication.tree import flatten
from replication.warning import once_for

#: The kind of quantity that differs first. The model's outputs differ as well if it matters.
OF_LAYERS = "outputs of layers"

#: A quantity in each replica.
Parts = dict[int, Tensor]


class Recording:
    @torch.inference_mode(False)  # computes gradients, whatever the mode of the caller
    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        dim: int,
        dtype: torch.dtype,
        devices: list[torch.device],
    ) -> None:
        #: By kind and name. The outputs of layers are in the order of calls.
        self.quantities: dict[str, dict[str, Parts]] = {OF_LAYERS: {}}
        #: The number of calls by path and replica.
        self.calls: Counter[tuple[str, int]] = Counter()
        net = _copied(model, devices[0], dtype)
        self._record_calls_of(net)
        args, kwargs, inputs = _arguments(batch, devices[0], dtype)
        runner = net if len(devices) == 1 else DataParallel(net, devices, dim=dim)
        once_for(runner)()  # the result names plain batch norm, no warning does
        on = "one device" if len(devices) == 1 else f"{len(devices)} replicas"
        try:
            outputs = _tensors(runner(*args, **kwargs))
            # Before the backward: a recomputation updates the buffers of torch's layers once more.
            buffers = {f"`{name}`": buffer.clone() for name, buffer in net.named_buffers()}
            _backward([y for y in outputs.values() if y.requires_grad])
        except BaseException as error:
            add_note(error, f"while verify ran a copy of the model, cast to {dtype}, on {on}")
            raise
        leaves = inputs | {f"`{name}`": value for name, value in net.named_parameters()}
        self._add("output", {f"`{k}`" if k else "the model": y for k, y in outputs.items()})
        self._add("gradient", {name: t.grad for name, t in leaves.items() if t.grad is not None})
        self._add("buffer", buffers)

    def _add(self, kind: str, tensors: dict[str, Tensor]) -> None:
        self.quantities[f"{kind}s"] = {
            f"{kind} of {name}": {0: t.detach().to_dense()} for name, t in tensors.items()
        }

    def _record_calls_of(self, net: nn.Module) -> None:
        layers = dict(net.named_modules())
        # A DataParallel inside the network has replicas of its own.
        inner = tuple(f"{path}." for path, m in layers.items() if isinstance(m, nn.DataParallel))
        for path, layer in layers.items():
            if not path.startswith(inner):
                layer.register_forward_hook(partial(self._record_call, path))

    def _record_call(self, path: str, layer: nn.Module, args: Any, output: Any) -> None:
        if is_recomputation():
            return
        current = current_replica()
        replica = 0 if current is None else current.replica
        self.calls[path, replica] += 1
        if not path:
            return  # "outputs" has the model's
        number = self.calls[path, replica]
        later = f", call {number}" if number > 1 else ""
        for key, tensor in _tensors(output).items():
            which = f"output `{key}`" if key else "output"
            name = f"{which} of `{path}` ({type(layer).__name__}{later})"
            parts = self.quantities[OF_LAYERS].setdefault(name, {})
            parts[replica] = tensor.detach().clone().to_dense()


def _copied(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Copies a model without the wrappers of `torch.compile`, whose modules replicas run."""
    net = copy.deepcopy(model).to(device)
    for module in list(net.modules()):
        for name, child in module._modules.items():
            module._modules[name] = compiled_module(child)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = _cast(tensor.data, dtype)
    return net


def _arguments(
    batch: Any, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
    """Returns arguments for a model, and the leaves among them, which get gradients."""
    is_named = isinstance(batch, Mapping)
    listed = batch if isinstance(batch, (tuple, list)) else (batch,)
    named = dict(batch) if is_named else {f"args[{i}]": value for i, value in enumerate(listed)}
    tensors, rebuild = flatten(named)
    inputs, values = {}, []
    for path, value in tensors:
        if isinstance(value, Tensor):
            value = _cast(value.detach().to(device, copy=True), dtype)
            if value.is_floating_point():
                inputs[f"input `{path}`"] = value.requires_grad_()
                value = value.clone()  # a layer may change its input in place
        values.append(value)
    named = rebuild(values)
    return ((), named, inputs) if is_named else (tuple(named.values()), {}, inputs)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not has_fractions(tensor):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(tree: Any) -> dict[str, Tensor]:
    return {str(path): leaf for path, leaf in flatten(tree)[0] if isinstance(leaf, Tensor)}


def _backward(outputs: list[Tensor]) -> None:
    if not all(y.dim() for y in outputs):
        raise ValueError(
            "outputs must have a batch dimension (got a scalar, and each replica has its own); "
            "return one loss per sample (reduction='none'), or verify the network without its loss"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    upstream = [
        torch.randn(y.shape, generator=generator, dtype=y.dtype, device="cpu").to(y.device)
        for y in outputs
    ]
    if outputs:
        torch.autograd.backward(outputs, upstream)
