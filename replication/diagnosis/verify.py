"""`verify`, which compares a model on replicas with the same model on one device."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
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
from replication.diagnosis.table import ShownAsTable, Table
from replication.errors import ReplicationError, add_note, path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.processes import has_other_processes
from replication.modules import check_initialized
from replication.sync.rendezvous import current_replica, is_recomputation
from replication.tree import Path, flatten, unflatten
from replication.warning import once_for

__all__ = ["Difference", "Verification", "verify"]


#: Other orders of the batch: rotations by so many samples. One may round as the batch itself does.
_SHIFTS = (1, 2, 3)

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: The kind of quantity that differs first. The model's outputs differ as well if it matters.
_OF_LAYERS = "outputs of layers"


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between the replicas and one device.

    Attributes:
        where: The quantity and its layer, such as "output of `norm` (BatchNorm1d)".
        error: The largest difference, relative to the largest value. Infinite if the quantities
            cannot be compared.
        reason: Why the quantities cannot be compared by value. Empty if they can.
    """

    where: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason or f'error {self.error:.1e}'}"


@dataclass(frozen=True)
class Verification(ShownAsTable):
    """The result of `verify`. True if all quantities are equal up to rounding.

    It prints as a table, and shows as a table in a notebook.

    Attributes:
        differences: The differences by kind of quantity: outputs of layers in the order in which
            one device computes them, outputs of the model, gradients of inputs and parameters,
            buffers.
        tolerance: The largest error that counts as rounding.
        replicas: The number of replicas that ran.
        is_random: Whether two runs on one device differ as well, because the model draws random
            numbers. This and the following attributes are only filled if the replicas differ from
            one device.
        is_ill_conditioned: Whether one device differs as much for another order of the batch.
        changed_attributes: The plain lists, dicts and deques in attributes of modules whose items
            change in the forward. Replicas share them.
    """

    differences: dict[str, list[Difference]]
    tolerance: float
    replicas: int
    is_random: bool = False
    is_ill_conditioned: bool = False
    changed_attributes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Difference | None:
        """The first difference above the tolerance, which names the layer where errors begin."""
        everything = (d for differences in self.differences.values() for d in differences)
        return next((d for d in everything if not d.error <= self.tolerance), None)

    def _is_explained_by(self, other: Verification) -> bool:
        """Whether the model's outputs, gradients and buffers differ as much in ``other``.

        "As much" is up to a factor of 10, because each run rounds differently.
        """
        worst = {
            kind: max((d.error for d in found), default=0.0)
            for kind, found in self.differences.items()
            if kind != _OF_LAYERS
        }
        found = {kind for kind, error in worst.items() if not error <= self.tolerance}
        return bool(found) and all(
            worst[kind] <= 10 * max(d.error for d in other.differences[kind]) for kind in found
        )

    def _table(self) -> Table:
        """Returns how many quantities of each kind were compared, and their largest error."""
        rows = [
            (kind, str(len(found)), f"{max(d.error for d in found):.1e}")
            for kind, found in self.differences.items()
            if found
        ]
        first = self.first_difference
        verdict = "equal" if first is None else f"the first difference is {first}"
        after = [f"{self.replicas} replicas: {verdict} (tolerance {self.tolerance:.0e})"]
        if self.is_random:
            after.append("Two runs on one device differ as well: the model draws random numbers.")
        if self.is_ill_conditioned:
            after.append(
                "On one device another order of the batch differs as much: the model is "
                "ill-conditioned, or depends on the order of the samples."
            )
        if self.changed_attributes:
            after.append(
                f"The forward changes {', '.join(f'`{name}`' for name in self.changed_attributes)}"
                ": replicas share plain containers, and overwrite each other's items."
            )
        titles = "compared", "number", "largest relative error"
        return Table(titles, rows, after=after, numbers_from=1)


