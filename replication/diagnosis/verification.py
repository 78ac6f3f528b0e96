"""`verify`, which compares a model on replicas with the same model on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from replication._torch import compiled_module
from replication.devices import DeviceLike, parse_devices
from replication.diagnosis.recording import OF_LAYERS, Parts, Recording, has_fractions
from replication.diagnosis.table import table
from replication.errors import ReplicationError, check_module, path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.registry import has_other_processes
from replication.modules import check_initialized

__all__ = ["Difference", "Verification", "verify"]


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


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. True if all quantities are equal up to rounding.

    Attributes:
        differences: The differences by kind: outputs of layers in the order in which one device
            computes them, outputs of the model, gradients of inputs and parameters, buffers.
        tolerance: The largest error that counts as rounding.
        replicas: The number of replicas that ran.
        is_random: Whether two runs on one device differ as well. Only set if the replicas differ.
    """

    differences: dict[str, list[Difference]]
    tolerance: float
    replicas: int
    is_random: bool = False

    def __bool__(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Difference | None:
        """The first difference above the tolerance, which names the layer where errors begin."""
        everything = (d for differences in self.differences.values() for d in differences)
        return next((d for d in everything if d.error > self.tolerance), None)

    def __repr__(self) -> str:
        rows = [
            (kind, str(len(found)), f"{_largest(found):.1e}")
            for kind, found in self.differences.items()
            if found
        ]
        first = self.first_difference
        verdict = "equal" if first is None else f"the first difference is {first}"
        lines = [
            table(("compared", "number", "largest relative error"), rows, numbers_from=1),
            f"{self.replicas} replicas: {verdict} (tolerance {self.tolerance:.0e})",
        ]
        if self.is_random:
            lines.append("Two runs on one device differ as well: the model draws random numbers.")
        return "\n".join(lines)


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
    samples of a batch also differ.

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
    run = partial(Recording, model, batch, dim, dtype)
    expected, actual = run(devices[:1]), run(devices)
    count = len({replica for _, replica in actual.calls})
    if count < 2:
        raise ValueError("expected at least two replicas with data (got one); pass more samples")
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    result = Verification(_compare(actual, expected), tolerance, count)
    if result:
        return result
    again = _compare(run(devices[:1]), expected)
    # Not by gradients: a second run may round otherwise, which decides them at the kink of a ReLU.
    drawn = [_largest(found) for kind, found in again.items() if kind != "gradients"]
    return replace(result, is_random=max(drawn) > tolerance)


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


def _compare(actual: Recording, expected: Recording) -> dict[str, list[Difference]]:
    result = {}
    for kind, references in expected.quantities.items():
        found = actual.quantities[kind]
        tensors = [] if kind == OF_LAYERS else [parts[0] for parts in references.values()]
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
    if not has_fractions(reference):
        return math.inf
    error = (actual - reference)[~is_equal].abs().amax().item()
    error /= max(_magnitude(reference), least) or 1.0
    return error if math.isfinite(error) else math.inf


def _magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().amax().item() if has_fractions(tensor) and len(finite) else 0.0
