"""`verify`, which compares a model on replicas with the same model on one device."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replication._torch import compiled_module
from replication.data_parallel import DataParallel
from replication.devices import DeviceLike, check_module, usable_devices
from replication.groups.membership import process_count
from replication.sync.current import current_replica, is_recomputation
from replication.sync.lifecycle import add_note
from replication.tree import Leaf, Path, flatten, unflatten
from replication.warning import once_for

__all__ = ["Difference", "Verification", "verify"]


@dataclass(frozen=True)
class Difference:
    """Between what a layer, or one of its tensors, has on replicas and on one device.

    Attributes:
        where: Of what, and of which layer.
        error: The largest difference, in relation to the largest value; infinite for other shapes.
        reason: Why it cannot be compared by its values.
    """

    where: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason or f'error {self.error:.1e}'}"


@dataclass(frozen=True)
class Verification:
    """What `verify` has found. True if all is equal, up to rounding; prints as a table.

    Attributes:
        differences: Quantities and how they differ: outputs of layers in the order in which they
            were computed on one device, gradients of inputs and parameters, buffers.
        tolerance: The largest error that is taken for rounding.
        replicas: How many replicas have run.
        is_random: Whether something differs, and does so on one device alone from one time to the
            next: the model draws random numbers, by a function perhaps.
    """

    differences: dict[str, list[Difference]]
    tolerance: float
    replicas: int
    is_random: bool = False

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
        lines.append(f"{self.replicas} replicas: {verdict} (tolerance {self.tolerance:.0e})")
        if self.is_random:
            lines.append("One device differs from itself as well: the model draws random numbers.")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    batch: Any,
    device_ids: Sequence[DeviceLike],
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Compares a model on replicas with the same model on one device that sees the whole batch.

    Copies of the model run forward and backward, with a random upstream gradient. It is not
    changed, and layers that are not synchronized are not converted: they are what this finds.
    Layers that draw random numbers (dropout) differ; put them in evaluation mode before. (Where
    something differs one device runs twice, to tell whether it is that.) Layers after which the
    rows of a batch are in another order differ, too.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3), ["cpu"] * 2).first_difference.where)
    output of `1` (BatchNorm1d)

    Args:
        model: In training mode as a rule. Of a `torch.nn.DataParallel`, what is in it, and its
            ``dim``.
        batch: A tensor; or a tuple or list of positional arguments; or a mapping of keyword
            arguments.
        device_ids: The devices of the replicas; the first is the one to compare with.
        dtype: In which all is computed. In float64 next to nothing is left of rounding; a model
            that casts by itself may need float32.
        tolerance: The largest error that is taken for rounding, in relation to the largest value
            of a tensor; by default 1e-6, or 1e-3 in other dtypes than float64.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: There is no such device; only one replica has anything to do; or the output of
            a replica is a loss of its own, and the replicas' together are not that of the batch.
        RuntimeError: It is called in `torch.inference_mode`.
        Exception: What the model raises, with a note of where that was.
    """
    check_module(model)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("verify computes gradients; call it outside of torch.inference_mode")
    dim, model = 0, compiled_module(model)
    if isinstance(model, nn.DataParallel):
        dim, model = model.dim, compiled_module(model.module)
    devices = usable_devices(device_ids)
    if len(devices) < 2:
        raise ValueError(f"expected at least two devices to compare with one (got {len(devices)})")
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    home = devices[0]

    def copied() -> nn.Module:
        return _cast(_uncompiled(copy.deepcopy(model)).to(home), dtype)

    alone, split = copied(), copied()
    with _noting(f"while verify ran a copy of the model, cast to {dtype}, on one device"):
        expected = results_of_step(alone, alone, batch, home, dtype)
    with _noting(f"while verify ran a copy of the model on {len(devices)} replicas{_alone()}"):
        replicated = DataParallel(split, devices, dim=dim)
        once_for(replicated)()  # plain batch norm is for the report to find
        actual = results_of_step(split, replicated, batch, home, dtype)
    if actual.replicas < 2:
        raise ValueError(
            "only one replica has run: there is nothing to compare; take a batch of as many "
            "samples as devices, at least"
        )
    layers = dict(alone.named_modules())
    found = Verification(_compared(actual, expected, layers), tolerance, actual.replicas)
    if found:
        return found
    again = copied()
    with _noting("while verify ran a copy of the model on one device once more"):
        repeated = results_of_step(again, again, batch, home, dtype)
    same = Verification(_compared(repeated, expected, layers), tolerance, 1)
    return replace(found, is_random=not same)


