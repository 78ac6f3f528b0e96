"""Lists the normalizing layers of networks, and converts batch norm to synchronized and back."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import unwrap
from itertools import starmap
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from replication.callbacks import CALLBACK, runs_callbacks
from replication.data_parallel import DataParallel
from replication.diagnosis.table import ShownAsTable, Table
from replication.errors import check_module, first_of, path_or_root
from replication.groups.layer import ReplicaAware
from replication.groups.registry import as_process_group
from replication.modules import with_class
from replication.patch import check_methods, patch_replication_callback
from replication.tree import leaves_of, open_builtin
from replication.warning import UnsynchronizedWarning, warn
from syncbn.batchnorm import (
    CORRECTION,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
    check_group_size,
)

__all__ = ["Summary", "convert_model", "revert_model", "summary"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_BatchNorm = nn.modules.batchnorm._BatchNorm

#: The layers for 1, 2 and 3 dimensions.
LAYERS = (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)

#: The counterparts of torch's classes, and of timm's once a network uses it.
_SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNormNd,
}
PLAIN = {synchronized: plain for plain, synchronized in _SYNCHRONIZED.items()}
_NAMES = {plain.__name__ for plain in PLAIN.values()}

#: The attribute with the class that `revert_model` gives back, where `PLAIN` does not tell it.
_FORMER = "_class_before_convert_model"

#: Known by name, because this package does not import timm. timm makes the second of the first.
_TIMM = "timm.layers.norm_act"
_OF_TIMM = "BatchNormAct2d", "SyncBatchNormAct"


class _Activated(SynchronizedBatchNorm2d):
    """A synchronized `timm.layers.norm_act.BatchNormAct2d`."""

    def forward(self: Any, input: Tensor) -> Any:
        return self.act(self.drop(super().forward(input)))


def _synchronized_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the synchronized counterpart of a class, or None if it has none."""
    if kind.__module__ == _TIMM and kind.__qualname__ in _OF_TIMM:
        kind = import_module(_TIMM).BatchNormAct2d
        # Derived from timm's class: timm's functions, such as `freeze_batch_norm_2d`, would
        # otherwise take the layer for one without activation.
        if kind not in _SYNCHRONIZED:
            made = type("SynchronizedBatchNormAct2d", (_Activated, kind), {"__module__": __name__})
            _SYNCHRONIZED.setdefault(kind, made)  # another thread may have been faster
    return _SYNCHRONIZED.get(kind)


def __getattr__(name: str) -> Any:
    """Returns the counterpart of timm's class, which a pickled layer names."""
    if name != "SynchronizedBatchNormAct2d":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _synchronized_class(import_module(_TIMM).BatchNormAct2d)


#: The attributes that identify a layer of an older toolkit, and that a synchronized one lacks.
_PIPES = {"_sync_master", "_is_parallel", "_parallel_id", "_slave_pipe"}
#: The parameters and buffers of their own classes.
_STATE = {"weight", "bias", *CORRECTION}
_STATE |= {"running_mean", "running_var", "num_batches_tracked"}


def _is_of_toolkit(layer: nn.Module) -> bool:
    """Whether a layer is of an older toolkit's own classes, and has no more state than they."""
    foreign = "torch.", "builtins"
    modules = {c.__module__ for c in type(layer).__mro__ if not c.__module__.startswith(foreign)}
    state = {*layer._parameters, *layer._buffers, *layer._modules}
    return len(modules) == 1 and state <= _STATE and "forward" not in vars(layer)


KindName = Literal["synchronized", "plain", "left alone", "by sample", "wrapper"]

_InstanceNorm = nn.modules.instancenorm._InstanceNorm
_BY_SAMPLE = (_InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)


class Kind(NamedTuple):
    """How a layer takes part in a synchronized network."""

    name: KindName
    #: The reason, or the consequence; may be empty.
    note: str = ""


