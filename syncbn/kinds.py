"""The kinds of layers: which are synchronized or can be, why others stay, and a table of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import unwrap
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from replication.callbacks import CALLBACK
from replication.diagnosis.table import ShownAsTable, Table
from replication.errors import check_module, path_or_root
from replication.patch import runs_callbacks
from replication.tree import leaves_of, open_builtin
from syncbn.batchnorm import (
    CORRECTION,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
)

__all__ = ["Summary", "summary"]

_BatchNorm = nn.modules.batchnorm._BatchNorm

#: The counterparts of torch's classes, and of timm's once a network uses it.
SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNormNd,
}
_NAMES = {kind.__name__ for kind in SYNCHRONIZED}
PLAIN = {synchronized: plain for plain, synchronized in SYNCHRONIZED.items()}

#: Known by name, because this package does not import timm.
_TIMM = "timm.layers.norm_act", "BatchNormAct2d"


def synchronized_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the synchronized counterpart of a class, or None if it has none."""
    if kind not in SYNCHRONIZED and (kind.__module__, kind.__qualname__) == _TIMM:
        # Derived from timm's class: timm's functions, such as `freeze_batch_norm_2d`, would
        # otherwise take the layer for one without activation.
        namespace = {"__module__": __name__, "__doc__": f"A synchronized `{'.'.join(_TIMM)}`."}
        made = type("SynchronizedBatchNormAct2d", (_Activated, kind), namespace)
        PLAIN[made] = kind
        SYNCHRONIZED.setdefault(kind, made)  # another thread may have been faster
    return SYNCHRONIZED.get(kind)


class _Activated(SynchronizedBatchNorm2d):
    """Runs the modules of timm's layer after the normalization."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


def __getattr__(name: str) -> Any:
    """Returns the counterpart of timm's class, which a pickled layer names."""
    if name != "SynchronizedBatchNormAct2d":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, plain = _TIMM
    return synchronized_class(getattr(import_module(module), plain))


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

_CONVERTIBLE = "convert_model synchronizes it"


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
        return Kind("left alone", f"a derived class: pass classes={{{kind.__name__}: function}}")
    if isinstance(module, torch.jit.ScriptModule) and module.original_name in _NAMES:
        return Kind("left alone", f"a script of {module.original_name}: convert before torch.jit")
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return Kind("left alone", "by sample, but its running statistics are the first replica's")
    if isinstance(module, _BY_SAMPLE):
        return Kind("by sample")
    if isinstance(module, nn.DataParallel):
        if not runs_callbacks(type(module)):
            return Kind("wrapper", "does not connect copies: convert_model(model) makes it do so")
        if not module.device_ids:
            note = "makes no copies without an accelerator: DataParallel(net, ['cpu'] * n) does"
            return Kind("wrapper", note)
        return Kind("wrapper", "connects the copies of its layers")
    return None


def is_older(module: nn.Module) -> bool:
    """Returns whether a layer has pipes of its own, like batch norm of the older toolkits."""
    return (
        isinstance(module, _BatchNorm)
        and hasattr(type(module), CALLBACK)
        and vars(module).keys() >= _OLDER_STATE
    )


def why_older_stays(layer: nn.Module) -> str:
    """Returns why a layer of an older toolkit can't be converted without loss, or ""."""
    kind = type(layer)
    classes = [c for c in kind.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    toolkit = [c for c in classes if issubclass(c, _BatchNorm)][-1]
    # Copies differ in the forward and the private members of the toolkit's own class.
    methods = {name for name in vars(toolkit) if name[0] != "_"} - {"forward"}
    for other in {*classes} - {toolkit}:
        methods.update(n for n in vars(other) if n[:2] != "__" or n in (CALLBACK, "__call__"))
    # A plain attribute matters if the forward reads it, or if it is the forward.
    code = getattr(unwrap(toolkit.forward), "__code__", None)
    attributes = vars(layer).keys() & {"forward", *(code.co_names if code else ())}
    state = {*attributes, *layer._parameters, *layer._buffers, *layer._modules}
    own = methods - {"_check_input_dim", "extra_repr"} | state - _KNOWN_STATE
    if not own:
        return ""
    package = toolkit.__module__.removesuffix(".batchnorm")
    return (
        f"a layer of an older toolkit that has its own {', '.join(sorted(own))}: class "
        f"{kind.__module__}.{kind.__qualname__}; syncbn.stand_in_for({package!r}), called before "
        f"the first import of {package}, makes its base class a synchronized one"
    )


_plain = nn.BatchNorm2d(1, device="meta")
#: The attributes of torch's layers.
ATTRIBUTES = vars(_plain).keys()
_KNOWN_STATE = {*ATTRIBUTES, *_plain.state_dict(), *OLDER_ATTRIBUTES, *CORRECTION}

#: The layers for 1, 2 and 3 dimensions.
LAYERS = (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)


def counterpart(layer: nn.Module) -> type[nn.Module]:
    """Returns the synchronized class for the "1d", "2d" or "3d" in a layer's class names."""
    names = " ".join(base.__name__ for base in type(layer).__mro__)
    found = re.search("[123](?=d)", names, re.IGNORECASE)
    return LAYERS[int(found[0]) - 1] if found else SynchronizedBatchNormNd


def out_of_sight(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each batch norm in a plain list, tuple or dict, with the path of the attribute."""
    containers = list, tuple, dict
    modules = dict(root.named_modules())
    seen = set(modules.values())
    for path, module in modules.items():
        for name, value in vars(module).items():
            for leaf in leaves_of(value, open_builtin) if isinstance(value, containers) else ():
                for layer in leaf.modules() if isinstance(leaf, nn.Module) else ():
                    if isinstance(layer, _BatchNorm) and layer not in seen:
                        seen.add(layer)
                        yield f"{path}.{name}" if path else name, layer


def _note_on(layer: SynchronizedBatchNorm) -> str:
    notes = {
        "in eval(): does not synchronize": not layer.training,
        f"in groups of {layer.group_size}": layer.group_size is not None,
        "in a process group": layer.process_group is not None,
    }
    return "; ".join(note for note, applies in notes.items() if applies)


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
        note = "nothing to synchronize: works per sample"
        rows += [
            (f"({count} layer{'s' * (count > 1)})", layer, "by sample", note)
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
            LayerSummary(path, type(part).__name__, kind)
            for path, part, kind in kinds
            if kind is not None
        )
    )
