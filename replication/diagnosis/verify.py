"""`verify`, which compares a model on replicas with the same model on one device."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from replication._torch import compiled_module
from replication.data_parallel import DataParallel
from replication.devices import DeviceLike, usable_devices
from replication.diagnosis.table import ShownAsTable, Table
from replication.errors import ReplicationError, add_note, check_module, path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.processes import has_other_processes
from replication.modules import check_initialized
from replication.sync.rendezvous import current_replica, is_recomputation
from replication.tree import Path, flatten, unflatten
from replication.warning import once_for

__all__ = ["Difference", "Verification", "verify"]

#: Runs with disturbed numbers. One of them may round as the undisturbed numbers do.
_DISTURBED_RUNS = 3

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: The kind of quantity that differs first. The model's outputs differ as well if it matters.
_OF_LAYERS = "outputs of layers"


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between the replicas and one device.

    Attributes:
        where: The quantity and its layer, such as "output of `norm` (BatchNorm1d)".
        error: The largest difference, relative to the largest value, or infinity.
        reason: Why the quantities cannot be compared by value. Empty if they can.
    """

    where: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason or f'error {self.error:.1e}'}"


@dataclass(frozen=True, repr=False)
class Verification(ShownAsTable):
    """The result of `verify`. True if all quantities are equal up to rounding.

    Attributes:
        differences: The differences by kind: outputs of layers in the order in which one device
            computes them, outputs of the model, gradients of inputs and parameters, buffers.
        tolerance: The largest error that counts as rounding.
        replicas: The number of replicas that ran.
        is_random: Whether two runs on one device differ as well. This and the next two are only
            filled if the replicas differ.
        is_ill_conditioned: Whether one device differs as much if its numbers change by rounding.
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

    def _is_explained_by(self, other: dict[str, list[Difference]]) -> bool:
        """Whether outputs, gradients and buffers of the model differ as much in ``other``."""
        # Up to a factor of 10, because each run rounds differently.
        worst = {k: _largest(found) for k, found in self.differences.items() if k != _OF_LAYERS}
        found = {kind for kind, error in worst.items() if not error <= self.tolerance}
        return bool(found) and all(worst[kind] <= 10 * _largest(other[kind]) for kind in found)

    def _table(self) -> Table:
        rows = [
            (kind, str(len(found)), f"{_largest(found):.1e}")
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
                "On one device a rounding error in inputs and parameters matters as much: the "
                "model is ill-conditioned."
            )
        if self.changed_attributes:
            after.append(
                f"The forward changes {', '.join(f'`{name}`' for name in self.changed_attributes)}"
                ": replicas share plain containers, and overwrite each other's items."
            )
        titles = "compared", "number", "largest relative error"
        return Table(titles, rows, after=after, numbers_from=1)


def _largest(differences: list[Difference]) -> float:
    return max((d.error for d in differences), default=0.0)


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
    does not change, and nothing is converted, so that layers without synchronization are found.

    Put layers that draw random numbers (dropout) in evaluation mode first. Layers that reorder the
    samples of a batch also differ. If anything differs, two more runs on one device tell whether
    the model is random or ill-conditioned.

    >>> import torch
    >>> from torch import nn
    >>> from syncbn import verify
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3)).first_difference.where)
    output of `1` (BatchNorm1d)

    Args:
        model: The model, usually in training mode. A `torch.nn.DataParallel` is unwrapped.
        batch: A tensor, a tuple or list of positional arguments, or a mapping of keyword ones.
        device_ids: The devices of the replicas. The first also runs the model alone.
        dtype: The dtype of all computations. In float64 hardly any rounding is left. Models that
            cast internally may need float32.
        tolerance: The largest error that counts as rounding, relative to the largest value of a
            tensor. The default is 1e-6 in float64 and 1e-3 in other dtypes.

    Raises:
        ValueError: Only one replica has data, or the model returns a loss.
        ReplicationError: A layer communicates with other processes.
        Exception: The model raised. A note says what `verify` was running.
    """
    check_module(model)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("verify computes gradients; call it outside of torch.inference_mode")
    dim, model = 0, compiled_module(model)
    if isinstance(model, nn.DataParallel):
        # Without an accelerator, torch's class sets no `dim`.
        dim, model = getattr(model, "dim", 0), compiled_module(model.module)
    _check_layers(model)
    devices = usable_devices(device_ids)
    if len(devices) < 2:
        raise ValueError(f"expected at least two devices to compare with one (got {len(devices)})")
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3

    def run(
        how: str, on: Sequence[torch.device] = devices[:1], noise: torch.Generator | None = None
    ) -> Step:
        net = _cast(_without_wrappers(copy.deepcopy(model)).to(devices[0]), dtype)
        for parameter in net.parameters():
            parameter.data = _disturbed(parameter.data, noise)
        runner = net if len(on) == 1 else DataParallel(net, on, dim=dim)
        once_for(runner)()  # the result names plain batch norm, no warning does
        step = Step(net)
        try:
            step.run(runner, *_arguments(batch, devices[0], dtype, noise))
        except BaseException as error:
            add_note(error, f"while verify ran a copy of the model{how}")
            raise
        return step

    expected = run(f", cast to {dtype}, on one device")
    actual = run(f" on {len(devices)} replicas", devices)
    if len(actual.replicas) < 2:
        raise ValueError("expected at least two replicas with data (got one); pass more samples")
    result = Verification(_compare(actual, expected), tolerance, len(actual.replicas))
    if result:
        return result
    result = replace(result, changed_attributes=tuple(expected.changed_attributes))
    repeated = _compare(run(" on one device once more"), expected)
    # Not by gradients: a second run may round otherwise, which decides them at the kink of a ReLU.
    drawn = {kind: found for kind, found in repeated.items() if kind != "gradients"}
    if not Verification(drawn, tolerance, 1):
        return replace(result, is_random=True)
    noise = torch.Generator("cpu").manual_seed(0)
    for _ in range(_DISTURBED_RUNS):
        step = run(" on one device, with rounding errors", noise=noise)
        if result._is_explained_by(_compare(step, expected)):
            return replace(result, is_ill_conditioned=True)
    return result