class _noting:
    """Says with an error what `verify` was doing.

    A class, as `set_current_replica` is: errors there are that take no attributes.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            add_note(error, self._what)


def _alone() -> str:
    return "" if process_count() == 1 else " of this process; run it without torchrun"


def _compared(
    actual: Results, expected: Results, layers: Mapping[str, nn.Module]
) -> dict[str, list[Difference]]:
    """All quantities of a step, and how they differ; uses the calls of ``actual`` up."""
    differences = {
        "outputs of layers": [
            difference(f"output of {call.named(layers)}", actual.calls.pop(call, {}), outputs)
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
            difference(_titled(quantity, name), {0: [theirs.get(name)]}, {0: [tensor]}, largest)
            for name, tensor in tensors.items()
        ]
    return differences


class Call(NamedTuple):
    """Of a layer; they are counted from 1."""

    path: str
    number: int

    def named(self, layers: Mapping[str, nn.Module]) -> str:
        """For messages."""
        later = f", call {self.number}" if self.number > 1 else ""
        return f"`{self.path}` ({type(layers[self.path]).__name__}{later})"


def _titled(quantity: str, name: str) -> str:
    return f"{quantity} of `{name}`" if name else f"{quantity} of the model"


#: The tensors of each replica, by its number.
Parts = dict[int, list[Tensor | None]]


class Results(NamedTuple):
    """What a forward and a backward leave."""

    #: The outputs of each call of a layer, in the order in which they came.
    calls: dict[Call, Parts]
    #: Tensors by their names, by the singular of what they are.
    tensors: dict[str, dict[str, Tensor | None]]
    #: How many have run.
    replicas: int


def results_of_step(
    net: nn.Module, model: nn.Module, batch: Any, device: torch.device, dtype: torch.dtype
) -> Results:
    """A forward and a backward of ``model``, in which ``net`` is."""
    arguments, inputs = _prepared(batch, device, dtype)
    calls: dict[Call, Parts] = {}
    counts: Counter[tuple[str, int]] = Counter()

    def note(path: str, layer: nn.Module, args: Any, output: Any) -> None:
        if is_recomputation():
            return
        place = current_replica()
        replica = 0 if place is None else place.replica
        counts[path, replica] += 1
        found: list[Tensor | None] = [
            _dense(leaf.value).detach().to(device, copy=True)
            for leaf in flatten(output)[0]
            if _is_tensor(leaf)
        ]
        calls.setdefault(Call(path, counts[path, replica]), {})[replica] = found

    inner = tuple(f"{path}." for path, m in net.named_modules() if isinstance(m, nn.DataParallel))
    for path, layer in net.named_modules():
        if not path.startswith(inner):  # whose replicas are other ones
            layer.register_forward_hook(partial(note, path))
    args, kwargs = arguments
    with torch.enable_grad():
        outputs = [leaf for leaf in flatten(model(*args, **kwargs))[0] if _is_tensor(leaf)]
    # Now, as those of torch's layers are updated once more in a recomputation.
    buffers: dict[str, Tensor | None] = {name: b.clone() for name, b in net.named_buffers()}
    trainable = [leaf.value for leaf in outputs if leaf.value.requires_grad]
    if any(tensor.dim() == 0 for tensor in trainable):
        raise ValueError(
            "the model returns a number without a batch dimension, a loss perhaps, of which each "
            "replica has its own; verify the model without it"
        )
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(y.shape, generator=generator, dtype=dtype).to(y) for y in trainable]
    if trainable:
        torch.autograd.backward(trainable, upstream)
    tensors: dict[str, dict[str, Tensor | None]] = {
        "output": {  # of a number each replica has its own
            str(leaf.path): _dense(leaf.value).detach() for leaf in outputs if leaf.value.dim()
        },
        "gradient": {
            name: None if tensor.grad is None else _dense(tensor.grad)
            for name, tensor in (*inputs.items(), *net.named_parameters())
        },
        "buffer": buffers,
    }
    whole = calls.pop(Call("", 1), {})  # which is the output
    return Results(calls, tensors, len(whole))


def _uncompiled(net: nn.Module) -> nn.Module:
    """Takes the wrappers of what is compiled away: replicas run without them, too."""
    for module in list(net.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = compiled_module(child)
    return net


def _cast(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts what is real and floating, and nothing else."""
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return net


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _is_tensor(leaf: Leaf) -> bool:
    return isinstance(leaf.value, Tensor)


def _prepared(
    batch: Any, device: torch.device, dtype: torch.dtype
) -> tuple[Any, dict[str, Tensor]]:
    """Positional and keyword arguments on a device, and those that get gradients, by name."""
    if isinstance(batch, Mapping):
        arguments: Any = (), dict(batch)
    else:
        arguments = (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
    leaves, spec = flatten(arguments)
    inputs, values = {}, []
    for path, value in leaves:
        if isinstance(value, Tensor):
            value = value.detach().to(device, copy=True)
            if value.is_floating_point():
                value = value.to(dtype).requires_grad_()
                inputs[f"argument {Path(path[1:])}"] = value
                value = value.clone()  # which a layer may change in place
        values.append(value)
    return unflatten(spec, values), inputs


def difference(
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
            ways = _joined(present, want)
            if not ways:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in present)
                reason = f"shapes {shapes} in the replicas, {tuple(want.shape)} on one device"
                return Difference(where, math.inf, reason)
            errors.append(min(_error(way, want, largest_of_all) for way in ways))
    return Difference(where, max(errors))


def _joined(parts: list[Tensor], whole: Tensor) -> list[Tensor]:
    """What the replicas have, like the whole: in all ways that give its shape.

    Between layers the batch may be in any dimension, or in none, as in what depends on parameters
    alone, of which each replica has the whole.
    """
    ways = [torch.stack(parts)] if all(part.shape == whole.shape for part in parts) else []
    for dim in range(whole.dim()):
        with suppress(RuntimeError, IndexError):
            joined = torch.cat(parts, dim)
            ways += [joined] if joined.shape == whole.shape else []
    return ways


def _error(got: Tensor, want: Tensor, largest_of_all: float) -> float:
    want = want.expand_as(got)
    alike = (got == want) | (got.isnan() & want.isnan())
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if alike.all() else math.inf
    error = (got - want)[~alike].abs().amax().item() if not alike.all() else 0.0
    scale = max(_magnitude(want), 1e-3 * largest_of_all)
    error = error / scale if scale else error
    return error if math.isfinite(error) else math.inf


def _magnitude(tensor: Tensor | None) -> float:
    """The largest of the finite values."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0
