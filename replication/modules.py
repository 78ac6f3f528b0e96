"""Walks over the modules of a network, and over the copies of each module."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from replication.errors import path_or_root

#: The path of one module, and its copies, one per replica.
Position = tuple[str, tuple[nn.Module, ...]]


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
    """Raises RuntimeError if a layer is lazy and has not been called."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise RuntimeError(
            f"`{path_or_root(path)}` ({type(layer).__name__}) has uninitialized parameters; "
            "initialize them first: run one batch through the module before it is replicated"
        )


def paired(modules: Sequence[nn.Module]) -> list[Position]:
    """Returns each submodule with its copies, in the order of ``modules()``."""
    roots = tuple(modules)
    if not roots:
        raise ValueError("expected at least one copy of a module (got none)")
    for index, root in enumerate(roots):
        if not isinstance(root, nn.Module):
            raise TypeError(f"copy {index} must be a module (got {type(root).__name__})")
    # By the id of copy 0's submodule. A submodule that it uses twice must be used twice in all.
    positions: dict[int, Position] = {}
    pending: list[Position] = [("", roots)]
    while pending:
        position = pending.pop()
        path, copies = position
        first = copies[0]
        known = positions.setdefault(id(first), position)
        if known is not position:
            if any(map(is_not, known[1], copies)):
                raise ValueError(f"the copies must match: they tie {label(position)} differently")
            continue
        names = list(first._modules)
        for copy_id, module in enumerate(copies):
            if type(module) is not type(first) or list(module._modules) != names:
                kinds = [f"{type(m).__name__}({', '.join(m._modules)})" for m in (first, module)]
                raise ValueError(
                    f"the copies must match: {label(position)} is {kinds[0]} in copy 0 but "
                    f"{kinds[1]} in copy {copy_id}"
                )
        for name in reversed(names):
            children = [module._modules[name] for module in copies]
            present = tuple(child for child in children if child is not None)
            child_path = f"{path}.{name}" if path else name
            if len(present) == len(copies):
                pending.append((child_path, present))
            elif present:
                raise ValueError(f"the copies must match: only some of them have `{child_path}`")
    return list(positions.values())


def label(position: Position) -> str:
    """Returns the path of a module for messages, or the class of the root, which has no path."""
    path, copies = position
    return f"`{path}`" if path else f"the root ({type(copies[0]).__name__})"
