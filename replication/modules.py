"""Walks over the modules of a network, and over the copies of each module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from replication.checks import check_module
from replication.texts import path_or_root

#: The path of a module, and its copies, one per replica.
CopiedLayer = tuple[str, tuple[nn.Module, ...]]


def layers_of(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the paths and modules of ``root.named_modules()``, in a tenth of the time."""
    layers: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        layer = pending.pop()
        path, module = layer
        if id(module) not in seen:
            seen.add(id(module))
            layers.append(layer)
            prefix = path and path + "."
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    pending.append((prefix + name, child))
    return layers


def check_initialized(path: str, layer: nn.Module) -> None:
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise RuntimeError(
            f"{with_class(path, layer)} has uninitialized parameters; initialize them first: run "
            "one batch through the module before it is replicated"
        )


def paired(modules: Sequence[nn.Module]) -> list[CopiedLayer]:
    """Returns each submodule with its copies, in the order of ``modules()``."""
    if not len(modules):
        raise ValueError("expected at least one copy of a module (got none)")
    for root in modules:
        check_module(root)
    layers = list(map(layers_of, modules))
    for copy_id, others in enumerate(layers):
        for first, other in zip_longest(layers[0], others, fillvalue=("", None)):
            # By name, because each copy of a `torch.fx.GraphModule` has its own class.
            if first[0] != other[0] or type(first[1]).__name__ != type(other[1]).__name__:
                raise ValueError(
                    "the copies must have the same submodules in the same order: where copy 0 has "
                    f"{with_class(*first)}, copy {copy_id} has {with_class(*other)}"
                )
    copies = zip(*[[module for _, module in column] for column in layers], strict=True)
    return list(zip([path for path, _ in layers[0]], copies, strict=True))


def with_class(path: str, module: nn.Module | None) -> str:
    return "none" if module is None else f"`{path_or_root(path)}` ({type(module).__name__})"
