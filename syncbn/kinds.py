"""The kinds of layers: which are synchronized or can be, why others stay, and a table of them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from replication.callbacks import CALLBACK
from replication.diagnosis.table import ShownAsTable, Table
from replication.errors import check_module, path_or_root
from replication.patch import has_replication_callback
from replication.tree import leaves_of, open_builtin
from syncbn.batchnorm import (
    CORRECTION,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
)
from syncbn.timm import is_timm, synchronized_timm

__all__ = ["Summary", "summary"]

_BatchNorm = nn.modules.batchnorm._BatchNorm

SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNormNd,
}
PLAIN = {synchronized: plain for plain, synchronized in SYNCHRONIZED.items()}


def synchronized_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the synchronized counterpart of a class, or None if it has none."""
    return synchronized_timm(kind) if is_timm(kind) else SYNCHRONIZED.get(kind)


def plain_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Returns torch's or timm's class that ``kind`` takes the place of, or None."""
    plain = PLAIN.get(kind) or next(filter(is_timm, kind.__mro__), None)
    return plain if plain and synchronized_class(plain) is kind else None


_NAMES = {plain.__name__ for plain in SYNCHRONIZED}

#: Attributes that identify a layer of an older toolkit.
_OLDER_STATE = frozenset(("_sync_master", "_is_parallel", "_parallel_id", "_slave_pipe"))
#: Attributes of such a layer that a synchronized layer does not need.
OLDER_ATTRIBUTES = _OLDER_STATE | {"_moving_average_fraction"}

_BY_SAMPLE = (
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)

KindName = Literal["synchronized", "plain", "left alone", "by sample", "wrapper"]

_CONTAINERS = (list, tuple, dict)
_CONVERTIBLE = "convert_model synchronizes it"
#: How the notes on layers begin for which `convert_model` has ``classes``.
DERIVED = "derived from"
_PER_SAMPLE = "nothing to synchronize: works per sample"


class Kind(NamedTuple):
    """How a layer takes part in a synchronized network."""

    name: KindName
    #: The reason, or the consequence; may be empty.
    note: str = ""


def kind_of(module: nn.Module) -> Kind | None:
    """Returns the kind of a layer, or None if it neither normalizes nor runs replicas."""
    if isinstance(module, SynchronizedBatchNorm):
        return Kind("synchronized", _note_on(module))
    if synchronized_class(type(module)) is not None:
        return Kind("plain", _CONVERTIBLE)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and isinstance(module, _BatchNorm):
        return Kind("left alone", "lazy: call the network once before you convert it")
    if is_older(module):
        if reason := why_older_stays(module):
            return Kind("left alone", reason)
        return Kind("plain", f"of an older toolkit; {_CONVERTIBLE}")
    if isinstance(module, _BatchNorm):
        kind = type_before_parametrizations(module)
        if synchronized_class(kind) is not None:
            return Kind("left alone", "parametrized: convert before torch.nn.utils.parametrize")
        base = next(c.__name__ for c in kind.__mro__ if c.__module__.startswith("torch."))
        return Kind("left alone", f"{DERIVED} {base.lstrip('_')}, may compute anything")
    if isinstance(module, torch.jit.ScriptModule):
        name = class_name(module)
        note = f"a script of {name}: convert before torch.jit"
        return Kind("left alone", note) if name in _NAMES else None
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return Kind("left alone", "by sample, but its running statistics are the first replica's")
    if isinstance(module, _BY_SAMPLE):
        return Kind("by sample")
    if isinstance(module, nn.DataParallel):
        if not has_replication_callback(module):
            return Kind("wrapper", "does not connect copies: convert_model(model) makes it do so")
        if not module.device_ids:
            note = "makes no copies without an accelerator: DataParallel(net, ['cpu'] * n) does"
            return Kind("wrapper", note)
        return Kind("wrapper", "connects the copies of its layers")
    return None


def is_older(module: nn.Module) -> bool:
    """Returns whether a layer has pipes of its own, like batch norm of the older toolkits."""
    return isinstance(module, _BatchNorm) and vars(module).keys() >= _OLDER_STATE


def why_older_stays(layer: nn.Module) -> str:
    """Returns why a layer of an older toolkit can't be converted without loss, or ""."""
    kind = type(layer)
    classes = kind.__mro__[: kind.__mro__.index(_BatchNorm)]
    toolkit = next((c for c in classes if {CALLBACK, "forward"} <= vars(c).keys()), kind)
    own = _own_methods(layer, classes, toolkit) | _own_state(layer, toolkit)
    if not own and not counterpart(layer):
        own = {"class name (without 1d, 2d or 3d)"}
    if not own:
        return ""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "an unknown file"
    package = toolkit.__module__.removesuffix(".batchnorm")
    return (
        f"a layer of an older toolkit that has its own {', '.join(sorted(own))}: class "
        f"{kind.__qualname__} of {file}; syncbn.stand_in_for({package!r}), called before the "
        f"first import of {package}, makes its base class a synchronized one"
    )


