"""Layers that take the place of others, made by a function of the user's.

The old layer stays the same object, with its parameters and buffers, and gets the class and the
attributes of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from replication.errors import path_or_root
from replication.groups.layer import ReplicaAware

#: Makes the synchronized layer for a layer.
Function = Callable[[Any], nn.Module]

#: The attribute with which `revert_replaced` undoes `replace`.
_RECORD = "_before_convert_model"

#: Attributes that the layer keeps. Of these, only the modules inside it are the new layer's.
_KEPT = vars(nn.BatchNorm2d(1, device="meta")).keys()


class _Before(NamedTuple):
    """What `replace` has changed of a layer."""

    kind: type[nn.Module]
    #: The former values of attributes that the new layer has otherwise.
    changed: dict[str, Any]
    #: Attributes that it did not have.
    added: list[str]


def replacements(root: nn.Module, classes: Mapping[type[Any], Function]) -> dict[Any, nn.Module]:
    """Returns the new layer for each layer of these classes, changing nothing, or raises."""
    if not isinstance(classes, Mapping) or not all(
        isinstance(kind, type) and issubclass(kind, nn.Module) and callable(function)
        for kind, function in classes.items()
    ):
        raise TypeError(
            "classes must be a dict of {class: function}, where the function gets a layer of the "
            f"class and returns the synchronized one (got {classes!r})"
        )
    olds = [(path, old) for path, old in root.named_modules() if type(old) in classes]
    return {old: _replacement(path, old, classes[type(old)]) for path, old in olds}


def _replacement(path: str, old: nn.Module, function: Function) -> nn.Module:
    new = function(old)
    where = f"the layer made for `{path_or_root(path)}` ({type(old).__name__})"
    if new is old or not (isinstance(new, nn.Module) and isinstance(new, ReplicaAware)):
        raise TypeError(
            f"{where} must be a new layer of a synchronized class, such as one derived from "
            f"SynchronizedBatchNorm2d (got {type(new).__name__})"
        )
    if (has := _parts(new)) != (expected := _parts(old)):
        raise ValueError(
            f"{where} must have the same parameters, buffers and modules (expected "
            f"{expected or 'none'}, got {has or 'none'})"
        )
    return new


def _parts(layer: nn.Module) -> dict[str, Any]:
    """Returns the shapes of parameters and buffers by name, and the names of modules."""
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    return {**dict.fromkeys(layer._modules, "module"), **shapes}


def replace(layer: nn.Module, new: nn.Module) -> None:
    """Gives ``layer`` the class, the modules and the attributes of ``new``."""
    attributes = vars(layer)
    others = {name: value for name, value in vars(new).items() if name not in _KEPT}
    changed = {name: attributes[name] for name in others if name in attributes}
    # `convert_model` sets the name later.
    added = [name for name in (*others, "_layer_name") if name not in attributes]
    before = _Before(type(layer), changed, added)
    layer.__class__ = type(new)
    attributes.update(others, _modules=new._modules, **{_RECORD: before})


def revert_replaced(layer: nn.Module) -> bool:
    """Undoes `replace`. Returns whether the layer was replaced."""
    attributes = vars(layer)
    before: _Before | None = attributes.pop(_RECORD, None)
    if before is not None:
        layer.__class__ = before.kind
        for name in before.added:
            attributes.pop(name, None)
        attributes.update(before.changed)
    return before is not None
