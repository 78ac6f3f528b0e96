"""Converts batch norm to synchronized layers, in place, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import starmap
from typing import Any, TypeVar

from torch import nn

from replication import (
    DataParallel,
    ReplicaAware,
    UnsynchronizedWarning,
    patch_replication_callback,
)
from replication.extending import (
    CALLBACK,
    as_process_group,
    check_methods,
    check_module,
    first_of,
    path_or_root,
    runs_callbacks,
    warn,
    with_class,
)
from syncbn.arguments import check_group_size
from syncbn.batchnorm import CORRECTION, SynchronizedBatchNorm
from syncbn.kinds import (
    DERIVED,
    PIPES,
    PLAIN_CLASS_OF,
    SYNCHRONIZED,
    Summary,
    counterpart_of,
    reaches_synchronized_forward,
    summary,
)

__all__ = ["convert_model", "revert_model"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: The attribute with the class that `revert_model` gives back, if `PLAIN_CLASS_OF` lacks it.
_FORMER = "_class_before_convert_model"


def convert_model(
    module: ModuleT,
    group_size: int | None = None,
    process_group: Any = None,
    *,
    report: bool = False,
    classes: Mapping[type[Any], type[nn.Module]] | None = None,
) -> ModuleT:
    """Converts every `torch.nn.BatchNorm1d/2d/3d` in ``module`` to a synchronized layer, in place.

    Each layer remains the same object and only changes its class: parameters, buffers, hooks,
    flags, names and existing references to them all stay valid. Converting twice is
    harmless. If the call raises, the model is unchanged. Also converted are:

    - `torch.nn.SyncBatchNorm`, which keeps its process group.
    - Layers of older toolkits (such as a vendored ``sync_batchnorm``), whose pipes are removed.
      CSAIL's layers also lose their bias correction, so set ``momentum = 0.1`` for short runs.
    - ``BatchNormAct2d`` and ``SyncBatchNormAct`` of timm, with their dropout and activation.
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

    Your own batch norm becomes synchronized with a second base class, if its forward calls
    ``super().forward``. Otherwise also write a forward in the synchronized class:

    >>> class Activated(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         return super().forward(x).relu()
    >>> class SyncActivated(Activated, SynchronizedBatchNorm2d):
    ...     pass
    >>> layer = convert_model(Activated(8), classes={Activated: SyncActivated})
    >>> type(layer).__name__
    'SyncActivated'

    Args:
        module: A layer, a network, or a DataParallel around one.
        group_size: If given, set on every synchronized layer, converted now or before (see
            `SynchronizedBatchNorm1d`).
        process_group: If given, set on every synchronized layer, like ``group_size``.
        report: Whether to print the `syncbn.summary` of the result, instead of warning about
            layers that stay unsynchronized.
        classes: The synchronized class for each further class. Layers of exactly this class get
            the synchronized one, whose constructor does not run, and keep all their attributes.
            For a class derived from `torch.nn.SyncBatchNorm`, or from a layer of an older toolkit,
            write one that is derived only from a layer of `syncbn`.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument has another type, or a DataParallel in ``module`` has its own
            method ``replicate`` or ``parallel_apply`` (see `patch_replication_callback`).
        ValueError: ``group_size`` is less than 1.
    """
    check_module(module)
    check_group_size(group_size)
    process_group = as_process_group(process_group)
    classes = {} if classes is None else classes
    if not isinstance(classes, Mapping) or not all(starmap(_is_synchronized_by, classes.items())):
        raise TypeError(
            "classes must be a dict of {class: synchronized class}, such as {Mine: SyncMine} with "
            "class SyncMine(Mine, SynchronizedBatchNorm2d): pass, in this order, if the forward "
            f"of Mine calls super().forward, or with its own forward (got {classes!r})"
        )
    layers: list[tuple[str, Any]] = list(module.named_modules())
    for _, layer in layers:
        if isinstance(layer, nn.DataParallel) and not runs_callbacks(type(layer)):
            check_methods(layer)
    uncorrected: list[str] = []
    for path, layer in layers:
        _convert(path, layer, classes, uncorrected)
        if isinstance(layer, ReplicaAware):
            layer._layer_name = path or layer._layer_name
        if isinstance(layer, SynchronizedBatchNorm):
            if group_size is not None:
                layer.group_size = group_size
            if process_group is not None:
                layer.process_group = process_group
    if uncorrected:
        warn(
            "syncbn does not correct the bias of running statistics, but these layers of an older "
            f"toolkit did; for short runs, set layer.momentum = 0.1: {first_of(uncorrected)}"
        )
    result = summary(module)
    if report:
        print(result)
    else:
        _warn_of_unsynchronized(module, result)
    return module


def _is_synchronized_by(old: Any, new: Any) -> bool:
    """Whether layers of a class can become layers of another class, which synchronizes them."""
    # The new class communicates, and its forward leads to the one that does.
    if not (isinstance(old, type) and isinstance(new, type) and issubclass(new, ReplicaAware)):
        return False
    if not reaches_synchronized_forward(new):
        return False
    # For a class that is converted without ``classes`` as well, a class derived from what it
    # becomes then: of the same number of dimensions.
    if old in SYNCHRONIZED:
        return issubclass(new, SYNCHRONIZED[old])
    # For a class with another synchronization, a layer of ours, in whatever order: the old forward
    # would come before the synchronized one if the new class were derived from both.
    if hasattr(old, CALLBACK) or issubclass(old, nn.SyncBatchNorm):
        return issubclass(new, SynchronizedBatchNorm)
    # For any other, a class derived from it, in front of the synchronized one, so that its forward
    # runs and calls the synchronized one by super.
    order: Any = new.__mro__
    return nn.Module in order and old in order[: order.index(ReplicaAware)]


def _convert(
    path: str, layer: Any, classes: Mapping[type[Any], type[nn.Module]], uncorrected: list[str]
) -> None:
    """Converts a layer or a DataParallel.

    Its path is added to ``uncorrected`` if a correction of the bias of running statistics is lost.
    """
    old = type(layer)
    new = classes.get(old) or counterpart_of(layer)
    if new is not None:
        process_group = vars(layer).pop("process_group", None)  # of a SyncBatchNorm
        layer.__class__ = new
        if vars(layer).keys() >= PIPES:
            for name in PIPES:
                del vars(layer)[name]
            buffers = layer._buffers
            vars(layer)["_buffers"] = {k: b for k, b in buffers.items() if k not in CORRECTION}
            if any(buffers.get(name) is not None for name in CORRECTION):
                uncorrected.append(f"`{path_or_root(path)}`")
            return
        if PLAIN_CLASS_OF.get(new) is not old:
            vars(layer).setdefault(_FORMER, old)
        if process_group is not None:
            layer.process_group = process_group
    elif isinstance(layer, nn.DataParallel) and not runs_callbacks(old):
        if old is nn.DataParallel:
            layer.__class__ = DataParallel
        else:
            patch_replication_callback(layer)
        vars(layer)[_FORMER] = old


def _warn_of_unsynchronized(module: nn.Module, result: Summary) -> None:
    left_alone = defaultdict(list)  # by class and reason
    for path, layer, kind in result.layers:
        if kind.name == "left alone":
            left_alone[layer, kind.note].append(path)
    if left_alone:
        lines = ["these layers stay unsynchronized:"]
        for (layer, note), paths in left_alone.items():
            named = first_of([f"`{path_or_root(path)}`" for path in paths])
            lines.append(f"  {named} ({layer}, {note})")
            if note.startswith(DERIVED):
                lines.append(
                    f"    with class Sync{layer}({layer}, syncbn.SynchronizedBatchNorm2d): pass "
                    f"(or 1d, 3d), if the forward of {layer} calls super().forward"
                )
        warn("\n".join(lines), UnsynchronizedWarning)
    elif not any(isinstance(m, ReplicaAware) or _FORMER in vars(m) for m in module.modules()):
        # Layers whose statistics and parameters are constants, as in the detectors of torchvision
        # and detectron2, have no class in common.
        layers = module.named_modules()
        frozen = [f"`{path}`" for path, m in layers if "FrozenBatchNorm" in type(m).__name__]
        found = f"convert_model found no batch norm in {type(module).__name__}"
        if frozen:
            found += f" that trains (got frozen layers: {first_of(frozen)}); leave them, or build"
            remedy = "the model with nn.BatchNorm2d, for example by norm_layer="
        else:
            found += "; convert the model"
            remedy = "after its layers were made"
        warn(f"{found} {remedy}", UnsynchronizedWarning)


def revert_model(module: ModuleT) -> ModuleT:
    """Undoes `convert_model`: converts synchronized layers in ``module`` to plain ones, in place.

    Layers and DataParallels get their former class back, with the same parameters and buffers. A
    layer of an older toolkit becomes one of torch's for its dimensions, as its pipes are gone. A
    DataParallel that `convert_model` did not convert stays as it is. Synchronized layers of
    derived classes that it did not make, parametrized ones included, stay synchronized, with a
    warning that names them. `SynchronizedBatchNormNd` becomes a `torch.nn.SyncBatchNorm`, as it
    was before: it trains only under `torch.distributed` on GPUs, and evaluates anywhere.

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
        warn(
            "revert_model could not revert these layers, which are still synchronized: "
            f"{first_of(left_alone)}"
        )
    return module


def _revert(layer: Any) -> None:
    former = vars(layer).pop(_FORMER, None) or PLAIN_CLASS_OF.get(type(layer))
    if former is not None:
        if isinstance(layer, ReplicaAware):
            process_group = layer.process_group
            for name in ("group_size", "_process_group", "_layer_name"):
                vars(layer).pop(name, None)
            if issubclass(former, nn.SyncBatchNorm):
                vars(layer)["process_group"] = process_group
        layer.__class__ = former
