"""A synchronized layer for timm's batch norm with dropout and activation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from syncbn.batchnorm import SynchronizedBatchNorm2d

_MODULE, _NAME = "timm.layers.norm_act", "BatchNormAct2d"


def is_timm(kind: type[Any]) -> bool:
    """Returns whether ``kind`` is timm's class, and no class derived from it."""
    # By name, because timm is not imported before a network of timm's is there.
    return (kind.__module__, kind.__qualname__) == (_MODULE, _NAME)


class _Activated(SynchronizedBatchNorm2d):
    """Runs the modules of timm's layer after the normalization."""

    if TYPE_CHECKING:
        drop: nn.Module
        act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


_counterparts: dict[type[Any], type[nn.Module]] = {}


def synchronized_timm(plain: type[Any]) -> type[nn.Module]:
    """Returns the counterpart of timm's class."""
    # Derived from timm's class: timm's functions, such as `freeze_batch_norm_2d`, would otherwise
    # take the layer for one without activation.
    if plain not in _counterparts:
        namespace = {"__module__": __name__, "__doc__": f"A synchronized `{_MODULE}.{_NAME}`."}
        made = type("SynchronizedBatchNormAct2d", (_Activated, plain), namespace)
        _counterparts.setdefault(plain, made)  # another thread may have been faster
    return _counterparts[plain]


def __getattr__(name: str) -> Any:
    """Returns the class when a pickled layer is loaded."""
    if name != "SynchronizedBatchNormAct2d":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return synchronized_timm(getattr(import_module(_MODULE), _NAME))
