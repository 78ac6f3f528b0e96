"""From `torch.nn.BatchNorm` layers to synchronized ones and back, losing nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from replication import DataParallel, ReplicaAware, patch_replication_callback
from replication.callback import has_replication_callback
from replication.checks import check_module
from replication.processes import check_process_group
from replication.wording import path_or_root
from syncbn.batchnorm import SynchronizedBatchNorm, check_group_size
from syncbn.layers import PLAIN, SYNCHRONIZED, kind_of
from syncbn.report import summary

__all__ = ["convert_model", "patch_sync_batchnorm", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Marks the DataParallel objects that `revert_model` has to change back.
_CONVERTED = "_converted_by_convert_model"


def convert_model(
    module: ModuleT,
    group_size: int | None = None,
    process_group: Any = None,
    *,
    report: bool = False,
) -> ModuleT:
    """Makes every `torch.nn.BatchNorm1d/2d/3d` in ``module`` a synchronized one, in place.

    `torch.nn.SyncBatchNorm` layers too, which keep their process group.

    The layers stay the objects they are and only change their class: parameters, buffers, hooks,
    flags, names, and whoever else refers to them see no difference. A `torch.nn.DataParallel`
    becomes a `replication.DataParallel` with the same devices, output device and dimension; one of
    a derived class is given the replication callback. Converting twice changes nothing.

    Each layer that talks, `replication.ReplicaAware` ones of other kinds included, notes its path
    in ``module``, for errors between processes.

    Layers of a class *derived* from batch norm, lazy ones included, may behave in any way; they
    are left alone, with a warning that names them (or with a report, that says why).

    >>> net = convert_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(net[1]).__name__
    'SynchronizedBatchNorm2d'

    Args:
        module: A layer, a network, or a DataParallel around one.
        group_size: If given, set on every synchronized layer, those that were so before included
            (see `SynchronizedBatchNorm1d`).
        process_group: The same.
        report: Whether to print what has become of each layer, instead of warning: the
            `syncbn.summary` of the result.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, ``group_size`` no int, or ``process_group`` none.
        ValueError: ``group_size`` is less than 1.
    """
    check_module(module)
    check_group_size(group_size)
    if process_group is not None:
        check_process_group(process_group)
    left_alone = []
    for path, submodule in module.named_modules():
        if type(submodule) in SYNCHRONIZED:
            own = submodule.__dict__.pop("process_group", None)  # of a SyncBatchNorm
            submodule.__class__ = SYNCHRONIZED[type(submodule)]
            if own is not None:
                submodule.process_group = own
        elif isinstance(submodule, nn.DataParallel) and not has_replication_callback(submodule):
            if type(submodule) is nn.DataParallel:
                submodule.__class__ = DataParallel
            else:
                patch_replication_callback(submodule)
            submodule.__dict__[_CONVERTED] = True
        elif (kind := kind_of(submodule)) is not None and kind.name == "left alone":
            name = type(submodule).__name__
            left_alone.append(f"`{path_or_root(path)}` ({name}, {kind.note})")
        if isinstance(submodule, ReplicaAware):
            submodule._layer_name = path or submodule._layer_name
        if isinstance(submodule, SynchronizedBatchNorm):
            if group_size is not None:
                submodule.group_size = group_size
            if process_group is not None:
                submodule.process_group = process_group
    if report:
        print(summary(module))
    elif left_alone:
        warnings.warn(
            "convert_model converts torch.nn.BatchNorm1d, 2d and 3d and no class derived from "
            f"batch norm; these layers stay unsynchronized: {', '.join(left_alone)}",
            stacklevel=2,
        )
    return module


def revert_model(module: ModuleT) -> ModuleT:
    """Undoes `convert_model`: makes every synchronized layer in ``module`` a plain one, in place.

    A DataParallel that `convert_model` has changed becomes what it was; others stay as they are.
    What was a `torch.nn.SyncBatchNorm` becomes one again. Synchronized layers of derived classes,
    parametrized ones included, stay what they are, with a warning that names them.

    Args:
        module: A layer or a network; it is changed itself, so give a copy to keep it.

    Returns:
        ``module``.
    """
    check_module(module)
    left_alone = []
    for path, submodule in module.named_modules():
        if type(submodule) in PLAIN:
            own = submodule.process_group
            submodule.__class__ = PLAIN[type(submodule)]
            for name in ("_first_warning", "group_size", "_process_group", "_layer_name"):
                submodule.__dict__.pop(name, None)
            if isinstance(submodule, nn.SyncBatchNorm):
                submodule.process_group = own
        elif isinstance(submodule, nn.DataParallel) and submodule.__dict__.pop(_CONVERTED, False):
            if type(submodule) is DataParallel:
                submodule.__class__ = nn.DataParallel  # type: ignore[assignment]
            else:
                patch_replication_callback(submodule).remove()
        elif isinstance(submodule, SynchronizedBatchNorm):
            left_alone.append(f"`{path_or_root(path)}` ({type(submodule).__name__})")
    if left_alone:
        warnings.warn(
            "revert_model reverts layers of the classes that convert_model makes; these stay "
            f"synchronized: {', '.join(left_alone)}",
            stacklevel=2,
        )
    return module


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Makes ``torch.nn.BatchNorm1d/2d/3d`` name the synchronized classes, for a while.

    For code that builds a network and cannot be changed::

        with patch_sync_batchnorm():
            net = build()

    It may be nested, and is undone when the block raises. It holds for the whole process, and
    where the code looks the names up in ``torch.nn``: a ``from torch.nn import BatchNorm2d`` that
    ran before keeps the plain class (`convert_model` converts those too).
    """
    names = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    before = {name: getattr(nn, name) for name in names}
    try:
        for plain, synchronized in SYNCHRONIZED.items():
            if plain.__name__ in names:
                setattr(nn, plain.__name__, synchronized)
        yield
    finally:
        for name, layer in before.items():
            setattr(nn, name, layer)
