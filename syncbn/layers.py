"""Which layers there are to synchronize, which are so, and which have to be left alone."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from replication.callback import has_replication_callback
from syncbn.batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
)

__all__: list[str] = []

_BatchNorm = nn.modules.batchnorm._BatchNorm

#: What each class of torch becomes.
SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
    nn.SyncBatchNorm: SynchronizedBatchNormNd,
}
#: What each of ours was.
PLAIN = {synchronized: plain for plain, synchronized in SYNCHRONIZED.items()}

_NAMES = {plain.__name__ for plain in SYNCHRONIZED}

#: Layers that normalize each sample by itself.
_BY_SAMPLE = (
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


KindName = Literal["synchronized", "plain", "left alone", "by sample", "wrapper"]


class Kind(NamedTuple):
    """What a layer is to a synchronized network."""

    name: KindName
    #: Why, or what follows from it; may be empty.
    note: str = ""


def kind_of(module: nn.Module) -> Kind | None:
    """What a layer is; None if it normalizes nothing over a batch, and runs no replicas."""
    if isinstance(module, SynchronizedBatchNorm):
        return Kind("synchronized", _note_on(module))
    if type(module) in SYNCHRONIZED:
        return Kind("plain", "convert_model makes it a synchronized one")
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and isinstance(module, _BatchNorm):
        return Kind("left alone", "lazy: call the network once, and convert it then")
    if isinstance(module, _BatchNorm):
        kind = type_before_parametrizations(module)
        if kind in SYNCHRONIZED:
            return Kind("left alone", "parametrized: convert before torch.nn.utils.parametrize")
        base = next(c.__name__ for c in kind.__mro__ if c.__module__.startswith("torch."))
        return Kind("left alone", f"derived from {base.lstrip('_')}, may compute anything")
    if isinstance(module, torch.jit.ScriptModule):
        name = class_name(module)
        note = f"a script of {name}: convert before torch.jit"
        return Kind("left alone", note) if name in _NAMES else None
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return Kind("left alone", "by sample; but its running statistics are the first replica's")
    if isinstance(module, _BY_SAMPLE):
        return Kind("by sample")
    if isinstance(module, nn.DataParallel):
        if has_replication_callback(module):
            return Kind("wrapper", "connects the copies of its layers")
        return Kind("wrapper", "does not connect copies: convert_model(model) makes it do so")
    return None


def class_name(module: nn.Module) -> str:
    """The name of a module's class; of a script, of that which it was made of."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    return str(module.original_name) if is_script else type(module).__name__


def _note_on(layer: SynchronizedBatchNorm) -> str:
    notes = []
    if not layer.training:
        notes.append("in eval(): waits for nobody")
    if layer.group_size is not None:
        notes.append(f"in groups of {layer.group_size}")
    if layer.process_group is not None:
        notes.append("with a process group of its own")
    return "; ".join(notes)
