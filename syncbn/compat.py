"""Synchronized layers under the names that other code imports: torch's, or an older toolkit's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from replication import (
    CallbackContext,
    DataParallelWithCallback,
    FutureResult,
    SlavePipe,
    SyncMaster,
    execute_replication_callbacks,
    patch_replication_callback,
)
from syncbn.batchnorm import SynchronizedBatchNorm, set_sbn_eps_mode
from syncbn.conversion import convert_model
from syncbn.kinds import LAYERS, PLAIN_CLASS_OF

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
    names, patched = vars(nn), {PLAIN_CLASS_OF[layer].__name__: layer for layer in LAYERS}
    before = {name: names[name] for name in patched}
    try:
        names.update(patched)
        yield
    finally:
        names.update(before)  # one call, which a Ctrl-C cannot divide


#: The names of the older toolkit's package, which each of its modules has here.
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
_PUBLIC = [name for name in _NAMES if not name.startswith("_")]


class _StandIn(ModuleType):
    """A module with the names of the older toolkit."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self).update(_NAMES, __all__=_PUBLIC, __path__=[])


def stand_in_for(package: str = "sync_batchnorm") -> None:
    """Makes imports of a vendored copy of an older toolkit return this package's classes.

    Call it once, before the code that imports the copy. Its modules ``batchnorm``, ``replicate``
    and ``comm`` (or ``sync_manager``) are replaced as well. The package that contains the copy is
    imported.

    >>> import syncbn
    >>> syncbn.stand_in_for("sync_batchnorm")
    >>> from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d
    >>> SynchronizedBatchNorm2d is syncbn.SynchronizedBatchNorm2d
    True

    The layers have torch's constructor defaults (some copies have ``momentum=0.001``: set it on
    the layers once the network is built), and divide by ``sqrt(var + eps)``, which is not the
    default of the older toolkit (see `set_sbn_eps_mode`).

    Args:
        package: The full dotted name under which the copy is imported, such as
            ``"models.networks.sync_batchnorm"``.

    Raises:
        ValueError: ``package`` is not the name of a package.
        RuntimeError: The package is already imported.
        ModuleNotFoundError: There is no package that could contain it.
    """
    if not isinstance(package, str) or not all(map(str.isidentifier, package.split("."))):
        raise ValueError(f"package must be the dotted name of a package (got {package!r})")
    if isinstance(sys.modules.get(package), _StandIn):
        return
    if package in sys.modules:
        raise RuntimeError(
            f"{package} has been imported already; call stand_in_for({package!r}) before the "
            "first import of it"
        )
    stand_in = _StandIn(package)
    made = {package: stand_in}
    for name in ("batchnorm", "replicate", "comm", "sync_manager"):
        made[f"{package}.{name}"] = module = _StandIn(f"{package}.{name}")
        setattr(stand_in, name, module)
    sys.modules.update(made)
    parent, _, name = package.rpartition(".")
    if parent:
        # ``import models.sync_batchnorm`` finds the copy as an attribute of ``models``, which the
        # import would set. Last, because ``models`` may import the copy.
        try:
            setattr(import_module(parent), name, stand_in)
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError):
                error.add_note(
                    f"stand_in_for({package!r}) imports {parent!r}; pass the name as your imports "
                    "write it, such as 'models.networks.sync_batchnorm'"
                )
            for module_name in made:  # so that a second call does not take the first for done
                sys.modules.pop(module_name, None)
            raise
