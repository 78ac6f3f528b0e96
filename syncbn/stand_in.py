"""The older toolkit's names, where a program imports them: for code that ships a copy of it."""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replication import (
    CallbackContext,
    DataParallelWithCallback,
    FutureResult,
    SlavePipe,
    SyncMaster,
    execute_replication_callbacks,
    patch_replication_callback,
)
from syncbn.batchnorm import (
    SynchronizedBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    set_sbn_eps_mode,
)
from syncbn.convert import convert_model, patch_sync_batchnorm

__all__ = ["stand_in_for"]


class TorchTestCase(unittest.TestCase):
    """What tests of the older toolkit derive from."""

    def assertTensorClose(self, x: Tensor, y: Tensor) -> None:
        """Compares with the older toolkit's tolerances."""
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


class Superseded(NamedTuple):
    """A name that answers, with a note on what is better."""

    value: Any
    advice: str


_LAYERS = {
    "SynchronizedBatchNorm1d": SynchronizedBatchNorm1d,
    "SynchronizedBatchNorm2d": SynchronizedBatchNorm2d,
    "SynchronizedBatchNorm3d": SynchronizedBatchNorm3d,
    "convert_model": convert_model,
    "patch_sync_batchnorm": patch_sync_batchnorm,
    "set_sbn_eps_mode": set_sbn_eps_mode,
}
_REPLICAS = {
    "DataParallelWithCallback": DataParallelWithCallback,
    "patch_replication_callback": patch_replication_callback,
}
_PIPES = {
    "FutureResult": Superseded(
        FutureResult, "a group of copies, as replication.ReplicaAware gives a layer, needs none"
    ),
    "SlavePipe": SlavePipe,
    "SyncMaster": SyncMaster,
}
_CALLBACKS = {
    "CallbackContext": CallbackContext,
    "execute_replication_callbacks": execute_replication_callbacks,
    "execute_callbacks": Superseded(
        execute_replication_callbacks, "replication.execute_replication_callbacks is its name now"
    ),
}
#: What each of the older toolkit's modules has; the package itself has the empty name.
_NAMES: dict[str, dict[str, Any]] = {
    "": {**_LAYERS, **_REPLICAS},
    "batchnorm": {**_LAYERS, "_SynchronizedBatchNorm": SynchronizedBatchNorm},
    "replicate": {**_REPLICAS, **_CALLBACKS},
    "comm": _PIPES,
    "sync_manager": _PIPES,
    "batchnorm_reimpl": {
        "BatchNorm2dReimpl": Superseded(
            nn.BatchNorm2d, "torch.nn.BatchNorm2d is what it reimplements"
        )
    },
    "unittest": {
        "TorchTestCase": Superseded(TorchTestCase, "torch.testing.assert_close needs no class")
    },
}


class StandIn(ModuleType):
    """A module that has the names of another."""

    def fill(self, names: dict[str, Any]) -> None:
        """Gives it its names."""
        self.__all__ = [key for key in names if not key.startswith("_")]
        self._superseded = {k: v for k, v in names.items() if isinstance(v, Superseded)}
        vars(self).update({k: v for k, v in names.items() if not isinstance(v, Superseded)})

    def __getattr__(self, name: str) -> Any:
        superseded = self.__dict__.get("_superseded", {}).get(name)
        if superseded is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        text = f"{self.__name__}.{name}: {superseded.advice}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return superseded.value

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__dict__.get("_superseded", ())})


class Finder(MetaPathFinder, Loader):
    """Finds and loads the modules of packages that are stood in for."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def _names(self, module: str) -> dict[str, Any] | None:
        """What a module of that full name has; None if it is none of these."""
        for package in self.packages:
            if module == package or module.startswith(f"{package}."):
                return _NAMES.get(module[len(package) + 1 :])
        return None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks."""
        if self._names(fullname) is None:
            return None
        is_package = fullname in self.packages
        spec = ModuleSpec(fullname, self, origin=__name__, is_package=is_package)
        # The copy that is stood in for may have modules of its own.
        copy = PathFinder.find_spec(fullname, path) if is_package else None
        if copy is not None and copy.submodule_search_locations:
            spec.submodule_search_locations = list(copy.submodule_search_locations)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """As the import system asks."""
        return StandIn(spec.name, f"Stands in for a module of an older toolkit; see {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        """As the import system asks."""
        names = self._names(module.__name__)
        if isinstance(module, StandIn) and names is not None:
            module.fill(names)


_finder = Finder()


def stand_in_for(package: str = "sync_batchnorm") -> None:
    """Makes imports of the older toolkit find this one, in code that ships a copy of it.

    Called once, before that code is imported::

        import syncbn

        syncbn.stand_in_for("models.networks.sync_batchnorm")
        from models.networks import generator  # which imports it in its own way

    Its modules ``batchnorm``, ``replicate``, ``comm`` (or ``sync_manager``), ``batchnorm_reimpl``
    and ``unittest`` answer, too; other modules of the copy are found where it is. Names that are
    better replaced come with a DeprecationWarning that says by what. A mere
    ``sys.modules["sync_batchnorm"] = syncbn`` would load the modules below it a second time, with
    classes of their own.

    ``sqrt(var + eps)`` is used, as in `torch.nn.BatchNorm2d`, not the older toolkit's default:
    see `set_sbn_eps_mode`.

    >>> stand_in_for("sync_batchnorm")
    >>> from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d as layer
    >>> layer is SynchronizedBatchNorm2d
    True

    Args:
        package: The package's full name, with dots, as it is imported.

    Raises:
        ValueError: ``package`` is no name of a package.
        RuntimeError: It has been imported already, by code that goes on to use what it has got.
    """
    if not isinstance(package, str) or not all(map(str.isidentifier, package.split("."))):
        raise ValueError(f"package must be the dotted name of a package (got {package!r})")
    loaded = sys.modules.get(package)
    if loaded is not None and not isinstance(loaded, StandIn):
        raise RuntimeError(
            f"{package} has been imported already; call stand_in_for({package!r}) before what "
            "imports it"
        )
    _finder.packages.add(package)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
