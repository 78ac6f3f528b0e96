"""Layers that take the place of others, made by a function of the user's.

The old layer stays the same object. It gets the class and the attributes of the new layer, and
keeps its parameters, its buffers and everything else that every batch norm or module has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from replication import ReplicaAware
from replication.errors import path_or_root

#: Makes the synchronized layer for a layer.
Function = Callable[[Any], nn.Module]

#: The attribute with which `revert_replaced` undoes `replace`.
_RECORD = "_before_convert_model"

#: Attributes that the layer keeps. Of these, only the modules inside it are the new layer's.
_KEPT = vars(nn.BatchNorm2d(1, device="meta")).keys()


class _Before(NamedTuple):
    kind: type[nn.Module]
    #: Attributes that the new layer has otherwise.
    changed: dict[str, Any]
    #: Attributes that only the new layer has.
    added: list[str]


def check_classes(classes: Mapping[type[Any], Function]) -> None:
    """Raises TypeError unless ``classes`` maps classes of modules to functions."""
    if not isinstance(classes, Mapping):
        raise TypeError(f"classes must be a dict of {{class: function}} (got {classes!r})")
    for kind, function in classes.items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module) and callable(function)):
            raise TypeError(
                "classes must map classes of modules to functions that get a layer and return "
                f"the synchronized one (got {kind!r}: {function!r})"
            )


def replacements(
    root: nn.Module, classes: Mapping[type[Any], Function]
) -> dict[nn.Module, nn.Module]:
    """Returns the new layer for each layer of these classes, and changes nothing.

    Raises:
        TypeError: A function does not return a new layer that is a `ReplicaAware` module.
        ValueError: The new layer would not have all that the old one has.
    """
    result = {}
    for path, old in root.named_modules():
        function = classes.get(type(old))
        if function is not None:
            where = f"the layer made for `{path_or_root(path)}` ({type(old).__name__})"
            result[old] = new = function(old)
            if new is old or not (isinstance(new, nn.Module) and isinstance(new, ReplicaAware)):
                raise TypeError(
                    f"{where} must be a new layer of a synchronized class, such as one derived "
                    f"from SynchronizedBatchNorm2d (got {type(new).__name__})"
                )
            for kind, has, should_have in (
                ("parameters and buffers", _shapes(new), _shapes(old)),
                ("modules", set(new._modules), set(old._modules)),
            ):
                if has != should_have:
                    raise ValueError(
                        f"{where} must have the same {kind} (expected {should_have or 'none'}, "
                        f"got {has or 'none'})"
                    )
    return result


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}


def replace(layer: nn.Module, new: nn.Module) -> None:
    """Makes ``layer`` what ``new`` is."""
    attributes = vars(layer)
    others = {name: value for name, value in vars(new).items() if name not in _KEPT}
    changed = {name: attributes[name] for name in others if name in attributes}
    added = [name for name in others if name not in attributes]
    before = _Before(type(layer), changed, added)
    layer.__class__ = type(new)
    attributes.update(others, _modules=new._modules, **{_RECORD: before})


def revert_replaced(layer: nn.Module) -> bool:
    """Undoes `replace`. Returns whether the layer was replaced."""
    attributes = vars(layer)
    before: _Before | None = attributes.pop(_RECORD, None)
    if before is None:
        return False
    layer.__class__ = before.kind
    for name in before.added:
        attributes.pop(name, None)
    attributes.update(before.changed)
    return True
