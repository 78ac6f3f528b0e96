"""Converts the `torch.nn.BatchNorm` layers of networks to synchronized ones, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from replication.data_parallel import DataParallel
from replication.devices import check_module
from replication.errors import path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.processes import check_process_group
from replication.patch import has_replication_callback, patch_replication_callback
from replication.sync.rendezvous import RenewedLock
from replication.warning import UnsynchronizedWarning, warn
from syncbn.batchnorm import CORRECTION, SynchronizedBatchNorm, check_group_size
from syncbn.kinds import (
    OLDER_ATTRIBUTES,
    SYNCHRONIZED,
    counterpart,
    is_derived,
    is_older,
    plain_class,
    summary,
    synchronized_class,
    why_older_stays,
)
from syncbn.replacement import check_classes, replace, replacements, revert_replaced

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Marks DataParallel objects that `revert_model` must change back.
_CONVERTED = "_converted_by_convert_model"


#: Attributes of a synchronized layer that a plain one does not have.
_OF_COPIES = ("group_size", "_process_group", "_layer_name")


def convert_model(
    module: ModuleT,
    group_size: int | None = None,
    process_group: Any = None,
    *,
    report: bool = False,
    classes: Mapping[type[Any], Callable[[Any], nn.Module]] | None = None,
) -> ModuleT:
    """Converts every `torch.nn.BatchNorm1d/2d/3d` in ``module`` to a synchronized layer, in place.

    `torch.nn.SyncBatchNorm` layers are converted as well and keep their process group. Layers of
    older toolkits (such as `SynchronizedBatchNorm2d` of a vendored ``sync_batchnorm``) are
    converted and lose their pipes. They keep ``eps``, momentum, parameters and running statistics.
    So is ``BatchNormAct2d`` of timm, with its dropout and activation. Pass ``classes`` for layers
    of other classes.

    Each layer remains the same object and only changes its class: parameters, buffers, hooks,
    flags, names and existing references to them all stay valid. A `torch.nn.DataParallel` becomes
    a `replication.DataParallel` with the same devices, output device and dimension. An object of
    a derived class gets the replication callback. Converting twice changes nothing.

    Each synchronized or other `replication.ReplicaAware` layer records its path in ``module`` for
    errors between processes.

    A `replication.UnsynchronizedWarning` names the layers that stay unsynchronized: layers of
    another class *derived* from batch norm, which may compute anything, lazy layers, and layers in
    plain lists or dicts, which replication does not find either. A model without any layer to
    synchronize also raises a warning.

    >>> from torch import nn
    >>> from syncbn import convert_model
    >>> net = convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(net[1]).__name__
    'SynchronizedBatchNorm2d'

    A batch norm of your own that does more needs a synchronized class that does the same:

    >>> class Activated(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         return super().forward(x).relu()
    >>> from syncbn import SynchronizedBatchNorm2d
    >>> class SyncActivated(SynchronizedBatchNorm2d):
    ...     def forward(self, x):
    ...         return super().forward(x).relu()
    >>> layer = Activated(8)
    >>> _ = convert_model(layer, classes={Activated: lambda old: SyncActivated(old.num_features)})
    >>> type(layer).__name__
    'SyncActivated'

    Args:
        module: A layer, a network, or a DataParallel around one.
        group_size: If given, set on every synchronized layer, including layers that were
            synchronized before (see `SynchronizedBatchNorm1d`).
        process_group: As ``group_size``.
        report: Whether to print the `syncbn.summary` of the result, with a line per layer,
            instead of warning about layers that stay unsynchronized.
        classes: A function for each further class. It gets a layer of exactly this class and
            returns a new, synchronized layer with parameters, buffers and modules of the same
            names. The old layer gets the new layer's class, modules and own attributes. It keeps
            its parameters, buffers, hooks, flags, ``eps`` and momentum.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not a module, ``group_size`` is not an int, ``process_group`` is
            not a ProcessGroup, ``classes`` does not map classes to functions, or a function does
            not return a synchronized layer.
        ValueError: ``group_size`` is less than 1, or the layer that a function returns has other
            parameters, buffers or modules.
    """
    check_module(module)
    check_group_size(group_size)
    check_classes(classes or {})
    if process_group is not None:
        check_process_group(process_group)
    # Before any change, so that an error leaves the module as it was.
    new_layers = replacements(module, classes or {})
    corrected = []
    has_copies = False  # whether anything in the module knows its copies
    for path, submodule in module.named_modules():
        if submodule in new_layers:
            replace(submodule, new_layers[submodule])
        elif (synchronized := synchronized_class(type(submodule))) is not None:
            former_group = submodule.__dict__.pop("process_group", None)  # of a SyncBatchNorm
            submodule.__class__ = synchronized
            if former_group is not None:
                submodule.process_group = former_group
        elif is_older(submodule) and not why_older_stays(submodule):
            if _convert_older(submodule):
                corrected.append(f"`{path_or_root(path)}`")
        elif isinstance(submodule, nn.DataParallel) and not has_replication_callback(submodule):
            if type(submodule) is nn.DataParallel:
                submodule.__class__ = DataParallel
            else:
                patch_replication_callback(submodule)
            submodule.__dict__[_CONVERTED] = True
            has_copies = True
        if isinstance(submodule, ReplicaAware):
            submodule._layer_name = path or submodule._layer_name
            has_copies = True
        if isinstance(submodule, SynchronizedBatchNorm):
            if group_size is not None:
                submodule.group_size = group_size
            if process_group is not None:
                submodule.process_group = process_group
    if corrected:
        warn(
            "syncbn does not correct the bias of running statistics, as these layers of an older "
            "toolkit did: with a small momentum, the statistics stay near their initial values in "
            "the first steps; set layer.momentum = 0.1 for short training runs: "
            f"{', '.join(corrected)}"
        )
    result = summary(module)
    if report:
        print(result)
        return module
    left_alone = [
        f"`{path_or_root(path)}` ({layer}, {kind.note})"
        for path, layer, kind in result.layers
        if kind.name == "left alone"
    ]
    if left_alone:
        warn(
            "convert_model converts registered layers of the classes torch.nn.BatchNorm1d, 2d and "
            f"3d only; these layers stay unsynchronized: {', '.join(left_alone)}"
            f"{_advice(module)}",
            UnsynchronizedWarning,
        )
    elif not has_copies:
        warn(
            f"convert_model found no batch norm in {type(module).__name__}, so nothing is "
            "synchronized; convert the model after its layers were made (summary(model) lists "
            "the layers that normalize)",
            UnsynchronizedWarning,
        )
    return module


def _advice(module: nn.Module) -> str:
    """Returns the line to write for layers of derived classes, if there are any."""
    kinds = {type(m): None for m in module.modules() if is_derived(m)}
    if not kinds:
        return ""
    pairs = ", ".join(f"{kind.__name__}: synchronized" for kind in kinds)
    return (
        f"; convert_model(net, classes={{{pairs}}}) converts the derived ones, where "
        "synchronized(layer) returns a layer of a class derived from SynchronizedBatchNorm2d "
        "that computes the same"
    )


def _convert_older(layer: nn.Module) -> bool:
    """Converts a layer of an older toolkit. Returns whether it corrected biases."""
    synchronized = counterpart(layer)
    assert synchronized is not None  # otherwise `why_older_stays` has a reason
    for name in OLDER_ATTRIBUTES:
        layer.__dict__.pop(name, None)
    correction = [layer._buffers.pop(name, None) for name in CORRECTION]
    layer.__class__ = synchronized
    return any(buffer is not None for buffer in correction)


def revert_model(module: ModuleT) -> ModuleT:
    """Undoes `convert_model`: converts synchronized layers in ``module`` to plain ones, in place.

    A DataParallel that `convert_model` has changed gets its class back. Others stay as they are.
    A former `torch.nn.SyncBatchNorm` becomes one again. A former layer of an older toolkit becomes
    a `torch.nn.BatchNorm1d`, ``2d`` or ``3d``, because its pipes are gone. Layers that were
    converted by ``classes`` get their class and attributes back. Other synchronized layers of
    derived classes, parametrized ones included, stay synchronized, with a warning that names them.

    >>> from torch import nn
    >>> from syncbn import convert_model, revert_model
    >>> net = convert_model(nn.Sequential(nn.BatchNorm2d(8)))
    >>> type(revert_model(net)[0]).__name__
    'BatchNorm2d'

    Args:
        module: A layer or a network, changed in place. Pass a copy to keep it.

    Returns:
        ``module``.
    """
    check_module(module)
    left_alone = []
    for path, submodule in module.named_modules():
        if revert_replaced(submodule):
            for name in _OF_COPIES:
                submodule.__dict__.pop(name, None)
        elif (plain := plain_class(type(submodule))) is not None:
            process_group = submodule.process_group
            submodule.__class__ = plain
            for name in _OF_COPIES:
                submodule.__dict__.pop(name, None)
            if isinstance(submodule, nn.SyncBatchNorm):
                submodule.process_group = process_group
        elif isinstance(submodule, nn.DataParallel) and submodule.__dict__.pop(_CONVERTED, False):
            if type(submodule) is DataParallel:
                submodule.__class__ = nn.DataParallel  # type: ignore[assignment]
            else:
                patch_replication_callback(submodule).remove()
        elif isinstance(submodule, SynchronizedBatchNorm):
            left_alone.append(f"`{path_or_root(path)}` ({type(submodule).__name__})")
    if left_alone:
        warn(
            "revert_model reverts layers of the classes that convert_model makes; these stay "
            f"synchronized: {', '.join(left_alone)}"
        )
    return module


_NAMES = {plain.__name__: plain for plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)}

#: The classes that ``torch.nn`` had before each open block of `patch_sync_batchnorm`.
_blocks: list[dict[str, Any]] = []
_changing_names = RenewedLock()


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Replaces ``torch.nn.BatchNorm1d/2d/3d`` by the synchronized classes inside the block.

    Use it for model code that you cannot edit.

    The patch applies to the whole process. Blocks may be nested, and blocks of several threads may
    overlap: the plain classes are back when the last block ends, also after an error. A class that
    other code assigns inside the block stays.

    Only code that looks the names up in ``torch.nn`` sees the patch. A ``from torch.nn import
    BatchNorm2d`` that ran before keeps the plain class; use `convert_model` on the network.

    >>> from torch import nn
    >>> from syncbn import patch_sync_batchnorm
    >>> with patch_sync_batchnorm():
    ...     net = nn.Sequential(nn.BatchNorm2d(8))
    >>> type(net[0]).__name__
    'SynchronizedBatchNorm2d'
    """
    block: dict[str, Any] = {}
    try:
        with _changing_names():
            block.update((name, getattr(nn, name)) for name in _NAMES)
            _blocks.append(block)
            for name, plain in _NAMES.items():
                setattr(nn, name, SYNCHRONIZED[plain])
        yield
    finally:
        with _changing_names():
            _close(block)


def _close(block: dict[str, Any]) -> None:
    """Passes the classes that a block replaced to the next open block, or back to ``torch.nn``."""
    index = next((i for i, other in enumerate(_blocks) if other is block), len(_blocks))
    del _blocks[index : index + 1]  # not there if an interrupt came first
    following: dict[str, Any] = _blocks[index] if index < len(_blocks) else vars(nn)
    for name, replaced in block.items():
        if following[name] is SYNCHRONIZED[_NAMES[name]]:  # otherwise other code has assigned it
            following[name] = replaced