def _own_methods(layer: nn.Module, classes: Sequence[type], toolkit: type) -> set[str]:
    """Returns what the classes of a layer define beyond the layers of older toolkits."""
    own = {"forward"} & vars(layer).keys()
    for kind in classes:
        names = {n for n, v in vars(kind).items() if callable(v) or n[:2] != "__"}
        if kind is toolkit:  # its class attributes and private methods may differ between copies
            names = {n for n in names if callable(vars(kind)[n]) and n[:1] != "_"} - {"forward"}
        if not kind.__module__.startswith("torch."):
            own |= names - {"__init__", "_check_input_dim", "extra_repr"}
    return own


def _own_state(layer: nn.Module, toolkit: type) -> set[str]:
    """Returns the attributes that matter and that neither batch norm nor older toolkits have."""
    # Plain attributes matter only if the forward reads them.
    read = getattr(getattr(vars(toolkit).get("forward"), "__code__", None), "co_names", ())
    state = {*layer._parameters, *layer._buffers, *layer._modules, *(vars(layer).keys() & read)}
    known = {*vars(_plain), *_plain._parameters, *_plain._buffers, *OLDER_ATTRIBUTES, *CORRECTION}
    return state - known


_plain = nn.BatchNorm2d(1, device="meta")


def counterpart(layer: nn.Module) -> type[nn.Module] | None:
    """Returns the synchronized class whose "1d", "2d" or "3d" is in a layer's class names."""
    names = " ".join(base.__name__ for base in type(layer).__mro__)
    found = re.search("[123]d", names, re.IGNORECASE)
    kinds = {plain.__name__[-2:]: kind for plain, kind in SYNCHRONIZED.items()}
    return kinds[found[0].lower()] if found else None


def out_of_sight(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each batch norm in a plain list, tuple or dict, with the path of the attribute."""
    modules = dict(root.named_modules())
    seen = set(modules.values())
    for path, module in modules.items():
        for name, value in vars(module).items():
            for leaf in leaves_of(value, open_builtin) if isinstance(value, _CONTAINERS) else ():
                for layer in leaf.modules() if isinstance(leaf, nn.Module) else ():
                    if isinstance(layer, _BatchNorm) and layer not in seen:
                        seen.add(layer)
                        yield f"{path}.{name}" if path else name, layer


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class, or of the class from which a script was made."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    return str(module.original_name) if is_script else type(module).__name__


def _note_on(layer: SynchronizedBatchNorm) -> str:
    notes = []
    if not layer.training:
        notes.append("in eval(): does not synchronize")
    if layer.group_size is not None:
        notes.append(f"in groups of {layer.group_size}")
    if layer.process_group is not None:
        notes.append("in a process group")
    return "; ".join(notes)


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
        rows: list[tuple[str, ...]] = [
            (f"`{path_or_root(path)}`", layer, kind.name, kind.note)
            for path, layer, kind in self.layers
            if kind.name != "by sample"
        ]
        by_sample = Counter(la.layer for la in self.layers if la.kind.name == "by sample")
        rows += [
            (f"({count} layer{'s' * (count > 1)})", layer, "by sample", _PER_SAMPLE)
            for layer, count in sorted(by_sample.items())
        ]
        if not rows:
            return Table((), (), ["No layer normalizes over the batch."])
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
    kinds = [(path, part, kind_of(part)) for path, part in module.named_modules()]
    hidden = Kind("left alone", "in a plain list or dict: use nn.ModuleList or nn.ModuleDict")
    kinds += [(path, layer, hidden) for path, layer in out_of_sight(module)]
    return Summary(
        tuple(
            LayerSummary(path, class_name(part), kind)
            for path, part, kind in kinds
            if kind is not None
        )
    )
