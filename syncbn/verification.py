"""`verify`, which compares a model on replicas with the same model on one device."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replication import DataParallel
from replication.devices import DeviceLike, usable_devices
from replication.place import here
from replication.structure import flatten

__all__ = ["Verification", "verify"]


class Difference(NamedTuple):
    """What a layer, or one of its tensors, has on replicas and on one device."""

    where: str
    #: The largest difference, in relation to the largest value; infinite for other shapes.
    error: float
    #: Why it cannot be compared by its values.
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason or f'error {self.error:.1e}'}"


class Verification(NamedTuple):
    """What `verify` has found. True if all is equal, up to rounding; prints as a table."""

    #: Quantities and how they differ: outputs of layers in the order in which they were computed
    #: on one device, gradients of inputs and parameters, buffers.
    differences: dict[str, list[Difference]]
    tolerance: float

    def __bool__(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Difference | None:
        """The first one above the tolerance: that of the layer where it begins."""
        found = (d for differences in self.differences.values() for d in differences)
        return next((d for d in found if not d.error <= self.tolerance), None)

    def __str__(self) -> str:
        lines = [
            f"{quantity:<24} {max((d.error for d in differences), default=0.0):.1e}"
            for quantity, differences in self.differences.items()
        ]
        first = self.first_difference
        verdict = "equal" if first is None else f"the first that differs is {first}"
        return "\n".join([*lines, f"{verdict} (tolerance {self.tolerance:.0e})"])


def verify(
    model: nn.Module,
    batch: Any,
    device_ids: Sequence[DeviceLike],
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-6,
) -> Verification:
    """Compares a model on replicas with the same model on one device that sees the whole batch.

    Copies of the model run forward and backward, with a random upstream gradient. It is not
    changed, and layers that are not synchronized are not converted: they are what this finds.
    Layers that draw random numbers (dropout) differ; put them in evaluation mode before.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3), ["cpu"] * 2).first_difference.where)
    output of `1` (BatchNorm1d)
    >>> from syncbn import convert_model
    >>> bool(verify(convert_model(net), torch.randn(8, 3), ["cpu"] * 2))
    True

    Args:
        model: In training mode as a rule. Of a `torch.nn.DataParallel`, what is in it.
        batch: A tensor; or a tuple or list of positional arguments; or a mapping of keyword
            arguments.
        device_ids: The devices of the replicas; the first is the one to compare with.
        dtype: In which all is computed. In float64 nothing is left of rounding.
        tolerance: The largest error that is taken for rounding, in relation to the largest value
            of a tensor.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: There is no such device; or the output of a replica is a loss of its own, and
            the replicas' together are not that of the batch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module (got {type(model).__name__})")
    if isinstance(model, nn.DataParallel):
        model = model.module
    home = usable_devices(device_ids)[0]
    alone, split = (copy.deepcopy(model).to(home, dtype) for _ in range(2))
    expected = run(alone, alone, batch, home, dtype)
    actual = run(split, DataParallel(split, device_ids), batch, home, dtype)
    layers = dict(alone.named_modules())
    differences = {
        "outputs of layers": [
            compared(f"output of {call.named(layers)}", actual.calls.pop(call, {}), outputs)
            for call, outputs in expected.calls.items()
        ]
    }
    differences["outputs of layers"] += [
        Difference(f"output of {call.named(layers)}", math.inf, "replicas alone have called it")
        for call in actual.calls
    ]
    for quantity, tensors in expected.tensors.items():
        theirs = actual.tensors[quantity]
        largest = max(map(_magnitude, tensors.values()), default=0.0)
        differences[f"{quantity}s"] = [
            compared(f"{quantity} of `{name}`", {0: [theirs[name]]}, {0: [tensor]}, largest)
            for name, tensor in tensors.items()
        ]
    return Verification(differences, tolerance)


class Call(NamedTuple):
    """Of a layer; they are counted from 1."""

    path: str
    number: int

    def named(self, layers: Mapping[str, nn.Module]) -> str:
        """For messages."""
        later = f", call {self.number}" if self.number > 1 else ""
        return f"`{self.path}` ({type(layers[self.path]).__name__}{later})"


#: The tensors of each replica, by its number.
Parts = dict[int, list[Tensor | None]]


class Results(NamedTuple):
    """What a forward and a backward leave."""

    #: The outputs of each call of a layer, in the order in which they came.
    calls: dict[Call, Parts]
    #: Tensors by their names, by the singular of what they are.
    tensors: dict[str, dict[str, Tensor | None]]