def verify(
    model: nn.Module,
    batch: Any,
    device_ids: Sequence[DeviceLike] = ("cpu", "cpu"),
    *,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Compares a model on replicas with the same model on one device that sees the whole batch.

    Copies of the model run forward and backward, with a random upstream gradient. The model itself
    does not change. Layers that are not synchronized are not converted, so that `verify` finds
    them.

    Layers that draw random numbers (dropout) differ, so put them in evaluation mode first. Layers
    that reorder the samples of a batch also differ. If anything differs, the model runs again on
    one device, with the same batch and with other orders of the batch. The result then says
    whether the model is random or ill-conditioned.

    >>> import torch
    >>> from torch import nn
    >>> from syncbn import verify
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3)).first_difference.where)
    output of `1` (BatchNorm1d)

    Args:
        model: The model, usually in training mode. Of a `torch.nn.DataParallel`, the wrapped
            module and ``dim`` are used.
        batch: A tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments.
        device_ids: The devices of the replicas, by default two replicas on the CPU. The first
            device also runs the model alone.
        dtype: The dtype of all computations. In float64 hardly any rounding is left. Models that
            cast internally may need float32.
        tolerance: The largest error that counts as rounding, relative to the largest value of a
            tensor. The default is 1e-6 in float64 and 1e-3 in other dtypes.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A device does not exist, only one replica has data, or the model returns a
            loss, because each replica computes a different one.
        ReplicationError: A layer communicates with other processes.
        RuntimeError: It is called in `torch.inference_mode`, or a lazy layer is not initialized.
        Exception: The model raised. A note says what `verify` was running.
    """
    check_module(model)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("verify computes gradients; call it outside of torch.inference_mode")
    dim, model = 0, compiled_module(model)
    if isinstance(model, nn.DataParallel):
        # Without an accelerator, torch's class sets no `dim`.
        dim, model = getattr(model, "dim", 0), compiled_module(model.module)
    for path, layer in model.named_modules():
        check_initialized(path, layer)
        if isinstance(layer, ReplicaAware) and has_other_processes(layer.process_group):
            raise ReplicationError(
                "verify compares replicas of one process, and "
                f"`{path_or_root(path)}` communicates with others; run it without torchrun"
            )
    devices = usable_devices(device_ids)
    if len(devices) < 2:
        raise ValueError(f"expected at least two devices to compare with one (got {len(devices)})")
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3

    def run(how: str, on_replicas: bool = False, shift: int = 0) -> Step:
        net = _cast(_without_wrappers(copy.deepcopy(model)).to(devices[0]), dtype)
        runner: nn.Module = net
        if on_replicas:
            runner = DataParallel(net, devices, dim=dim)
            once_for(runner)()  # the result names plain batch norm, no warning does
        step = Step(net, devices[0], dtype, dim, shift)
        try:
            step.run(runner, batch)
        except BaseException as error:
            add_note(error, f"while verify ran a copy of the model{how}")
            raise
        return step

    expected = run(f", cast to {dtype}, on one device")
    actual = run(f" on {len(devices)} replicas", on_replicas=True)
    if actual.replicas < 2:
        raise ValueError(
            "expected at least two replicas with data (got one); pass a batch with at least as "
            "many samples as devices"
        )
    result = Verification(_compare(actual, expected), tolerance, actual.replicas)
    if result:
        return result
    result = replace(result, changed_attributes=tuple(expected.changed_attributes))
    repeated = _compare(run(" on one device once more"), expected)
    if not Verification(repeated, tolerance, 1):
        return replace(result, is_random=True)
    for shift in _SHIFTS:
        with suppress(Exception):  # some models require an order
            step = run(" on one device, in another order", shift=shift)
            if result._is_explained_by(Verification(_compare(step, expected), tolerance, 1)):
                return replace(result, is_ill_conditioned=True)
    return result


class LayerCall(NamedTuple):
    """One call of a layer. The calls of each layer are counted from 1."""

    path: str
    number: int

    def title(self, layers: Mapping[str, nn.Module]) -> str:
        later = f", call {self.number}" if self.number > 1 else ""
        return f"output of `{self.path}` ({type(layers[self.path]).__name__}{later})"


Parts = dict[int, list[Tensor | None]]


class Step:
    """One forward and one backward of ``net``, and all quantities to be compared.

    ``net`` gets the samples in the batch dimension ``dim`` rotated by ``shift``. Gradients of
    inputs and outputs of the model have the order of the batch again.
    """

    def __init__(
        self, net: nn.Module, device: torch.device, dtype: torch.dtype, dim: int, shift: int
    ) -> None:
        self.device, self.dtype = device, dtype
        self.dim, self.shift = dim, shift
        self.layers = dict(net.named_modules())
        #: The outputs of each call of a layer, in the order of the calls.
        self.calls: dict[LayerCall, Parts] = {}
        #: The other tensors, by kind of quantity and by name.
        self.tensors: dict[str, dict[str, Tensor | None]] = {}
        #: The plain containers in attributes whose items change in the forward.
        self.changed_attributes: list[str] = []
        self.replicas = 0
        self._counts: Counter[tuple[str, int]] = Counter()
        # A DataParallel inside the network has replicas of its own.
        inner = tuple(f"{p}." for p, m in self.layers.items() if isinstance(m, nn.DataParallel))
        for path, layer in self.layers.items():
            if not path.startswith(inner):
                layer.register_forward_hook(partial(self._record_call, path))

    def _record_call(self, path: str, layer: nn.Module, args: Any, output: Any) -> None:
        if is_recomputation():
            return
        current = current_replica()
        replica = 0 if current is None else current.replica
        self._counts[path, replica] += 1
        call = LayerCall(path, self._counts[path, replica])
        self.calls.setdefault(call, {})[replica] = [
            _dense(tensor).detach().to(self.device, copy=True)
            for tensor in _tensors(output).values()
        ]

    def run(self, runner: nn.Module, batch: Any) -> None:
        """Runs ``runner``, which is ``net`` or a `DataParallel` around it."""
        net = self.layers[""]
        args, kwargs, inputs = self._arguments(batch)
        containers = [
            (f"{path}.{name}".lstrip("."), value, _items(value))
            for path, layer in self.layers.items()
            for name, value in vars(layer).items()
            if name not in _MODULE_ATTRIBUTES and isinstance(value, (list, dict, deque))
        ]
        with torch.enable_grad():
            outputs = _tensors(runner(*args, **kwargs))
            if self.shift:
                outputs = {path: self._in_order(y, args, kwargs) for path, y in outputs.items()}
        self.changed_attributes = [
            name
            for name, container, items in containers
            if list(map(id, items)) != list(map(id, _items(container)))
        ]
        # Before the backward: a recomputation updates the buffers of torch's layers once more.
        buffers: dict[str, Tensor | None] = {name: b.clone() for name, b in net.named_buffers()}
        trainable = [y for y in outputs.values() if y.requires_grad]
        if any(y.dim() == 0 for y in trainable):
            raise ValueError(
                "the model must not return a 0-dim tensor that requires gradients, such as a "
                "loss: each replica has its own; verify the model without the loss"
            )
        generator = torch.Generator("cpu").manual_seed(0)
        upstream = [
            torch.randn(y.shape, generator=generator, dtype=self.dtype, device="cpu").to(y)
            for y in trainable
        ]
        if trainable:
            torch.autograd.backward(trainable, upstream)
        self.tensors = {
            # Each replica has its own 0-dim tensors.
            "output": {str(path): _dense(y).detach() for path, y in outputs.items() if y.dim()},
            "gradient": {
                name: None if tensor.grad is None else _dense(tensor.grad)
                for name, tensor in (*inputs.items(), *net.named_parameters())
            },
            "buffer": buffers,
        }
        self.replicas = len(self.calls.pop(LayerCall("", 1), {}))  # "output" has it already

    def _in_order(self, output: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Rotates an output back. Raises ValueError if it does not have one entry per sample."""
        tensors = _tensors((args, kwargs)).values()
        (samples,) = {x.shape[self.dim] for x in tensors if x.dim() > self.dim}
        if output.dim() <= self.dim or output.shape[self.dim] != samples:
            raise ValueError("the order of the samples in an output is unknown")
        return output.roll(-self.shift, self.dim)

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
        arguments: Any = (batch,), {}
        if isinstance(batch, Mapping):
            arguments = (), dict(batch)
        elif isinstance(batch, (tuple, list)):
            arguments = tuple(batch), {}
        leaves, spec = flatten(arguments)
        inputs, values = {}, []
        for path, value in leaves:
            if isinstance(value, Tensor):
                value = value.detach().to(self.device, copy=True)
                if value.is_floating_point():
                    value = value.to(self.dtype).requires_grad_()
                    inputs[f"argument {Path(path[1:])}"] = value
                    value = value.clone()  # a layer may change its input in place
                if self.shift and value.dim() > self.dim:
                    value = value.roll(self.shift, self.dim)
            values.append(value)
        args, kwargs = unflatten(spec, values)
        return args, kwargs, inputs


