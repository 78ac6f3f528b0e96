"""`verify`, which compares a model on replicas, or on ranks, with the same model on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from replication._torch import destroy_group
from replication.checks import check_module
from replication.data_parallel import DataParallel
from replication.devices import DeviceLike, device_of, parse_devices
from replication.groups.processes import ProcessGroup
from replication.groups.registry import has_other_processes, world
from replication.steps.scatter import scatter
from replication.texts import first_of
from replication.verify.agreement import (
    all_or_none,
    check_equal,
    check_model,
    digests_of,
    gathered,
    values_of,
)
from replication.verify.case import Case
from replication.verify.copies import Loss, Make, Step, Wrap, copied, unwrapped
from replication.verify.explanation import explained
from replication.verify.factors import sketched
from replication.verify.position import position
from replication.verify.quantities import DRAWS, Quantities, tensors_of
from replication.verify.recording import check_draws, record
from replication.verify.results import Verification, compared
from replication.verify.runs import as_world, run_alone, run_part, run_rank
from replication.warning import once_for

__all__ = ["verify"]

#: Up to as many ranks, the gradients of the loss of each are computed to explain a difference.
_FEW = 8


def verify(
    model: nn.Module,
    batch: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    *,
    wrap: Wrap | None = None,
    loss: Loss | None = None,
    targets: Any = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    strict: bool = False,
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
    Each rank also runs the whole batch alone, as if it were the only process, and rank 0's run is
    the reference. Every rank gets the same result, and if a rank raises, all do. `verify_ranks`
    starts ranks for a test.

    >>> import torch
    >>> from torch import nn
    >>> from syncbn import verify
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> print(verify(net, torch.randn(8, 3)).first_difference.where)
    output of `1` (BatchNorm1d)

    Args:
        model: The model, in training mode, except layers that draw random numbers, which must be
            in evaluation mode. Without ``loss`` its outputs have a batch dimension, so that it may
            return one loss per sample, but no mean, in the order of the samples. `DataParallel`,
            whose ``dim`` is used, and `DistributedDataParallel` are unwrapped.
        batch: A tensor, a tuple or list of positional arguments, or a mapping of keyword ones.
        device_ids: The devices of the replicas. The first also runs the model alone. By
            default the ranks are compared, or two replicas on the CPU if there is one process.
        wrap: Wraps the copy of a rank, for example `DistributedDataParallel`, or a function that
            calls `fully_shard`. Gradients of parameters are then what the wrapper makes of them.
            It should average them over the ranks, so backward begins with as many times the
            random upstream gradients as there are ranks.
        loss: ``loss(outputs)``, or ``loss(outputs, targets)`` if there are any, returns a scalar
            tensor, or a mapping of named ones (*terms*), whose gradients are compared together and
            one by one. Each rank calls it with its outputs and its part of the targets. Replicas
            call it once, with the joined outputs. A module's own parameters and buffers are
            compared as well, with those of this rank: no wrapper sees them.
        targets: Tensors that are split like the batch, in any nesting of containers.
        dtype: The dtype of all computations. In float64 hardly any rounding is left. Models that
            cast internally may need float32.
        tolerance: The largest error that counts as rounding, relative to the largest value of a
            tensor. The default is 1e-6 in float64 and 1e-3 in other dtypes.
        strict: Whether ranks must begin with the same parameters and buffers. Each copy then keeps
            those of its rank until ``wrap`` has run, and what ``wrap`` has not made equal to rank
            0's differs. Otherwise each copy takes rank 0's, and the result has a note.

    Raises:
        ValueError: Fewer than two replicas, or not all ranks, have data; the model returns a loss,
            is in evaluation mode, where layers do not communicate, or draws random numbers; ranks
            pass different models, batches or options; there are targets, but no loss.
        TypeError: The model is sharded already, instead of by ``wrap``.
        ReplicationError: Another rank raised. The message quotes its error.
        Exception: The model raised. A note says what `verify` was running.
    """
    return verify_made(
        None, model, batch, device_ids, wrap, loss, targets, dtype, tolerance, strict
    )


def verify_made(
    make: Make | None,
    model: nn.Module,
    batch: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    wrap: Wrap | None = None,
    loss: Loss | None = None,
    targets: Any = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    strict: bool = False,
) -> Verification:
    """Like `verify`. One device runs what ``make`` returns, if it is given."""
    check_module(model)
    model, dim = unwrapped(model)
    if tolerance is None:
        tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    device = device_of(model) or torch.device("cpu")
    step = Step(batch, targets, loss, dtype, device, wrap, strict)
    if device_ids is None and has_other_processes():
        return _verify_ranks(model, step, dim, tolerance, make)
    if wrap is not None and device_ids is None and world() is not None:
        raise ValueError(
            "torch.distributed has one process, which is one device already; use "
            "--nproc-per-node=2 or more, or leave wrap out to verify replicas"
        )
    if wrap is not None:
        raise ValueError(
            "wrap is for the ranks of torch.distributed (got one process, or device_ids); call "
            "verify_ranks with a function that returns the arguments, or run under torchrun, and "
            "leave device_ids out"
        )
    devices = parse_devices(("cpu", "cpu") if device_ids is None else device_ids)
    if len(devices) < 2:
        raise ValueError(f"expected two or more devices, such as ['cpu'] * 2 (got {len(devices)})")
    check_model(model, step)
    return _verify_replicas(model, step._replace(device=devices[0]), devices, dim, tolerance)


# -- replicas ------------------------------------------------------------------------------------