def _reaches_synchronized_forward(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is a synchronized one, or may call one by super."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            if issubclass(base, ReplicaAware):
                return True
            code = getattr(unwrap(vars(base)["forward"]), "__code__", None)
            if code is not None and "super" not in code.co_names:
                return False
    return False


def _kind_of(module: nn.Module) -> Kind | None:
    """Returns the kind of a layer, or None if it neither normalizes nor runs replicas."""
    kind = type(module)
    if isinstance(module, SynchronizedBatchNorm):
        if not _reaches_synchronized_forward(kind):
            return Kind("left alone", "its forward does not lead to the synchronized one")
        notes = {
            "in eval(): does not synchronize": not module.training,
            f"in groups of {module.group_size}": module.group_size is not None,
            "in a process group": module.process_group is not None,
        }
        return Kind("synchronized", "; ".join(note for note, applies in notes.items() if applies))
    if _synchronized_class(kind) is not None:
        return Kind("plain", "convert_model synchronizes it")
    if isinstance(module, _BatchNorm):
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return Kind("left alone", "lazy: call the network once before you convert it")
        name = kind.__name__
        is_older = hasattr(kind, CALLBACK) and vars(module).keys() >= _PIPES
        if is_older and _is_of_toolkit(module):
            return Kind("plain", "of an older toolkit; convert_model synchronizes it")
        if is_older or isinstance(module, nn.SyncBatchNorm):
            base = "a layer of an older toolkit" if is_older else "nn.SyncBatchNorm"
            note = f"derived from {base}: pass classes={{{name}: ...}} with a class derived from"
            return Kind("left alone", f"{note} SynchronizedBatchNorm{'2d' if is_older else 'Nd'}")
        if is_parametrized(module):
            return Kind("left alone", "parametrized: convert before torch.nn.utils.parametrize")
        return Kind("left alone", f"a derived class: pass classes={{{name}: Sync{name}}}")
    if isinstance(module, torch.jit.ScriptModule) and module.original_name in _NAMES:
        return Kind("left alone", f"a script of {module.original_name}: convert before torch.jit")
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return Kind("left alone", "by sample, but its running statistics are the first replica's")
    if isinstance(module, _BY_SAMPLE):
        return Kind("by sample", "nothing to synchronize: works per sample")
    if isinstance(module, nn.DataParallel):
        if not runs_callbacks(type(module)):
            return Kind("wrapper", "does not connect copies: convert_model(model) makes it do so")
        if not module.device_ids:
            note = "makes no copies without an accelerator: DataParallel(net, ['cpu'] * n) does"
            return Kind("wrapper", note)
        return Kind("wrapper", "connects the copies of its layers")
    # A class of its own, as CenterNet has. DistributedDataParallel has one device at most.
    devices = vars(module).get("device_ids")
    if isinstance(devices, (list, tuple)) and len(devices) > 1 and "module" in module._modules:
        note = "its copies are not connected: derive it from torch.nn.DataParallel, or use"
        return Kind("left alone", f"{note} replication.DataParallel")
    return None


def _out_of_sight(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each batch norm in a plain list, tuple or dict, with the path of the attribute."""
    seen = set(root.modules())
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            leaves = [leaf for leaf in leaves_of(value, open_builtin) if leaf is not value]
            for layer in (m for le in leaves if isinstance(le, nn.Module) for m in le.modules()):
                if isinstance(layer, _BatchNorm) and layer not in seen:
                    seen.add(layer)
                    yield f"{path}.{name}" if path else name, layer


class LayerSummary(NamedTuple):
    """A row of a `Summary`."""

    path: str
    layer: str
    kind: Kind


@dataclass(frozen=True, repr=False)
class Summary(ShownAsTable):
    """The result of `summary`. It prints as a table, and shows as a table in a notebook.

    Attributes:
        layers: All layers that normalize or run replicas, in the order of ``named_modules()``.
            Each has a ``path``, ``layer`` (the name of its class), and ``kind``, whose ``name`` is
            ``"synchronized"``, ``"plain"`` (not converted), ``"left alone"``, ``"by sample"``
            (nothing to synchronize), or ``"wrapper"``, and whose ``note`` gives the reason.
    """

    layers: tuple[LayerSummary, ...]

    def paths(self, kind: KindName) -> list[str]:
        """Returns the paths of all layers of one kind."""
        if kind not in get_args(KindName):
            raise ValueError(f"expected a kind of {get_args(KindName)} (got {kind!r})")
        return [layer.path for layer in self.layers if layer.kind.name == kind]

    def _table(self) -> Table:
        if not self.layers:
            return Table((), (), ["No layer normalizes over the batch."])
        rows = [
            (f"`{path_or_root(path)}`", layer, *kind)
            for path, layer, kind in self.layers
            if kind.name != "by sample"
        ]
        by_sample = Counter(row[1:] for row in self.layers if row.kind.name == "by sample")
        rows += [
            (f"({count} layer{'s' * (count > 1)})", layer, *kind)
            for (layer, kind), count in sorted(by_sample.items())
        ]
        counts = Counter(layer.kind.name for layer in self.layers)
        total = (
            f"{counts['synchronized']} synchronized, {counts['plain']} not converted, "
            f"{counts['left alone']} left alone."
        )
        return Table(("path", "layer", "status", "note"), rows, after=[total])


def summary(module: nn.Module) -> Summary:
    """Lists the layers of a network that normalize, and shows which of them are synchronized.

    Layers in plain lists, tuples and dicts are listed under the path of the attribute: neither
    `convert_model` nor replication finds them.

    >>> from torch import nn
    >>> from syncbn import convert_model, summary
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8))
    >>> print(summary(convert_model(net)))
    path       layer                    status        note
    `1`        SynchronizedBatchNorm2d  synchronized
    (1 layer)  GroupNorm                by sample     nothing to synchronize: works per sample
    1 synchronized, 0 not converted, 0 left alone.

    Args:
        module: A layer or a network, converted or not, wrapped or not.
    """
    check_module(module)
    kinds = [(path, part, _kind_of(part)) for path, part in module.named_modules()]
    hidden = Kind("left alone", "in a plain list or dict: use nn.ModuleList or nn.ModuleDict")
    kinds += [(path, layer, hidden) for path, layer in _out_of_sight(module)]
    rows = [LayerSummary(path, type(part).__name__, kind) for path, part, kind in kinds if kind]
    return Summary(tuple(rows))


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
    flags, names and existing references to them all stay valid. Converting twice changes nothing,
    and neither does a call that is refused or interrupted. Also converted are:

    - `torch.nn.SyncBatchNorm`, which keeps its process group.
    - Layers of older toolkits (such as a vendored ``sync_batchnorm``), which lose their pipes.
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

    A batch norm of your own becomes synchronized with a second base class, if its forward calls
    ``super().forward``. Otherwise write the forward anew in the synchronized class:

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
        process_group: As ``group_size``.
        report: Whether to print the `syncbn.summary` of the result, instead of warning about
            layers that stay unsynchronized.
        classes: The synchronized class for each further class. Layers of exactly this class get
            the synchronized one, whose constructor does not run, and keep all their attributes.
            For a class derived from `torch.nn.SyncBatchNorm`, or from a layer of an older toolkit,
            write one that is derived from a layer of ours alone.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument has another type, or a DataParallel in ``module`` has a method
            ``replicate`` or ``parallel_apply`` of its own (see `patch_replication_callback`).
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
            f"of Mine calls super().forward, or with a forward of its own (got {classes!r})"
        )
    corrected = []

    def convert(path: str, layer: Any) -> None:
        if _convert(layer, classes):
            corrected.append(f"`{path_or_root(path)}`")
        if isinstance(layer, ReplicaAware):
            layer._layer_name = path or layer._layer_name
        if isinstance(layer, SynchronizedBatchNorm):
            if group_size is not None:
                layer.group_size = group_size
            if process_group is not None:
                layer.process_group = process_group

    _change_all_or_none(module, convert)
    if corrected:
        warn(
            "syncbn does not correct the bias of running statistics, as these layers of an older "
            f"toolkit did; for short runs, set layer.momentum = 0.1: {first_of(corrected)}"
        )
    result = summary(module)
    if report:
        print(result)
    else:
        _warn_of_unsynchronized(module, result)
    return module


def _change_all_or_none(module: nn.Module, change: Callable[[str, Any], None]) -> None:
    """Changes all layers, with their paths. If that raises, or is interrupted, undoes it."""
    layers = list(module.named_modules())
    before = [(layer, type(layer), vars(layer).copy()) for _, layer in layers]
    try:
        for path, layer in layers:
            change(path, layer)
    except BaseException:
        for layer, kind, attributes in before:
            object.__setattr__(layer, "__class__", kind)
            object.__setattr__(layer, "__dict__", attributes)
        raise


def _is_synchronized_by(old: Any, new: Any) -> bool:
    """Whether layers of a class can become layers of another class, which synchronizes them."""
    if not (isinstance(old, type) and isinstance(new, type) and issubclass(new, ReplicaAware)):
        return False
    if not _reaches_synchronized_forward(new):
        return False
    if old in _SYNCHRONIZED:
        return issubclass(new, _SYNCHRONIZED[old])
    # The forwards of older toolkits and of `nn.SyncBatchNorm` would come before ours.
    if hasattr(old, CALLBACK) or issubclass(old, nn.SyncBatchNorm):
        return issubclass(new, SynchronizedBatchNorm)
    order: Any = new.__mro__
    return nn.Module in order and old in order[: order.index(ReplicaAware)]


def _convert(layer: Any, classes: Mapping[type[Any], type[nn.Module]]) -> bool:
    """Converts a layer or a DataParallel. Returns whether it corrected biases, as CSAIL's do."""
    old, kind = type(layer), _kind_of(layer)
    new = classes.get(old) or _synchronized_class(old)
    if new is None and kind is not None and kind.name == "plain":  # of an older toolkit
        # The "1d", "2d" or "3d" in the names of its classes.
        names = " ".join(base.__name__ for base in old.__mro__)
        found = re.search("[123](?=d)", names, re.IGNORECASE)
        new = LAYERS[int(found[0]) - 1] if found else SynchronizedBatchNormNd
    if new is not None:
        process_group = vars(layer).pop("process_group", None)  # of a SyncBatchNorm
        layer.__class__ = new
        if vars(layer).keys() >= _PIPES:
            for name in _PIPES:
                del vars(layer)[name]
            buffers = layer._buffers
            vars(layer)["_buffers"] = {k: b for k, b in buffers.items() if k not in CORRECTION}
            return any(buffers.get(name) is not None for name in CORRECTION)
        if PLAIN.get(new) is not old:
            vars(layer).setdefault(_FORMER, old)
        if process_group is not None:
            layer.process_group = process_group
    elif isinstance(layer, nn.DataParallel) and not runs_callbacks(old):
        if old is nn.DataParallel:
            check_methods(layer)
            layer.__class__ = DataParallel
        else:
            patch_replication_callback(layer)
        vars(layer)[_FORMER] = old
    return False