def _compare(actual: Step, expected: Step) -> dict[str, list[Difference]]:
    layers = expected.layers
    of_layers = [
        difference(call.title(layers), actual.calls.get(call, {}), outputs)
        for call, outputs in expected.calls.items()
    ]
    of_layers += [
        Difference(call.title(layers), math.inf, "only replicas call the layer this often")
        for call in actual.calls
        if call not in expected.calls
    ]
    differences = {_OF_LAYERS: of_layers}
    for quantity, tensors in expected.tensors.items():
        largest = max(map(_magnitude, tensors.values()), default=0.0)
        differences[f"{quantity}s"] = [
            difference(
                f"{quantity} of `{name}`" if name else f"{quantity} of the model",
                {0: [actual.tensors[quantity].get(name)]},
                {0: [tensor]},
                largest,
            )
            for name, tensor in tensors.items()
        ]
    return differences


def difference(
    where: str, actual: Parts, expected: Parts, largest_of_kind: float = 0.0
) -> Difference:
    """Compares the joined tensors of the replicas with the tensors of one device.

    The error is relative to the largest value, or to a thousandth of ``largest_of_kind`` if that
    is more: some quantities cancel except for rounding, such as the gradient of a bias before a
    normalization.
    """
    (references,) = expected.values()
    parts = [actual[replica] for replica in sorted(actual)]
    if not parts:
        return Difference(where, math.inf, "no replica calls the layer this often")
    if {*map(len, parts)} != {len(references)}:
        return Difference(where, math.inf, "the replicas return another number of tensors")
    errors = [0.0]
    for reference, *entries in zip(references, *parts, strict=True):
        present = [entry for entry in entries if entry is not None]
        if reference is None or len(present) < len(entries):
            errors.append(0.0 if reference is None and not present else math.inf)
        elif reference.dim() or len(entries) == 1:  # else each replica has its own 0-dim tensor
            candidates = _joined(present, reference.shape)
            if not candidates:
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in present)
                reason = f"shapes {shapes} in the replicas, {tuple(reference.shape)} on one device"
                return Difference(where, math.inf, reason)
            errors.append(min(_error(y, reference, largest_of_kind) for y in candidates))
    return Difference(where, max(errors))


