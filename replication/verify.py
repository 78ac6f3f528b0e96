"""`verify`, which compares a model on replicas, or on ranks, with the same model on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from replication._torch import compiled_module, destroy_group
from replication.agreement import all_or_none, check_equal, check_model, digests_of
from replication.data_parallel import DataParallel
from replication.devices import DeviceLike, device_of, parse_devices
from replication.errors import check_module, first_of, listed, table
from replication.groups.processes import ProcessGroup
from replication.groups.registry import has_other_processes
from replication.recording import (
    BUFFERS,
    GRADIENTS,
    KINDS,
    LAYERS,
    OUTPUTS,
    Parts,
    Quantities,
    Quantity,
    Step,
    Wrap,
    as_world,
    copied,
    has_fractions,
    joined,
    record,
    run_alone,
    run_rank,
)
from replication.steps.scatter import scatter
from replication.warning import once_for

__all__ = ["Difference", "Verification", "verify"]


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between the replicas, or the ranks, and one device.

    Attributes:
        where: The quantity and its layer, such as "output of `norm` (BatchNorm1d)".
        error: The largest difference, relative to the largest value, or infinity.
        reason: Why the quantities cannot be compared by value, or which ranks differ from each
            other. Usually empty.
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
        replicas: The number of replicas or ranks that ran.
        copies: "replicas" or "ranks".
        explanation: What the differences have in common, if that is known. Usually empty.
    """

    differences: dict[str, list[Difference]]
    tolerance: float
    replicas: int
    copies: str = "replicas"
    explanation: str = ""

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
            f"{self.replicas} {self.copies}: {verdict} (tolerance {self.tolerance:.0e})",
        ]
        return "\n".join([*lines, self.explanation] if self.explanation else lines)


def _largest(differences: list[Difference]) -> float:
    return max((d.error for d in differences), default=0.0)


