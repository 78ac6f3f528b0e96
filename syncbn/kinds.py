"""What each layer of a network is to synchronization, and the `summary` that lists it."""

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
from torch.nn.utils.parametrize import is_parametrized

from replication import ReplicaAware
from replication.extending import (
    check_module,
    leaves_of,
    open_builtin,
    path_or_root,
    runs_callbacks,
    table,
)
from syncbn.batchnorm import (
    CORRECTION,
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
)

__all__ = ["Summary", "summary"]

LAYERS = (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)

#: The counterparts of torch's classes, and of timm's once a network uses it.
SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNormNd,
}
PLAIN_CLASS_OF = {synchronized: plain for plain, synchronized in SYNCHRONIZED.items()}
_PLAIN_NAMES = {plain.__name__ for plain in PLAIN_CLASS_OF.values()}
_BatchNorm = nn.modules.batchnorm._BatchNorm

#: Known by name, because this package does not import timm. timm makes the second of the first.
_TIMM = "timm.layers.norm_act"
_OF_TIMM = "BatchNormAct2d", "SyncBatchNormAct"

#: The attributes that identify a layer of an older toolkit, and that a synchronized one lacks.
PIPES = {"_sync_master", "_is_parallel", "_parallel_id", "_slave_pipe"}
#: The parameters and buffers of these classes.
_STATE = {"weight", "bias", *CORRECTION, "running_mean", "running_var", "num_batches_tracked"}


class _Activated(SynchronizedBatchNorm2d):
    """A synchronized `timm.layers.norm_act.BatchNormAct2d`."""

    def forward(self: Any, input: Tensor) -> Any:
        return self.act(self.drop(super().forward(input)))


def _counterpart_of_timm() -> type[nn.Module]:
    kind = import_module(_TIMM).BatchNormAct2d
    # Derived from timm's class: timm's functions, such as `freeze_batch_norm_2d`, would otherwise
    # take the layer for one without activation.
    if kind not in SYNCHRONIZED:
        made = type("SynchronizedBatchNormAct2d", (_Activated, kind), {"__module__": __name__})
        SYNCHRONIZED.setdefault(kind, made)  # another thread may have been faster
    return SYNCHRONIZED[kind]


def __getattr__(name: str) -> Any:
    if name == "SynchronizedBatchNormAct2d":  # of a pickled layer
        return _counterpart_of_timm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def counterpart_of(layer: nn.Module) -> type[nn.Module] | None:
    """The class to which `convert_model` converts a layer by itself, or None."""
    kind = type(layer)
    if kind.__module__ == _TIMM and kind.__qualname__ in _OF_TIMM:
        return _counterpart_of_timm()
    if _has_pipes(layer) and _is_of_toolkit(layer):
        # The "1d", "2d" or "3d" in the names of its classes.
        names = " ".join(base.__name__ for base in kind.__mro__)
        found = re.search("[123](?=d)", names, re.IGNORECASE)
        return LAYERS[int(found[0]) - 1] if found else SynchronizedBatchNormNd
    return SYNCHRONIZED.get(kind)


def _has_pipes(layer: nn.Module) -> bool:
    """Whether a layer is of an older toolkit, or derived from one of its layers."""
    return isinstance(layer, _BatchNorm) and vars(layer).keys() >= PIPES


def _is_of_toolkit(layer: nn.Module) -> bool:
    """Whether a layer is of an older toolkit's own classes, and has no more state than they."""
    foreign = "torch.", "builtins"
    modules = {c.__module__ for c in type(layer).__mro__ if not c.__module__.startswith(foreign)}
    state = {*layer._parameters, *layer._buffers, *layer._modules}
    return len(modules) == 1 and state <= _STATE and "forward" not in vars(layer)