def _joined(parts: list[Tensor], shape: torch.Size) -> list[Tensor]:
    """Returns the stack of the parts if each has the shape, and each concatenation that has it.

    The batch may be in any dimension of a layer's output, or in none: outputs that depend on
    parameters alone are the same in each replica.
    """
    joined = [torch.stack(parts)] if all(part.shape == shape for part in parts) else []
    for dim in range(len(shape)):
        with suppress(RuntimeError, IndexError):
            joined += [y for y in [torch.cat(parts, dim)] if y.shape == shape]
    return joined


def _error(actual: Tensor, reference: Tensor, largest_of_kind: float) -> float:
    reference = reference.expand_as(actual)
    is_equal = (actual == reference) | (actual.isnan() & reference.isnan())
    if is_equal.all():
        return 0.0
    if not (reference.is_floating_point() or reference.is_complex()):
        return math.inf
    error = (actual - reference)[~is_equal].abs().amax().item()
    error /= max(_magnitude(reference), 1e-3 * largest_of_kind) or 1.0
    return error if math.isfinite(error) else math.inf


def _magnitude(tensor: Tensor | None) -> float:
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0


def _items(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _tensors(tree: Any) -> dict[Path, Tensor]:
    return {path: leaf for path, leaf in flatten(tree)[0] if isinstance(leaf, Tensor)}


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _without_wrappers(net: nn.Module) -> nn.Module:
    """Replaces the wrappers of `torch.compile` by their modules, which replicas run as well."""
    for module in list(net.modules()):
        for name, child in module._modules.items():
            module._modules[name] = compiled_module(child)
    return net


def _cast(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts real floating-point parameters and buffers. Complex tensors stay as they are."""
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return net