def run(
    net: nn.Module, model: nn.Module, batch: Any, device: torch.device, dtype: torch.dtype
) -> Results:
    """A forward and a backward of ``model``, in which ``net`` is."""
    arguments, inputs = _prepared(batch, device, dtype)
    calls: dict[Call, Parts] = {}
    counts: Counter[tuple[str, int]] = Counter()

    def note(path: str, layer: nn.Module, args: Any, output: Any) -> None:
        place = here()
        replica = 0 if place is None else place.replica
        counts[path, replica] += 1
        tensors = [leaf.value.detach().clone() for leaf in flatten(output)[0] if _is_tensor(leaf)]
        calls.setdefault(Call(path, counts[path, replica]), {})[replica] = tensors

    for path, layer in net.named_modules():
        if path:
            layer.register_forward_hook(partial(note, path))
    args, kwargs = arguments
    outputs = [leaf for leaf in flatten(model(*args, **kwargs))[0] if _is_tensor(leaf)]
    learnt = [leaf.value for leaf in outputs if leaf.value.requires_grad]
    if any(tensor.dim() == 0 for tensor in learnt):
        raise ValueError(
            "the model returns a number without a batch dimension, a loss perhaps, of which each "
            "replica has its own; verify the model without it"
        )
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(y.shape, generator=generator, dtype=dtype).to(y) for y in learnt]
    if learnt:
        torch.autograd.backward(learnt, upstream)
    tensors: dict[str, dict[str, Tensor | None]] = {
        "output": {  # of a number each replica has its own
            str(leaf) or "the model": leaf.value.detach() for leaf in outputs if leaf.value.dim()
        },
        "gradient": {
            **{name: x.grad for name, x in inputs.items()},
            **{name: parameter.grad for name, parameter in net.named_parameters()},
        },
        "buffer": dict(net.named_buffers()),
    }
    return Results(calls, tensors)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf.value, Tensor)


def _prepared(
    batch: Any, device: torch.device, dtype: torch.dtype
) -> tuple[Any, dict[str, Tensor]]:
    """Positional and keyword arguments on a device, and those that get gradients, by name."""
    if isinstance(batch, Mapping):
        arguments: Any = (), dict(batch)
    else:
        arguments = (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
    leaves, structure = flatten(arguments)
    inputs, values = {}, []
    for leaf in leaves:
        value = leaf.value
        if isinstance(value, Tensor):
            value = value.detach().to(device, copy=True)
            if value.is_floating_point():
                value = value.to(dtype).requires_grad_()
                inputs[f"argument {'.'.join(leaf.path[1:])}"] = value
        values.append(value)
    return structure.around(values), inputs


def compared(
    where: str, actual: Parts, expected: Parts, largest_of_all: float = 0.0
) -> Difference:
    """Compares tensors of replicas, joined, with those of one device.

    In relation to the largest value; or to a thousandth of the ``largest_of_all`` of this kind,
    as some cancel out but for their rounding: the gradient of a bias before a normalization does.
    """
    (wanted,) = expected.values()
    parts = [actual[replica] for replica in sorted(actual)]
    if not parts:
        return Difference(where, math.inf, "no replica has called it as often")
    if {*map(len, parts)} != {len(wanted)}:
        return Difference(where, math.inf, "replicas return another number of tensors")
    errors = [0.0]
    for want, *found in zip(wanted, *parts, strict=True):
        present = [tensor for tensor in found if tensor is not None]
        if want is None or len(present) < len(found):
            errors.append(0.0 if want is None and not present else math.inf)
        elif want.dim() or len(found) == 1:  # else each replica has a number of its own
            got = _joined(present, want)
            if got is None:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in present)
                reason = f"shapes {shapes} in the replicas, {tuple(want.shape)} on one device"
                return Difference(where, math.inf, reason)
            errors.append(_error(got, want, largest_of_all))
    return Difference(where, max(errors))


def _joined(parts: list[Tensor], whole: Tensor) -> Tensor | None:
    """What the replicas have, like the whole; None if it has another shape."""
    if len(parts) == 1:
        return parts[0].to(whole.device) if parts[0].shape == whole.shape else None
    rows = sum(len(part) for part in parts if part.dim())
    if rows != len(whole) or any(part.shape[1:] != whole.shape[1:] for part in parts):
        return None
    return torch.cat([part.to(whole.device) for part in parts])


def _error(got: Tensor, want: Tensor, largest_of_all: float) -> float:
    alike = (got == want) | (got.isnan() & want.isnan())
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if alike.all() else math.inf
    difference = _magnitude(torch.where(alike, 0, got - want))
    scale = max(_magnitude(want), 1e-3 * largest_of_all)
    return difference / scale if scale else difference


def _magnitude(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    has_abs = tensor.is_floating_point() or tensor.is_complex()
    return (tensor if has_abs else tensor.double()).abs().amax().item()
