"""Warns of plain batch norm that trains in several replicas."""

from __future__ import annotations

from torch import nn

from replication.warning import UnsynchronizedWarning, once_for, warn
from replication.wording import path_or_root

__all__: list[str] = []

#: Captured here, as programs put other classes under these names.
_PLAIN = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))

#: The number of layers that the warning names.
_NAMED = 3


def warn_of_plain_batch_norm(model: nn.Module, module: nn.Module) -> None:
    """Warns once for each ``model`` if plain batch norm in its ``module`` is about to train.

    Called in each forward, before there are replicas.
    """
    if not _trains_plain_batch_norm(module) or not once_for(model)():
        return
    paths = [
        f"`{path_or_root(path)}` ({type(layer).__name__})"
        for path, layer in module.named_modules()
        if layer.training and type(layer) in _PLAIN
    ]
    others = len(paths) - _NAMED
    warn(
        "each replica normalizes over its own part of the batch in "
        f"{', '.join(paths[:_NAMED])}{f' and {others} more' if others > 0 else ''}; "
        "syncbn.convert_model(model) makes them use the whole batch, or filter "
        "replication.UnsynchronizedWarning",
        UnsynchronizedWarning,
    )


def _trains_plain_batch_norm(module: nn.Module) -> bool:
    pending, seen = [module], {id(module)}
    while pending:  # several times faster than `modules()`
        layer = pending.pop()
        if type(layer) in _PLAIN and layer.training:
            return True
        for child in layer._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return False