def _warn_of_unsynchronized(module: nn.Module, result: Summary) -> None:
    left_alone = defaultdict(list)  # by class and reason
    for path, layer, kind in result.layers:
        if kind.name == "left alone":
            left_alone[f"({layer}, {kind.note})"].append(f"`{path_or_root(path)}`")
    if left_alone:
        text = ", ".join(f"{first_of(paths)} {why}" for why, paths in left_alone.items())
        if "a derived class" in text:
            text += (
                "; class SyncX(X, syncbn.SynchronizedBatchNorm2d): pass defines SyncX, if the "
                "forward of X calls super().forward"
            )
        warn(
            "convert_model converts registered layers of the classes torch.nn.BatchNorm1d, 2d and "
            f"3d only; these layers stay unsynchronized: {text}",
            UnsynchronizedWarning,
        )
    elif not any(isinstance(m, ReplicaAware) or _FORMER in vars(m) for m in module.modules()):
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
    _change_all_or_none(module, _revert)
    left_alone = [
        with_class(path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, SynchronizedBatchNorm)
    ]
    if left_alone:
        warn(f"these layers of other classes stay synchronized: {first_of(left_alone)}")
    return module


def _revert(path: str, layer: Any) -> None:
    former = vars(layer).pop(_FORMER, None) or PLAIN.get(type(layer))
    if former is not None:
        process_group = None
        if isinstance(layer, ReplicaAware):
            process_group = layer.process_group
            for name in ("group_size", "_process_group", "_layer_name"):
                vars(layer).pop(name, None)
        layer.__class__ = former
        if issubclass(former, nn.SyncBatchNorm):
            layer.process_group = process_group