def _verify_replicas(
    model: nn.Module, step: Step, devices: list[torch.device], dim: int, tolerance: float
) -> Verification:
    parts = scatter((step.batch, step.targets), ["cpu"] * len(devices), dim)
    count = len(scatter(step.batch, ["cpu"] * len(devices), dim))
    if count < 2:
        raise ValueError("expected at least two replicas with data (got one); pass more samples")

    def replicated(net: nn.Module) -> nn.Module:
        runner = DataParallel(net, devices, dim=dim)
        # As if it had warned of plain batch norm already: the result names that.
        once_for(runner)
        return runner

    with as_world(None):
        expected = run_alone(model, step)
        wrapped = step._replace(wrap=replicated, strict=False)
        actual = record(copied(model, wrapped), wrapped, f"{len(devices)} replicas")
        check_draws(actual, expected)
        result = compared(Verification({}, tolerance, count), actual, expected)
        if result:
            return result
        own = Quantities()
        for index, part in enumerate(parts):
            for key, tensors in run_part(model, step, *part).items():
                own.setdefault(key, {})[index] = tensors[0]
    return replace(result, explanation=explained(Case(result, actual, expected, own)))


# -- ranks ---------------------------------------------------------------------------------------


def _verify_ranks(
    model: nn.Module, step: Step, dim: int, tolerance: float, make: Make | None
) -> Verification:
    """Compares the ranks, in stages. If a rank raises in one of them, all ranks do."""
    group = ProcessGroup(name="verify")
    net, shard, notes = _agreed(group, model, step, dim, tolerance)
    with all_or_none(group) as closing:
        of_rank = run_rank(copy.deepcopy(net), shard, closing)
    actual = gathered(group, of_rank)
    if step.wrap is None:
        actual = actual | {
            quantity: {0: torch.stack(list(parts.values())).sum(0)}
            for quantity, parts in actual.items()
            if quantity.of_parameter
        }
    result, expected = Verification({}, tolerance, group.size, "ranks", notes=notes), Quantities()
    with all_or_none(group) as closing, _alone(group, closing):
        expected = run_alone(model, step, actual, make)
        if group.rank == 0:
            result = compared(result, actual, expected)
    result = group.all_gather_object(result)[0]
    if result:
        return result  # what draws random numbers may take them from one rank
    drawing: Quantities = {key: {} for key in of_rank | expected if key.kind == DRAWS}
    drawn: Any = group.all_gather_object(drawing)
    check_draws(*drawn)
    with all_or_none(group) as closing, _alone(group, closing):
        own = run_part(model, shard, shard.batch, shard.targets, make)
    own = gathered(group, {key: {group.rank: parts[0]} for key, parts in own.items()})
    of_losses = Quantities()
    if step.loss is not None and group.size <= _FEW and result.begins_with_gradients:
        of_losses = _gradients_of_losses(group, net, shard)
    with all_or_none(group):
        if group.rank == 0:
            wrapper = "DDP" if step.wrap is DistributedDataParallel else "the wrapper"
            case = Case(result, actual, expected, own, of_losses, wrapper if step.wrap else "")
            result = replace(result, explanation=explained(case))
    return group.all_gather_object(result)[0]


@contextmanager
def _alone(group: ProcessGroup, closing: ExitStack) -> Iterator[None]:
    """Makes each rank the only process of its world.

    All ranks enter it: if one alone made process groups, the names that torch gives to later ones
    would not match.
    """
    alone = distributed.new_group([group.rank], use_local_synchronization=True)
    closing.callback(destroy_group, alone)
    with as_world(alone):
        yield


def _gradients_of_losses(group: ProcessGroup, net: nn.Module, shard: Step) -> Quantities:
    """Sketches of the gradients of the loss of each rank, through the samples of all ranks."""
    found = Quantities()
    for rank in range(group.size):
        with all_or_none(group) as closing:
            step = shard._replace(wrap=None, strict=False, only=rank)
            own = run_rank(copy.deepcopy(net), step, closing)
        sketches = {key: {0: sketched(own[key][group.rank])} for key in own if key.of_parameter}
        for parts in group.all_gather_object(sketches):
            for key, part in parts.items():
                of_rank = found.setdefault(key, {})
                of_rank[rank] = of_rank.get(rank, torch.zeros(())) + part[0]
    return found


def _agreed(
    group: ProcessGroup, model: nn.Module, step: Step, dim: int, tolerance: float
) -> tuple[nn.Module, Step, list[str]]:
    """Compares what the ranks pass. Returns a copy of the model, this rank's part, and notes."""
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
        position.splits([_samples(part, dim) for part, _ in parts])
    check_equal(group.all_gather_object(digests))
    notes = list[str]()
    for owner, module in {"model": model, "loss": step.loss}.items():
        values = values_of(module) if isinstance(module, nn.Module) else {}
        of_ranks = group.all_gather_object(values)
        names = [n for n in of_ranks[0] if any(v.get(n) != of_ranks[0][n] for v in of_ranks)]
        if names:
            used = "each rank uses its own"
            if owner == "model" and not step.strict:
                used = "rank 0's are used, so let your program broadcast them, as DDP does"
            notes.append(
                f"before the step, the ranks have different values of the {owner}'s "
                f"{first_of([f'`{name}`' for name in names])}; {used}"
            )
    if not step.strict and notes:
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.data.copy_(group.broadcast(tensor.data, 0))
    batch, targets = parts[group.rank]
    return net, step._replace(batch=batch, targets=targets), notes


def _samples(batch: Any, dim: int) -> int:
    """How many samples a part of the batch has, as far as its first tensor tells."""
    return next((t.shape[dim] for t in tensors_of(batch).values() if t.dim() > dim), 0)
