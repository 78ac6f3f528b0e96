"""What ranks agree on in `verify`: what they pass, and whether one of them has raised.

Problem: a rank that raises before the others, or that passes something else, would leave them in a
collective that it never joins.

Idea: before the ranks compute together, each tells the others what it has, and afterwards whether
it has raised. So all of them go on, or all raise.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import chain

import torch
from torch import Tensor, nn

from replication._torch import is_dtensor
from replication.errors import ReplicationError, describe_error
from replication.groups.processes import ProcessGroup
from replication.modules import check_initialized
from replication.texts import listed
from replication.tree import flatten
from replication.verify.copies import Step
from replication.verify.quantities import Quantities, plain


def check_model(model: nn.Module, step: Step) -> None:
    """Raises if `verify` can't copy a model or use the targets, or no layer would communicate."""
    if step.targets is not None and step.loss is None:
        raise ValueError("targets are for a loss (got none); pass loss=f, for f(outputs, targets)")
    if any(map(is_dtensor, model.parameters())):
        raise TypeError(
            "expected a model that is not sharded (got parameters that are DTensors); pass it as "
            "it is before, and wrap=fully_shard"
        )
    if not any(module.training for module in model.modules()):
        raise ValueError("the model must be in training mode (got eval()); call model.train()")
    for path, layer in model.named_modules():
        check_initialized(path, layer)


@contextmanager
def all_or_none(group: ProcessGroup) -> Iterator[ExitStack]:
    """Raises on all ranks if a ``with`` block raises on one.

    The block registers in a stack what must end before a rank reports that it has raised.
    """
    own, when, text = None, 0.0, ""
    with ExitStack() as closing:
        try:
            yield closing
        except Exception as error:
            own, when, text = error, time.time(), describe_error(error)
            # Frees a DistributedDataParallel, which may hang if its group ends before.
            traceback.clear_frames(error.__traceback__)
            # Wakes the ranks that wait for this one. If none has raised, nothing may end before
            # all have reported, because another rank may still be connecting to this one.
            closing.close()
        reports = group.all_gather_object((when, group.rank, text))
    failed = sorted(report for report in reports if report[2])
    try:
        # The first is the origin, perhaps on all ranks. Later ones may only say that their
        # connections are closed.
        if own is not None and text == failed[0][2]:
            raise own
        if failed:
            what = "; ".join(f"rank {rank} raised {text}" for _, rank, text in failed)
            raise ReplicationError(f"verify ends on every rank, because {what}") from own
    finally:
        del own  # its traceback refers to this frame


def digests_of(model: nn.Module, step: Step, tolerance: float) -> dict[str, str]:
    """Returns a digest of each thing that must be the same on all ranks."""
    tensors = (*model.named_parameters(), *model.named_buffers())  # rank 0's values will be taken
    layouts = [(name, t.dtype, t.shape, t.device.type) for name, t in tensors]
    text = f"{model} {layouts} {[layer.training for layer in model.modules()]}"
    texts = {
        "model": re.sub(" at 0x[0-9a-f]+", "", text),  # addresses differ
        "options": f"{step.dtype} {tolerance} {step.loss is None} {step.wrap is None}",
    }
    for path, leaf in flatten({"batch": step.batch, "targets": step.targets})[0]:
        texts[f"`{path}`"] = type(leaf).__name__
        if isinstance(leaf, Tensor):
            texts[f"`{path}`"] = _digest(plain(leaf))
    return {name: blake2b(text.encode()).hexdigest() for name, text in texts.items()}


def check_equal(digests: Sequence[dict[str, str]]) -> None:
    """Raises ValueError unless the digests of all ranks are equal."""
    for name in dict.fromkeys(name for of_rank in digests for name in of_rank):
        of_name = [of_rank.get(name) for of_rank in digests]
        if others := [rank for rank, digest in enumerate(of_name) if digest != of_name[0]]:
            raise ValueError(
                f"every rank must pass the same {name} (got another on {listed(others, 'rank')} "
                "than on rank 0); verify splits the whole batch, and takes rank 0's parameters"
            )


def values_of(module: nn.Module) -> dict[str, str]:
    """Digests of the parameters and buffers of a module, by name."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: _digest(plain(tensor)) for name, tensor in tensors}


def _digest(values: Tensor) -> str:
    """Tells tensors apart: their bytes as integers, in two sums modulo 2**64.

    Cryptographic digests of the gradients of a network would take longer than its step.
    """
    flat = values.contiguous().flatten().view(torch.uint8)
    words = nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    places = 2 * torch.arange(len(words)) + 1  # odd, so that each bit counts
    sums = words.sum().item(), (words * places).sum().item()
    return f"{values.dtype} {tuple(values.shape)} {sums}"


def gathered(group: ProcessGroup, own: Quantities) -> Quantities:
    """Brings the parts of all quantities to rank 0, one quantity at a time.

    Most are gradients that the ranks have averaged. What is equal to rank 0's is not sent.
    """
    whole = Quantities()
    digests = {key: _digest(parts[group.rank]) for key, parts in own.items() if parts}
    of_ranks = group.all_gather_object(digests)
    for key in dict.fromkeys(chain(*group.all_gather_object(list(own)))):
        wanted = [rank for rank in range(group.size) if key in of_ranks[rank]]
        others = [r for r in wanted if r and of_ranks[r][key] != of_ranks[0].get(key)]
        sent = own.get(key, {}) if group.rank in others else {}
        parts = group.all_gather_object(sent) if others else [{}] * group.size
        if group.rank == 0:
            whole[key] = {
                rank: (parts[rank] or own[key])[rank if parts[rank] else 0] for rank in wanted
            }
    return whole
