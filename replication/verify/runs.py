"""Who runs a step: a rank, in a process group of its own, or one device, as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

from torch import distributed, nn

from replication._torch import destroy_group, is_dtensor, timeout_of
from replication.verify.copies import Make, Step, copied, take_tensors, unwrapped
from replication.verify.quantities import Quantities
from replication.verify.recording import record


def run_alone(
    model: nn.Module, step: Step, ranks: Quantities | None = None, make: Make | None = None
) -> Quantities:
    """Runs a batch alone: a copy of the model, or what a program of one process makes."""
    if make is not None:
        made, loss = make()
        own, _ = unwrapped(made)
        for new, old in ((own, model), (loss, step.loss)):
            if isinstance(new, nn.Module) and isinstance(old, nn.Module):
                take_tensors(new, old)
        model, step = own, step._replace(loss=loss)
    step = step._replace(wrap=None)
    return record(copied(model, step), step, "one device", ranks=ranks)


def run_part(
    model: nn.Module, step: Step, batch: Any, targets: Any, make: Make | None = None
) -> Quantities:
    """Runs a part of the batch alone, for explanations. Returns nothing if that raises."""
    with suppress(Exception):
        return run_alone(model, step._replace(batch=batch, targets=targets), make=make)
    return {}


def run_rank(net: nn.Module, step: Step, closing: ExitStack) -> Quantities:
    """Runs the copy of a rank in a separate process group, which ends when ``closing`` does.

    If a rank raises, the end of that group wakes the ranks that wait in it, and the report of the
    error, in another group, can't be paired with one of their calls.
    """
    group = distributed.new_group(timeout=timeout_of(distributed.group.WORLD))
    closing.callback(_end, group, net)
    debug: Any = distributed  # types of these names are missing
    level = debug.get_debug_level()
    if level == debug.DebugLevel.OFF:
        # The ranks compare each call, so that one that only some of them make is named at once.
        debug.set_debug_level(debug.DebugLevel.INFO)
        closing.callback(debug.set_debug_level, level)
    rank, size = group.rank(), group.size()
    divisor = 1 if step.wrap is None else size
    with as_world(group):
        return record(net, step, f"rank {rank} of {size}", rank=rank, divisor=divisor)


def _end(group: Any, net: nn.Module) -> None:
    # torch remembers the groups of DTensors, such as the parameters of `fully_shard`, and uses
    # them again in later steps of the program.
    if not any(map(is_dtensor, net.parameters())):
        destroy_group(group)


@contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Makes ``group`` the default process group in a ``with`` block.

    With None, `torch.distributed` looks uninitialized.
    """
    if not distributed.is_available():
        yield
        return
    # Its functions keep what is the default group when they are defined, and DDP imports them.
    import_module("torch.distributed.nn")
    world = distributed.group.WORLD
    distributed.group.WORLD = group
    try:
        yield
    finally:
        distributed.group.WORLD = world
