"""Converts the `torch.nn.BatchNorm` layers of networks to synchronized ones, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn

from replication.data_parallel import DataParallel
from replication.errors import add_note, check_module, path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.processes import check_process_group
from replication.modules import with_class
from replication.patch import patch_replication_callback, runs_callbacks
from replication.warning import UnsynchronizedWarning, warn
from syncbn.batchnorm import CORRECTION, SynchronizedBatchNorm, check_group_size
from syncbn.kinds import (
    ATTRIBUTES,
    OLDER_ATTRIBUTES,
    PLAIN,
    Summary,
    counterpart,
    is_older,
    summary,
    synchronized_class,
    why_older_stays,
)

__all__ = ["convert_model", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Marks DataParallel objects that `revert_model` must change back.
_CONVERTED = "_converted_by_convert_model"

#: Attributes of a synchronized layer that a plain one does not have.
_OF_COPIES = ("group_size", "_process_group", "_layer_name")

#: The attribute of a layer in which `_replace` keeps what it has changed.
_RECORD = "_before_convert_model"


class _Before(NamedTuple):
    """The changes that `_replace` made to a layer."""

    kind: type[nn.Module]
    #: The former values of attributes that have other values in the new layer.
    changed: dict[str, Any]
    #: The names of attributes that only the new layer has.
    added: list[str]


def convert_model(
    module: ModuleT,
    group_size: int | None = None,
    process_group: Any = None,
    *,
    report: bool = False,
    classes: Mapping[type[Any], Callable[[Any], nn.Module]] | None = None,
) -> ModuleT:
    """Converts every `torch.nn.BatchNorm1d/2d/3d` in ``module`` to a synchronized layer, in place.

    Each layer remains the same object and only changes its class: parameters, buffers, hooks,
    flags, names and existing references to them all stay valid. Converting twice changes nothing.
    Also converted are:

    - `torch.nn.SyncBatchNorm`, which keeps its process group.
    - Layers of older toolkits (such as a vendored ``sync_batchnorm``), which lose their pipes.
    - ``BatchNormAct2d`` of timm, with its dropout and activation.
    - Layers of the classes in ``classes``.
    - A `torch.nn.DataParallel`, which becomes a `replication.DataParallel`. An object of a derived
      class gets the replication callback.

    A `replication.UnsynchronizedWarning` names the layers that stay unsynchronized, with the
    reason, or says that there is no layer to synchronize.

    >>> from torch import nn
    >>> from syncbn import SynchronizedBatchNorm2d, convert_model
    >>> net = convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(net[1]).__name__
    'SynchronizedBatchNorm2d'

    A batch norm of your own that does more needs a synchronized class that does the same:

    >>> class Activated(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         return super().forward(x).relu()
    >>> class SyncActivated(SynchronizedBatchNorm2d):
    ...     def forward(self, x):
    ...         return super().forward(x).relu()
    >>> layer = Activated(8)
    >>> _ = convert_model(layer, classes={Activated: lambda old: SyncActivated(old.num_features)})
    >>> type(layer).__name__
    'SyncActivated'

    Args:
        module: A layer, a network, or a DataParallel around one.
        group_size: If given, set on every synchronized layer, converted now or before (see
            `SynchronizedBatchNorm1d`).
        process_group: As ``group_size``.
        report: Whether to print the `syncbn.summary` of the result, instead of warning about
            layers that stay unsynchronized.
        classes: A function for each further class. It gets a layer of exactly this class and
            returns a new, synchronized layer with parameters, buffers and modules of the same
            names. The old layer gets the new layer's class, modules and own attributes. It keeps
            its parameters, buffers, hooks, flags, ``eps`` and momentum.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument has another type, or a function returns no new, synchronized layer.
        ValueError: ``group_size`` is less than 1, or the layer that a function returns has other
            parameters, buffers or modules.
    """
    check_module(module)
    check_group_size(group_size)
    if process_group is not None:
        check_process_group(process_group)
    # Before any change, so that an error leaves the module as it was.
    new_layers = _replacements(module, classes or {})
    corrected = []
    for path, layer in module.named_modules():
        if layer in new_layers:
            _replace(layer, new_layers[layer])
        elif _convert(layer):
            corrected.append(f"`{path_or_root(path)}`")
        if isinstance(layer, ReplicaAware):
            layer._layer_name = path or layer._layer_name
        if isinstance(layer, SynchronizedBatchNorm):
            if group_size is not None:
                layer.group_size = group_size
            if process_group is not None:
                layer.process_group = process_group
    if corrected:
        warn(
            "syncbn does not correct the bias of running statistics, as these layers of an older "
            f"toolkit did; for short runs, set layer.momentum = 0.1: {', '.join(corrected)}"
        )
    result = summary(module)
    if report:
        print(result)
    else:
        _warn_of_unsynchronized(module, result)
    return module


def _replacements(
    root: nn.Module, classes: Mapping[type[Any], Callable[[Any], nn.Module]]
) -> dict[Any, nn.Module]:
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


def _replacement(path: str, old: nn.Module, function: Callable[[Any], nn.Module]) -> nn.Module:
    where = f"the layer made for {with_class(path, old)}"
    try:
        new = function(old)
    except Exception as error:
        add_note(error, f"while convert_model asked for {where}")
        raise
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


def _replace(layer: nn.Module, new: nn.Module) -> None:
    """Gives ``layer`` the class, the modules and the attributes of ``new``."""
    # The layer keeps those of torch's layers, but for the modules inside it.
    attributes = vars(layer)
    others = {name: value for name, value in vars(new).items() if name not in ATTRIBUTES}
    changed = {name: attributes[name] for name in others if name in attributes}
    # `convert_model` sets the name later.
    added = [name for name in (*others, "_layer_name") if name not in attributes]
    before = _Before(type(layer), changed, added)
    layer.__class__ = type(new)
    attributes.update(others, _modules=new._modules, **{_RECORD: before})


def _convert(layer: nn.Module) -> bool:
    """Converts a layer or a DataParallel. Returns whether it corrected biases, as CSAIL's do."""
    if (synchronized := synchronized_class(type(layer))) is not None:
        process_group = vars(layer).pop("process_group", None)  # of a SyncBatchNorm
        layer.__class__ = synchronized
        if process_group is not None:
            layer.process_group = process_group
    elif is_older(layer) and not why_older_stays(layer):
        for name in OLDER_ATTRIBUTES:
            vars(layer).pop(name, None)
        layer.__class__ = counterpart(layer)
        correction = [layer._buffers.pop(name, None) for name in CORRECTION]
        return any(buffer is not None for buffer in correction)
    elif isinstance(layer, nn.DataParallel) and not runs_callbacks(type(layer)):
        if type(layer) is nn.DataParallel:
            layer.__class__ = DataParallel
        else:
            patch_replication_callback(layer)
        vars(layer)[_CONVERTED] = True
    return False


def _warn_of_unsynchronized(module: nn.Module, result: Summary) -> None:
    left_alone = [
        f"`{path_or_root(path)}` ({layer}, {kind.note})"
        for path, layer, kind in result.layers
        if kind.name == "left alone"
    ]
    if left_alone:
        warn(
            "convert_model converts registered layers of the classes torch.nn.BatchNorm1d, 2d and "
            f"3d only; these layers stay unsynchronized: {', '.join(left_alone)}",
            UnsynchronizedWarning,
        )
    elif not any(isinstance(m, ReplicaAware) or _CONVERTED in vars(m) for m in module.modules()):
        warn(
            f"convert_model found no batch norm in {type(module).__name__}; convert the model "
            "after its layers were made (summary(model) lists the layers that normalize)",
            UnsynchronizedWarning,
        )


def revert_model(module: ModuleT) -> ModuleT:
    """Undoes `convert_model`: converts synchronized layers in ``module`` to plain ones, in place.

    Layers and DataParallels get their former class back, but a layer of an older toolkit becomes
    one of torch's for its dimensions, because its pipes are gone. Other DataParallels stay as they
    are. Other synchronized layers of derived classes, parametrized ones included, stay
    synchronized, with a warning that names them.

    >>> from torch import nn
    >>> from syncbn import convert_model, revert_model
    >>> net = convert_model(nn.Sequential(nn.BatchNorm2d(8)))
    >>> type(revert_model(net)[0]).__name__
    'BatchNorm2d'

    Returns:
        ``module``, changed in place.
    """
    check_module(module)
    for layer in module.modules():
        _revert(layer)
    left_alone = [
        with_class(path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, SynchronizedBatchNorm)
    ]
    if left_alone:
        warn(f"these layers of other classes stay synchronized: {', '.join(left_alone)}")
    return module


def _revert(layer: Any) -> None:
    """Undoes `_convert`, or `_replace`."""
    attributes = vars(layer)
    before: _Before | None = attributes.pop(_RECORD, None)
    plain = PLAIN.get(type(layer))
    if attributes.pop(_CONVERTED, False):
        if type(layer) is DataParallel:
            layer.__class__ = nn.DataParallel  # type: ignore[assignment]
        else:
            patch_replication_callback(layer).remove()
    elif before is not None:
        layer.__class__ = before.kind
        for name in before.added:
            attributes.pop(name, None)
        attributes.update(before.changed)
    elif plain is not None:
        process_group = layer.process_group
        for name in _OF_COPIES:
            attributes.pop(name, None)
        layer.__class__ = plain
        if plain is nn.SyncBatchNorm:
            layer.process_group = process_group