def reaches_synchronized_forward(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class is a synchronized one, or may call one by super."""
    # A class such as ``Sync(Mine, SynchronizedBatchNorm2d)`` whose ``Mine.forward`` never calls
    # super would be silently unsynchronized: it counts as a synchronized layer, but `forward` of
    # its second base never runs. Asked here, once, by the names in the code. A layer that asked at
    # the end of each call would slow down every network, and tell only after the first batch.
    for base in kind.__mro__:
        if "forward" in vars(base):
            if issubclass(base, ReplicaAware):
                return True
            code = getattr(unwrap(vars(base)["forward"]), "__code__", None)
            if code is not None and "super" not in code.co_names:
                return False
    return False


# -- what each layer is to synchronization -----------------------------------------------------

KindName = Literal["synchronized", "plain", "left alone", "wrapper"]


class Kind(NamedTuple):
    """How a layer takes part in a synchronized network."""

    name: KindName
    #: The reason, or the consequence; may be empty.
    note: str = ""


def _kind_of(module: nn.Module) -> Kind | None:
    """The kind of a layer, or None if there is nothing to synchronize."""
    if isinstance(module, SynchronizedBatchNorm):
        return _kind_of_synchronized(module)
    if counterpart_of(module) is not None:
        return Kind("plain", "convert_model synchronizes it")
    if isinstance(module, _BatchNorm):
        return Kind("left alone", _why_left_alone(module))
    if isinstance(module, torch.jit.ScriptModule) and module.original_name in _PLAIN_NAMES:
        return Kind("left alone", f"a script of {module.original_name}: convert before torch.jit")
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return Kind("left alone", "by sample, but its running statistics are the first replica's")
    if isinstance(module, nn.DataParallel):
        connects = "connects the copies of its layers"
        does_not = "does not connect copies: convert_model(model) makes it do so"
        return Kind("wrapper", connects if runs_callbacks(type(module)) else does_not)
    return None


def _kind_of_synchronized(layer: SynchronizedBatchNorm) -> Kind:
    if not reaches_synchronized_forward(type(layer)):
        return Kind("left alone", "its forward does not lead to the synchronized one")
    notes = [
        "" if layer.training else "in eval(): does not synchronize",
        "" if layer.group_size is None else f"in groups of {layer.group_size}",
        "" if layer.process_group is None else "in a process group",
    ]
    return Kind("synchronized", "; ".join(filter(None, notes)))


#: The beginning of the note on a class that can get a synchronized second base class.
DERIVED = "a derived class:"


def _why_left_alone(layer: nn.Module) -> str:
    """Why a batch norm whose class has no counterpart is left alone, and what to do."""
    name = type(layer).__name__
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        return "lazy: call the network once before you convert it"
    if _has_pipes(layer) or isinstance(layer, nn.SyncBatchNorm):
        new = f"classes={{{name}: ...}} with a class derived from SynchronizedBatchNorm2d"
        return f"its base has another synchronization: pass {new} (or 1d, 3d, Nd)"
    if is_parametrized(layer):
        return "parametrized: convert before torch.nn.utils.parametrize"
    return f"{DERIVED} pass classes={{{name}: Sync{name}}}"


def _out_of_sight(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The batch norm in plain lists, tuples and dicts, with the path of the attribute."""
    seen = set(root.modules())
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            leaves = [leaf for leaf in leaves_of(value, open_builtin) if leaf is not value]
            for layer in (m for le in leaves if isinstance(le, nn.Module) for m in le.modules()):
                if isinstance(layer, _BatchNorm) and layer not in seen:
                    seen.add(layer)
                    yield f"{path}.{name}" if path else name, layer


class LayerSummary(NamedTuple):
    path: str
    #: The name of its class.
    layer: str
    kind: Kind


@dataclass(frozen=True)
class Summary:
    """The result of `summary`. It prints as a table.

    Attributes:
        layers: All layers that could or do synchronize, and all that run replicas, in the order of
            ``named_modules()``. Each has a ``path``, ``layer`` (the name of its class), and
            ``kind``, whose ``name`` is ``"synchronized"``, ``"plain"`` (not converted), ``"left
            alone"`` or ``"wrapper"``, and whose ``note`` gives the reason.
    """

    layers: tuple[LayerSummary, ...]

    def paths(self, kind: KindName) -> list[str]:
        """The paths of all layers of one kind."""
        if kind not in get_args(KindName):
            raise ValueError(f"expected a kind of {get_args(KindName)} (got {kind!r})")
        return [layer.path for layer in self.layers if layer.kind.name == kind]

    def __repr__(self) -> str:
        if not self.layers:
            return "No layer normalizes over the batch."
        rows = [(f"`{path_or_root(path)}`", layer, *kind) for path, layer, kind in self.layers]
        counts = Counter(layer.kind.name for layer in self.layers)
        return (
            f"{table(('path', 'layer', 'status', 'note'), rows)}\n"
            f"{counts['synchronized']} synchronized, {counts['plain']} not converted, "
            f"{counts['left alone']} left alone."
        )


def summary(module: nn.Module) -> Summary:
    """Lists the batch norm of a network, and shows which layers of it are synchronized.

    Layers in plain lists, tuples and dicts are listed under the path of the attribute, because
    neither `convert_model` nor replication finds them. Layers that look at one sample at a time,
    such as `torch.nn.GroupNorm`, need no synchronization and are not listed. The table shows the
    classes of the layers. It cannot tell whether ranks are connected, but `verify` can.

    >>> from torch import nn
    >>> from syncbn import convert_model, summary
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8))
    >>> print(summary(convert_model(net)))
    path  layer                    status        note
    `1`   SynchronizedBatchNorm2d  synchronized
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
