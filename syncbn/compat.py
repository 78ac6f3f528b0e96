"""Synchronized layers under the names that other code imports: torch's, or an older toolkit's."""

from __future__ import annotations

import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch import nn

from replication.callbacks import execute_replication_callbacks
from replication.data_parallel import DataParallelWithCallback
from replication.groups.replicas import CallbackContext
from replication.patch import patch_replication_callback
from replication.sync.pipes import FutureResult, SlavePipe, SyncMaster
from replication.warning import warn
from syncbn.batchnorm import SynchronizedBatchNorm, set_sbn_eps_mode
from syncbn.conversion import convert_model
from syncbn.kinds import LAYERS, PLAIN

__all__ = ["patch_sync_batchnorm", "stand_in_for"]


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Replaces ``torch.nn.BatchNorm1d/2d/3d`` by the synchronized classes inside the block.

    The patch applies to the whole process, until the block ends or raises. Blocks may be nested.
    Those of several threads must not overlap, or the names may stay replaced. Code that ran
    ``from torch.nn import BatchNorm2d`` before keeps the plain class.

    >>> from torch import nn
    >>> from syncbn import patch_sync_batchnorm
    >>> with patch_sync_batchnorm():
    ...     net = nn.Sequential(nn.BatchNorm2d(8))
    >>> type(net[0]).__name__
    'SynchronizedBatchNorm2d'
    """
    names, patched = vars(nn), {PLAIN[layer].__name__: layer for layer in LAYERS}
    before = {name: names[name] for name in patched}
    try:
        names.update(patched)
        yield
    finally:
        names.update(before)  # one call, which a Ctrl-C cannot divide


#: The modules of the older toolkit. Each stand-in has all names.
_MODULES = {"batchnorm", "replicate", "comm", "sync_manager"}
_NAMES: dict[str, Any] = {
    **{layer.__name__: layer for layer in LAYERS},
    **{kind.__name__: kind for kind in (CallbackContext, FutureResult, SlavePipe, SyncMaster)},
    "_SynchronizedBatchNorm": SynchronizedBatchNorm,
    "DataParallelWithCallback": DataParallelWithCallback,
    "convert_model": convert_model,
    "execute_callbacks": execute_replication_callbacks,
    "execute_replication_callbacks": execute_replication_callbacks,
    "patch_replication_callback": patch_replication_callback,
    "patch_sync_batchnorm": patch_sync_batchnorm,
    "set_sbn_eps_mode": set_sbn_eps_mode,
}
_SIGNATURE = inspect.signature(SynchronizedBatchNorm)


def _with_defaults(layer: Any, defaults: Mapping[str, Any], package: str) -> Any:
    """A class that makes instances of ``layer`` with other constructor defaults."""
    # The instances are pickled, converted and reverted like every other layer. The class, which
    # networks may keep, is pickled by its name in ``package``. To `isinstance` it and ``layer``
    # are the same. Subclasses are ordinary classes.

    class Derived(layer, metaclass=ABCMeta):  # type: ignore[misc]
        __module__, __doc__ = package, layer.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = _SIGNATURE.bind_partial(*args, **kwargs).arguments
            super().__init__(**{**defaults, **given})
            if type(self) is Derived:
                self.__class__ = layer

        @classmethod
        def __subclasshook__(cls, other: type) -> Any:
            return issubclass(other, layer) if cls is Derived else NotImplemented

    Derived.__name__ = Derived.__qualname__ = layer.__name__
    return Derived


#: The replaced packages, with the constructor defaults chosen for their layers.
_packages: dict[str, dict[str, Any]] = {}


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if fullname in _packages:
            copy = PathFinder.find_spec(fullname, path)
            spec = ModuleSpec(fullname, self, is_package=True)
            if copy is not None:  # its other modules stay importable
                spec.submodule_search_locations = [*(copy.submodule_search_locations or ())]
            return spec
        if package in _packages and name in _MODULES:
            return ModuleSpec(fullname, self)
        # A copy has both modules. `stand_in_for` may have another name, or the name of one module.
        if package and name == "replicate" and PathFinder.find_spec(f"{package}.batchnorm", path):
            warn(
                f"{package} looks like a copy of an older toolkit, and is not replaced; if it is "
                f"one, call stand_in_for({package!r}) before the first import of it"
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _packages:
            defaults = _packages[name]
            made = [_with_defaults(layer, defaults, name) for layer in LAYERS if defaults]
            names = {**_NAMES, **{layer.__name__: layer for layer in made}}
        else:  # the classes of the package, which may have defaults of their own
            package = vars(sys.modules[name.rpartition(".")[0]])
            names = {key: package[key] for key in _NAMES}
        vars(module).update(names, __all__=[key for key in names if key[0] != "_"])


_finder = _Finder()


def stand_in_for(package: str = "sync_batchnorm", **defaults: Any) -> None:
    """Makes imports of a vendored copy of an older toolkit return this package's classes.

    Call it once, before the code that imports the copy. Its modules ``batchnorm``, ``replicate``
    and ``comm`` (or ``sync_manager``) are replaced as well; others are imported from where they
    are.

    >>> import syncbn
    >>> syncbn.stand_in_for("sync_batchnorm")
    >>> from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d
    >>> SynchronizedBatchNorm2d is syncbn.SynchronizedBatchNorm2d
    True

    The layers have torch's constructor defaults, unless ``defaults`` overrides them: some copies
    have ``momentum=0.001``. They divide by ``sqrt(var + eps)``, which is not the default of the
    older toolkit (see `set_sbn_eps_mode`).

    Args:
        package: The full dotted name under which the copy is imported, such as
            ``"models.networks.sync_batchnorm"``.
        defaults: Defaults of the layers' constructor, such as ``momentum=0.001``.

    Raises:
        ValueError: ``package`` is not the name of a package.
        TypeError: One of ``defaults`` is not what the layers' constructor accepts.
        RuntimeError: The package is already imported.
    """
    if not isinstance(package, str) or not all(map(str.isidentifier, package.split("."))):
        raise ValueError(f"package must be the dotted name of a package (got {package!r})")
    SynchronizedBatchNorm(1, **defaults)  # raises on bad values
    previous = _packages.get(package)
    if package in sys.modules and (previous is None or defaults not in ({}, previous)):
        raise RuntimeError(
            f"{package} has been imported already; call stand_in_for({package!r}) with all "
            "arguments before the first import of it"
        )
    _packages[package] = defaults or previous or {}
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