def verify(
    model: nn.Module,
    batch: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    wrap: Wrap | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Any = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Compares copies of a model with the same model on one device that sees the whole batch.

    The copies are replicas in this process. If `torch.distributed` runs several processes, they
    are its ranks, and each must call this function with the same model and the whole batch.
    Copies run forward and backward, with random upstream gradients or with ``loss``. The model
    itself does not change, and nothing is converted, so that layers without synchronization are
    found.

    Between ranks, the batch is split like in `DataParallel`, one part for each rank. A rank's copy
    has the parameters of rank 0, and runs where its own model is. Outputs are joined,
    gradients of parameters are added over the ranks, and buffers must be right on each of them.
    Rank 0 also runs the whole batch alone, as if `torch.distributed` did not run. Every rank gets
    the same result, and if a rank raises, all do.

    >>> import torch
    >>> from torch import nn
    >>> from syncbn import verify
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3)).first_difference.where)
    output of `1` (BatchNorm1d)

    Args:
        model: The model, in training mode, except layers that draw random numbers, which must be
            in evaluation mode. Without ``loss`` its outputs have a batch dimension, so that it may
            return one loss per sample, but no mean. Layers that reorder the samples of a batch
            differ. `DataParallel`, whose ``dim`` is used, and `DistributedDataParallel` are
            unwrapped.
        batch: A tensor, a tuple or list of positional arguments, or a mapping of keyword ones.
        device_ids: The devices of the replicas. The first also runs the model alone. By
            default the ranks are compared, or two replicas on the CPU if there is one process.
        wrap: Wraps the copy of a rank, for example `DistributedDataParallel`, or a function that
            calls `fully_shard`. Gradients of parameters are then what the wrapper makes of them.
            It should average them over the ranks, so backward begins with as many times the
            random upstream gradients as there are ranks.
        loss: ``loss(outputs)``, or ``loss(outputs, targets)`` if there are any, returns a scalar
            tensor. Each rank calls it with its outputs and its part of the targets. Replicas call
            it once, with the joined outputs.
        targets: Tensors that are split like the batch, in any nesting of containers.
        dtype: The dtype of all computations. In float64 hardly any rounding is left. Models that
            cast internally may need float32.
        tolerance: The largest error that counts as rounding, relative to the largest value of a
            tensor. The default is 1e-6 in float64 and 1e-3 in other dtypes.

    Raises:
        ValueError: Fewer than two replicas, or not all ranks, have data; the model returns a loss,
            is in evaluation mode, where layers do not communicate, or draws random numbers; ranks
            pass different models, batches or options; there are targets, but no loss.
        TypeError: The model is sharded already, instead of by ``wrap``.
        ReplicationError: Another rank raised. The message quotes its error.
        Exception: The model raised. A note says what `verify` was running.
    """
    check_module(model)
    dim, model = 0, compiled_module(model)
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        # torch's DataParallel sets `dim` only on machines with an accelerator.
        dim, model = getattr(model, "dim", 0), compiled_module(model.module)
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    step = Step(batch, targets, loss, dtype, device_of(model) or torch.device("cpu"), wrap)
    if device_ids is None and has_other_processes():
        return _verify_ranks(model, step, dim, tolerance)
    if wrap is not None:
        raise ValueError(
            "wrap is for the ranks of torch.distributed (got one process, or device_ids); run "
            "under torchrun, call init_process_group first, and leave device_ids out"
        )
    devices = parse_devices(("cpu", "cpu") if device_ids is None else device_ids)
    if len(devices) < 2:
        raise ValueError(f"expected two or more devices, such as ['cpu'] * 2 (got {len(devices)})")
    check_model(model, step)
    count = len(scatter(batch, ["cpu"] * len(devices), dim))
    if count < 2:
        raise ValueError("expected at least two replicas with data (got one); pass more samples")

    def replicated(net: nn.Module) -> nn.Module:
        runner = DataParallel(net, devices, dim=dim)
        once_for(runner)  # the result names plain batch norm, no warning does
        return runner

    step = step._replace(device=devices[0], wrap=replicated)
    with as_world(None):
        expected = run_alone(model, step)
        actual = record(copied(model, step), step, f"{len(devices)} replicas")
    return _compared(Verification({}, tolerance, count), actual, expected)


# -- ranks ---------------------------------------------------------------------------------------


def _verify_ranks(model: nn.Module, step: Step, dim: int, tolerance: float) -> Verification:
    """Compares the ranks, in four stages. If a rank raises in one of them, all ranks do."""
    group = ProcessGroup(name="verify")
    net, shard = _agreed(group, model, step, dim, tolerance)
    with all_or_none(group) as closing:
        own = run_rank(net, shard, closing)
    actual = _gathered(group, own)
    if step.wrap is None:
        for quantity, parts in _of_parameters(actual).items():
            actual[quantity] = {0: torch.stack(list(parts.values())).sum(0)}
    result = Verification({}, tolerance, group.size, copies="ranks")
    return _compared_by_first(group, result, actual, model, step)


def _agreed(
    group: ProcessGroup, model: nn.Module, step: Step, dim: int, tolerance: float
) -> tuple[nn.Module, Step]:
    """Compares what the ranks pass. Returns a copy of rank 0's model, and this rank's part."""
    size = group.size
    with all_or_none(group):
        check_model(model, step)
        net = copied(model, step, group.process_group)
        parts = scatter((step.batch, step.targets), ["cpu"] * size, dim)
        if len(parts) < size:
            raise ValueError(
                f"the batch must have a part for each of {size} ranks (got {len(parts)}, by the "
                "sizes of torch.chunk); pass a multiple of the number of ranks"
            )
        digests = digests_of(model, step, tolerance)
    check_equal(group.all_gather_object(digests))
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data.copy_(group.broadcast(tensor.data, 0))
    batch, targets = parts[group.rank]
    return net, step._replace(batch=batch, targets=targets)


def _gathered(group: ProcessGroup, own: Quantities) -> Quantities:
    """Brings the parts of all quantities to rank 0, one quantity at a time."""
    whole: Quantities = {}
    for quantity in dict.fromkeys(chain(*group.all_gather_object(list(own)))):
        for parts in group.all_gather_object(own.get(quantity, {})):
            if group.rank == 0:
                whole.setdefault(quantity, {}).update(parts)
    return whole


def _compared_by_first(
    group: ProcessGroup, result: Verification, actual: Quantities, model: nn.Module, step: Step
) -> Verification:
    """Compares the ranks with one device on rank 0, which runs as if it were the only process."""
    with all_or_none(group) as closing:
        alone = distributed.new_group([0])
        closing.callback(destroy_group, alone)
        if group.rank == 0:
            with as_world(alone):
                expected = run_alone(model, step, actual)
            result = _compared(result, actual, expected)
            explanation = _explanation(result, actual, expected, step.wrap)
            result = replace(result, explanation=explanation)
    return group.all_gather_object(result)[0]


def _of_parameters(quantities: Quantities) -> Quantities:
    return {key: parts for key, parts in quantities.items() if key.of_parameter}


def _explanation(
    result: Verification, actual: Quantities, expected: Quantities, wrap: Wrap | None
) -> str:
    """Says what the differences between ranks have in common, if it is one of the usual things."""
    size, lines = result.replicas, list[str]()
    if wrap is None:
        how = "without wrap, verify adds"
    else:
        how = f"{'DDP' if wrap is DistributedDataParallel else 'the wrapper'} averages"

    def are(factor: float) -> bool:
        scaled = {key: {0: factor * parts[0]} for key, parts in _of_parameters(expected).items()}
        found = _differences(GRADIENTS, _of_parameters(actual), scaled, result)
        return _largest(found) <= result.tolerance

    for factor, times, remedy in (
        (1 / size, f"1/{size} of", "summed over the batch must be multiplied"),
        (size, f"{size} times", "averaged over the batch must be divided"),
    ):
        if not are(1) and are(factor):
            lines.append(
                f"every gradient is {times} one device's: {how} over {size} ranks, so a loss that "
                f"is {remedy} by the number of ranks. Ask for that number inside the loss, "
                "because one device calls the loss as well"
            )
    if uneven := [str(buffer) for buffer in result.differences[BUFFERS] if buffer.reason]:
        lines.append(f"statistics differ between the ranks after the step: {first_of(uneven)}")
    return "\n".join(lines)


# -- comparison ----------------------------------------------------------------------------------


def _compared(result: Verification, actual: Quantities, expected: Quantities) -> Verification:
    found = {kind: _differences(kind, actual, expected, result) for kind in KINDS}
    return replace(result, differences=found)


def _differences(
    kind: str, actual: Quantities, expected: Quantities, result: Verification
) -> list[Difference]:
    # Errors are relative to the largest value of a tensor, or to a thousandth of the largest of
    # the kind if that is more: some quantities cancel except for rounding, such as the gradient of
    # a bias before a normalization. Layers may differ in scale, so theirs are not compared.
    same_scale = [parts[0] for key, parts in expected.items() if key.kind == kind != LAYERS]
    least = 1e-3 * max(map(_magnitude, same_scale), default=0.0)
    return [
        _difference(key, actual.get(key), expected.get(key), least, result)
        for key in expected | actual
        if key.kind == kind
    ]


def _difference(
    quantity: Quantity,
    actual: Parts | None,
    expected: Parts | None,
    least: float,
    result: Verification,
) -> Difference:
    """Compares the joined tensors of the copies with the tensor of one device."""
    where, copies = quantity.where, result.copies
    if actual is None or expected is None:
        only = "one device has" if actual is None else f"{copies} have"
        return Difference(where, math.inf, f"only {only} it")
    reference = expected[0]
    shape = reference.shape
    if quantity.kind in (LAYERS, OUTPUTS) and not shape:
        return Difference(where, 0.0, "scalars are not joined, and so not compared")
    if all(part.shape == shape for part in actual.values()):
        # Buffers, and outputs that depend on parameters alone, are the same in each copy.
        first, reason = min(actual), ""
        error = max(_error(part, reference, least) for part in actual.values())
        apart = {i: _error(part, actual[first], least) for i, part in actual.items()}
        if others := sorted(i for i in apart if apart[i] > result.tolerance):
            copy = copies.removesuffix("s")
            reason = f"error {error:.1e}, and {listed(others, copy)} and {copy} {first} differ"
        return Difference(where, error, reason)
    whole = joined(actual, shape)
    if whole is not None:
        return Difference(where, _error(whole, reference, least))
    shapes = ", ".join(str(tuple(actual[i].shape)) for i in sorted(actual))
    reason = f"shapes {shapes} in the {copies}, {tuple(shape)} on one device"
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