def _check_layers(model: nn.Module) -> None:
    for path, layer in model.named_modules():
        check_initialized(path, layer)
        if isinstance(layer, ReplicaAware) and has_other_processes(layer.process_group):
            raise ReplicationError(
                "verify compares replicas of one process, and "
                f"`{path_or_root(path)}` communicates with others; run it without torchrun"
            )


#: The tensors of one quantity, by replica.
Parts = dict[int, list[Tensor]]


class Step:
    """One forward and one backward of ``net``, and all quantities to be compared."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        #: The quantities of each kind, by name. The outputs of layers are in the order of calls.
        self.quantities: dict[str, dict[str, Parts]] = {_OF_LAYERS: {}}
        #: The plain containers in attributes whose items change in the forward.
        self.changed_attributes: list[str] = []
        self.replicas: set[int] = set()
        self._calls: Counter[tuple[str, int]] = Counter()
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
        self.replicas.add(replica)
        if not path:
            return  # "outputs" has the model's
        self._calls[path, replica] += 1
        number = self._calls[path, replica]
        later = f", call {number}" if number > 1 else ""
        name = f"output of `{path}` ({type(layer).__name__}{later})"
        self.quantities[_OF_LAYERS].setdefault(name, {})[replica] = [
            _dense(tensor).detach().clone() for tensor in _tensors(output).values()
        ]

    def run(self, runner: nn.Module, args: Any, kwargs: Any, inputs: Mapping[str, Tensor]) -> None:
        """Runs ``runner``, which is ``net`` or a `DataParallel` around it."""
        containers = _plain_containers(self.net)
        with torch.enable_grad():
            outputs = _tensors(runner(*args, **kwargs))
        self.changed_attributes = [
            name
            for name, container, items in containers
            if list(map(id, items)) != list(map(id, _items(container)))
        ]
        # Before the backward: a recomputation updates the buffers of torch's layers once more.
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
        _backward([y for y in outputs.values() if y.requires_grad])
        leaves = {**inputs, **dict(self.net.named_parameters())}
        self._add("output", {str(path): y.detach() for path, y in outputs.items()})
        self._add("gradient", {k: t.grad for k, t in leaves.items() if t.grad is not None})
        self._add("buffer", buffers)

    def _add(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        self.quantities[f"{kind}s"] = {
            f"{kind} of `{name}`" if name else f"{kind} of the model": {0: [_dense(tensor)]}
            for name, tensor in tensors.items()
        }


def _backward(outputs: list[Tensor]) -> None:
    if any(y.dim() == 0 for y in outputs):
        raise ValueError(
            "the model must not return a loss, as each replica has its own; verify it without"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    upstream = [
        torch.randn(y.shape, generator=generator, dtype=y.dtype, device="cpu").to(y.device)
        for y in outputs
    ]
    if outputs:
        torch.autograd.backward(outputs, upstream)


def _arguments(
    batch: Any, device: torch.device, dtype: torch.dtype, noise: torch.Generator | None
) -> tuple[Any, Any, dict[str, Tensor]]:
    """Returns arguments for a model, and the leaves among them, which get gradients."""
    arguments: Any = (batch,), {}
    if isinstance(batch, Mapping):
        arguments = (), dict(batch)
    elif isinstance(batch, (tuple, list)):
        arguments = tuple(batch), {}
    leaves, spec = flatten(arguments)
    inputs, values = {}, []
    for path, value in leaves:
        if isinstance(value, Tensor):
            value = value.detach().to(device, copy=True)
            if value.is_floating_point():
                value = _disturbed(value.to(dtype), noise).requires_grad_()
                inputs[f"argument {Path(path[1:])}"] = value
                value = value.clone()  # a layer may change its input in place
        values.append(value)
    return *unflatten(spec, values), inputs


def _disturbed(tensor: Tensor, noise: torch.Generator | None) -> Tensor:
    """Returns a tensor that differs by a rounding error, if there is noise."""
    if noise is None or not tensor.is_floating_point():
        return tensor
    signs = torch.randint(-1, 2, tensor.shape, generator=noise, device="cpu").to(tensor)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)


def _compare(actual: Step, expected: Step) -> dict[str, list[Difference]]:
    result = {}
    for kind, quantities in expected.quantities.items():
        others = actual.quantities[kind]
        tensors = [] if kind == _OF_LAYERS else [parts[0][0] for parts in quantities.values()]
        largest = max(map(_magnitude, tensors), default=0.0)
        result[kind] = [
            difference(name, others.get(name), quantities.get(name), largest)
            for name in {**quantities, **others}
        ]
    return result


def difference(
    where: str, actual: Parts | None, expected: Parts | None, largest_of_kind: float
) -> Difference:
    """Compares the joined tensors of the replicas with the tensors of one device."""
    # Relative to the largest value, or a thousandth of `largest_of_kind` if that is more: some
    # quantities cancel except for rounding, such as the gradient of a bias before a normalization.
    if actual is None or expected is None:
        only = "one device has" if actual is None else "replicas have"
        return Difference(where, math.inf, f"only {only} it")
    (references,) = expected.values()
    parts = [actual[replica] for replica in sorted(actual)]
    if {*map(len, parts)} != {len(references)}:
        return Difference(where, math.inf, "the replicas return another number of tensors")
    errors = [0.0]
    for reference, *entries in zip(references, *parts, strict=True):
        if not reference.dim() and (len(entries) > 1 or entries[0].dim()):
            continue  # each replica has its own 0-dim tensor, and gathered they are a vector
        entries = [entry.to(reference.device) for entry in entries]
        candidates = _joined(entries, reference.shape)
        if not candidates:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in entries)
            reason = f"shapes {shapes} in the replicas, {tuple(reference.shape)} on one device"
            return Difference(where, math.inf, reason)
        errors.append(min(_error(y, reference, largest_of_kind) for y in candidates))
    return Difference(where, max(errors))


def _joined(parts: list[Tensor], shape: torch.Size) -> list[Tensor]:
    """Returns the stack of the parts if each has the shape, and each concatenation that has it."""
    # The batch may be in any dimension of an output, or in none: outputs that depend on
    # parameters alone are the same in each replica.
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


def _magnitude(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0


def _plain_containers(net: nn.Module) -> list[tuple[str, Any, list[Any]]]:
    """Returns the path, the value and the items of each list, dict and deque in an attribute."""
    return [
        (f"{path}.{name}".lstrip("."), value, _items(value))
        for path, layer in net.named_modules()
        for name, value in vars(layer).items()
        if name not in _MODULE_ATTRIBUTES and isinstance(value, (list, dict, deque))
    ]


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
