"""`verify`, which compares a model on replicas with the same model on one device."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replication._torch import compiled_module
from replication.data_parallel import DataParallel
from replication.devices import DeviceLike, parse_devices
from replication.diagnosis.table import ShownAsTable, Table
from replication.errors import ReplicationError, add_note, check_module, path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.processes import has_other_processes
from replication.modules import check_initialized
from replication.sync.current import current_replica, is_recomputation
from replication.tree import flatten, unflatten
from replication.warning import once_for

__all__ = ["Difference", "Verification", "verify"]

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
        is_random: Whether two runs on one device differ as well. Like the next one, only set if
            the replicas differ.
        is_ill_conditioned: Whether one device differs as much if its numbers change by rounding.
    """

    differences: dict[str, list[Difference]]
    tolerance: float
    replicas: int
    is_random: bool = False
    is_ill_conditioned: bool = False

    def __bool__(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Difference | None:
        """The first difference above the tolerance, which names the layer where errors begin."""
        everything = (d for differences in self.differences.values() for d in differences)
        return next((d for d in everything if d.error > self.tolerance), None)

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
    samples of a batch also differ. In a terminal, `verify` prints what it runs.

    >>> import torch
    >>> from torch import nn
    >>> from syncbn import verify
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3)).first_difference.where)
    output of `1` (BatchNorm1d)

    Args:
        model: The model, in training mode. It returns no loss, or one loss per sample. A
            `torch.nn.DataParallel` is unwrapped, and its ``dim`` is used.
        batch: A tensor, a tuple or list of positional arguments, or a mapping of keyword ones.
        device_ids: The devices of the replicas. The first also runs the model alone.
        dtype: The dtype of all computations. In float64 hardly any rounding is left. Models that
            cast internally may need float32.
        tolerance: The largest error that counts as rounding, relative to the largest value of a
            tensor. The default is 1e-6 in float64 and 1e-3 in other dtypes.

    Raises:
        ValueError: Fewer than two replicas have data, or the model returns a loss or is in
            evaluation mode, where layers do not communicate.
        ReplicationError: A layer communicates with other processes.
        Exception: The model raised. A note says what `verify` was running.
    """
    check_module(model)
    dim, model = 0, compiled_module(model)
    if isinstance(model, nn.DataParallel):
        # Without an accelerator, torch's class sets no `dim`.
        dim, model = getattr(model, "dim", 0), compiled_module(model.module)
    _check_layers(model)
    devices = parse_devices(device_ids)
    if len(devices) < 2:
        raise ValueError(f"expected two or more devices, such as ['cpu'] * 2 (got {len(devices)})")
    run, cast = partial(Run, model, batch, dim), Cast(dtype)
    expected, actual = run(devices[:1], cast), run(devices, cast)
    count = len({replica for _, replica in actual.calls})
    if count < 2:
        raise ValueError("expected at least two replicas with data (got one); pass more samples")
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    result = Verification(_compare(actual, expected), tolerance, count)
    return result if result else _with_cause(result, expected, partial(run, devices[:1]), cast)


def _with_cause(
    result: Verification, expected: Run, rerun: Callable[[Cast], Run], cast: Cast
) -> Verification:
    """Asks whether other runs on one device differ as much as the replicas do."""
    repeated = _compare(rerun(cast), expected)
    # Not by gradients: a second run may round otherwise, which decides them at the kink of a ReLU.
    drawn = [_largest(found) for kind, found in repeated.items() if kind != "gradients"]
    if max(drawn) > result.tolerance:
        return replace(result, is_random=True)
    errors = {kind: _largest(found) for kind, found in result.differences.items()}
    above = {k: e for k, e in errors.items() if k != _OF_LAYERS and e > result.tolerance}
    disturbing = cast._replace(noise=torch.Generator("cpu").manual_seed(0))
    for _ in range(3):  # one of them may round as the undisturbed numbers do
        disturbed = _compare(rerun(disturbing), expected)
        # Up to a factor of 10, because each run rounds differently.
        if above and all(error <= 10 * _largest(disturbed[kind]) for kind, error in above.items()):
            return replace(result, is_ill_conditioned=True)
    return result


def _check_layers(model: nn.Module) -> None:
    if not any(module.training for module in model.modules()):
        raise ValueError("the model must be in training mode (got eval()); call model.train()")
    for path, layer in model.named_modules():
        check_initialized(path, layer)
        if isinstance(layer, ReplicaAware) and has_other_processes(layer.process_group):
            raise ReplicationError(
                "verify compares replicas of one process, and "
                f"`{path_or_root(path)}` communicates with others; run it without torchrun"
            )


def _copied(model: nn.Module, device: torch.device, cast: Cast) -> nn.Module:
    """Returns a copy without the wrappers of `torch.compile`, whose modules replicas run."""
    net = copy.deepcopy(model).to(device)
    for module in list(net.modules()):
        for name, child in module._modules.items():
            module._modules[name] = compiled_module(child)
    for parameter in net.parameters():
        parameter.data = cast(parameter.data)
    for buffer in net.buffers():
        buffer.data = cast._replace(noise=None)(buffer.data)
    return net


def _arguments(
    batch: Any, device: torch.device, cast: Cast
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
    """Returns arguments for a model, and the leaves among them, which get gradients."""
    is_named = isinstance(batch, Mapping)
    listed = batch if isinstance(batch, (tuple, list)) else (batch,)
    named = dict(batch) if is_named else {f"args[{i}]": value for i, value in enumerate(listed)}
    tensors, spec = flatten(named)
    inputs, values = {}, []
    for path, value in tensors:
        if isinstance(value, Tensor):
            value = cast(value.detach().to(device, copy=True))
            if value.is_floating_point():
                inputs[f"input `{path}`"] = value.requires_grad_()
                value = value.clone()  # a layer may change its input in place
        values.append(value)
    named = unflatten(spec, values)
    return ((), named, inputs) if is_named else (tuple(named.values()), {}, inputs)


class Cast(NamedTuple):
    """Casts a tensor of real or complex numbers. Noise changes each by an ulp."""

    dtype: torch.dtype
    noise: torch.Generator | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        if not _has_fractions(tensor):
            return tensor
        tensor = tensor.to(self.dtype.to_complex() if tensor.is_complex() else self.dtype)
        if self.noise is None:
            return tensor
        signs = torch.randint(-1, 2, tensor.shape, generator=self.noise, device="cpu").to(tensor)
        return tensor * (1 + torch.finfo(self.dtype).eps * signs)


#: A quantity in each replica.
Parts = dict[int, Tensor]


class Run:
    """One forward and one backward of a copy of the model, on one device or on replicas."""

    @torch.inference_mode(False)  # computes gradients, whatever the mode of the caller
    def __init__(
        self, model: nn.Module, batch: Any, dim: int, devices: list[torch.device], cast: Cast
    ) -> None:
        #: By kind and name. The outputs of layers are in the order of calls.
        self.quantities: dict[str, dict[str, Parts]] = {_OF_LAYERS: {}}
        #: The number of calls by path and replica.
        self.calls: Counter[tuple[str, int]] = Counter()
        net = _copied(model, devices[0], cast)
        self._record_calls_of(net)
        args, kwargs, inputs = _arguments(batch, devices[0], cast)
        runner = net if len(devices) == 1 else DataParallel(net, devices, dim=dim)
        once_for(runner)()  # the result names plain batch norm, no warning does
        on = "one device" if len(devices) == 1 else f"{len(devices)} replicas"
        if getattr(sys.stderr, "isatty", bool)():  # a large model takes half a minute
            print(f"verify: forward and backward on {on}", file=sys.stderr)
        try:
            outputs = _tensors(runner(*args, **kwargs))
            # Before the backward: a recomputation updates the buffers of torch's layers once more.
            buffers = {f"`{name}`": buffer.clone() for name, buffer in net.named_buffers()}
            _backward([y for y in outputs.values() if y.requires_grad])
        except BaseException as error:
            add_note(error, f"while verify ran a copy of the model, cast to {cast.dtype}, on {on}")
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
            parts = self.quantities[_OF_LAYERS].setdefault(name, {})
            parts[replica] = tensor.detach().clone().to_dense()


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


def _compare(actual: Run, expected: Run) -> dict[str, list[Difference]]:
    result = {}
    for kind, references in expected.quantities.items():
        found = actual.quantities[kind]
        tensors = [] if kind == _OF_LAYERS else [parts[0] for parts in references.values()]
        # Errors are relative to the largest value of a tensor, or to a thousandth of the largest
        # of the kind if that is more: some quantities cancel except for rounding, such as the
        # gradient of a bias before a normalization.
        least = 1e-3 * max(map(_magnitude, tensors), default=0.0)
        result[kind] = [
            _difference(name, found.get(name), references.get(name), least)
            for name in references | found
        ]
    return result


def _difference(
    where: str, actual: Parts | None, expected: Parts | None, least: float
) -> Difference:
    """Compares the joined tensors of the replicas with the tensor of one device."""
    if actual is None or expected is None:
        only = "one device has" if actual is None else "replicas have"
        return Difference(where, math.inf, f"only {only} it")
    (reference,) = expected.values()
    shape, parts = reference.shape, [actual[i].to(reference.device) for i in sorted(actual)]
    if not shape and (len(parts) > 1 or parts[0].dim()):  # gathered they are a vector
        return Difference(where, 0.0, "each replica has a scalar of its own")
    # The batch may be in any dimension of an output, or in none: outputs that depend on
    # parameters alone are the same in each replica.
    joined = [torch.stack(parts)] if all(part.shape == shape for part in parts) else []
    for dim in range(len(shape)):
        with suppress(RuntimeError, IndexError):  # the parts differ in another dimension
            joined += [y for y in [torch.cat(parts, dim)] if y.shape == shape]
    if joined:
        return Difference(where, min(_error(y, reference, least) for y in joined))
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    reason = f"shapes {shapes} in the replicas, {tuple(shape)} on one device"
    return Difference(where, math.inf, reason)


def _error(actual: Tensor, reference: Tensor, least: float) -> float:
    is_equal = (actual == reference) | (actual.isnan() & reference.isnan())
    if is_equal.all():
        return 0.0
    if not _has_fractions(reference):
        return math.inf
    error = (actual - reference)[~is_equal].abs().amax().item()
    error /= max(_magnitude(reference), least) or 1.0
    return error if math.isfinite(error) else math.inf


def _magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().amax().item() if _has_fractions(tensor) and len(finite) else 0.0


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
