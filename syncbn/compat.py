"""Synchronized layers under the names that other code imports: torch's, or an older toolkit's."""

from __future__ import annotations

import ast
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from replication.callbacks import execute_replication_callbacks
from replication.data_parallel import DataParallelWithCallback
from replication.groups.replicas import CallbackContext
from replication.patch import patch_replication_callback
from replication.sync.pipes import FutureResult, SlavePipe, SyncMaster
from replication.sync.rendezvous import RenewedLock
from replication.warning import warn
from syncbn.batchnorm import SynchronizedBatchNorm, set_sbn_eps_mode
from syncbn.convert import convert_model
from syncbn.kinds import LAYERS, PLAIN

__all__ = ["patch_sync_batchnorm", "stand_in_for"]

_PATCHED = {PLAIN[layer].__name__: layer for layer in LAYERS}
#: The open blocks of `patch_sync_batchnorm`, and the classes that the first of them replaced.
_blocks: list[object] = []
_replaced: dict[str, Any] = {}
_changing_names = RenewedLock()


@contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Replaces ``torch.nn.BatchNorm1d/2d/3d`` by the synchronized classes inside the block.

    Use it for model code that you cannot edit. The patch applies to the whole process. Blocks may
    be nested, and blocks of several threads may overlap: the plain classes are back when the last
    block ends, also after an error. Code that ran ``from torch.nn import BatchNorm2d`` before
    keeps the plain class; use `convert_model` on the network.

    >>> from torch import nn
    >>> from syncbn import patch_sync_batchnorm
    >>> with patch_sync_batchnorm():
    ...     net = nn.Sequential(nn.BatchNorm2d(8))
    >>> type(net[0]).__name__
    'SynchronizedBatchNorm2d'
    """
    block = object()
    try:
        with _changing_names():
            _blocks.append(block)
            for name, synchronized in _PATCHED.items() if len(_blocks) == 1 else ():
                _replaced[name] = getattr(nn, name)
                setattr(nn, name, synchronized)
        yield
    finally:
        with _changing_names():
            if block in _blocks:  # otherwise an interrupt came first
                _blocks.remove(block)
                for name, synchronized in _PATCHED.items() if not _blocks else ():
                    if getattr(nn, name) is synchronized:
                        setattr(nn, name, _replaced[name])


def _named(*objects: Any) -> dict[str, Any]:
    return {each.__name__: each for each in objects}


_CLASSES = _named(*LAYERS)
_LAYERS = _CLASSES | _named(convert_model, patch_sync_batchnorm, set_sbn_eps_mode)
_WRAPPERS = {
    "DataParallelWithCallback": DataParallelWithCallback,
    "patch_replication_callback": patch_replication_callback,
}
_PIPES = _named(FutureResult, SlavePipe, SyncMaster)
#: The names that each of the older toolkit's modules defines. The package has the empty key.
_NAMES: dict[str, dict[str, Any]] = {
    "": _LAYERS | _WRAPPERS,
    "batchnorm": _LAYERS | {"_SynchronizedBatchNorm": SynchronizedBatchNorm},
    "replicate": {
        **_WRAPPERS,
        **_named(CallbackContext, execute_replication_callbacks),
        "execute_callbacks": execute_replication_callbacks,
    },
    "comm": _PIPES,
    "sync_manager": _PIPES,
}
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(SynchronizedBatchNorm.__init__).parameters.items()
    if parameter.default is not parameter.empty
}


def with_defaults(layer: Any, defaults: Mapping[str, Any], module: str, name: str) -> Any:
    """Returns a class that makes instances of ``layer`` with other constructor defaults."""
    # The instances are pickled, converted and reverted like every other layer. The class, which
    # networks may keep, is pickled by its name in ``module``. To `isinstance` it and ``layer`` are
    # the same. Subclasses are ordinary classes.
    if not defaults:
        return layer
    signature = inspect.signature(layer)

    class Derived(layer, metaclass=ABCMeta):  # type: ignore[misc]
        __doc__ = layer.__doc__
        __module__ = module
        __qualname__ = name

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = signature.bind_partial(*args, **kwargs).arguments
            missing = {key: defaults[key] for key in defaults.keys() - given}
            # In one dict, because a layer that takes `**kwargs` may get some of them there.
            super().__init__(*args, **{**missing, **kwargs})
            if type(self) is Derived:
                self.__class__ = layer

        @classmethod
        def __subclasshook__(cls, other: type) -> Any:
            return issubclass(other, layer) if cls is Derived else NotImplemented

    Derived.__name__ = name
    return Derived


def _constructors(copy: ModuleSpec) -> Iterator[tuple[dict[str, ast.expr], bool]]:
    """Yields a copy's constructor defaults per layer, and whether its module corrects the bias."""
    folders = copy.submodule_search_locations
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.py"))]
    for file in files if folders else [Path(str(copy.origin))]:
        with suppress(OSError, SyntaxError, ValueError):
            source = file.read_bytes()
            layers = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)]
            for method in (m for n in layers if "SynchronizedBatchNorm" in n.name for m in n.body):
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    names = reversed([argument.arg for argument in method.args.args])
                    defaults = zip(names, reversed(method.args.defaults), strict=False)
                    yield dict(defaults), b"_running_iter" in source


def defaults_of_copy(package: str, copy: ModuleSpec, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the constructor defaults that differ from ours in the source of a vendored copy."""
    # Warns of a default that is not a constant and of bias-corrected running statistics, unless
    # the caller has chosen a value.
    defaults: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for expressions, corrects_bias in _constructors(copy):
        for name in expressions.keys() & _DEFAULTS.keys():
            try:
                value = ast.literal_eval(expressions[name])
            except ValueError:
                source = ast.unparse(expressions[name])
                problems[name] = f"its default, {source}, is not a constant"
            else:
                if value != _DEFAULTS[name]:
                    defaults[name] = value
        if corrects_bias:
            momentum = defaults.get("momentum", _DEFAULTS["momentum"])
            problems.setdefault(
                "momentum",
                "the copy corrects the bias of its running statistics, which syncbn does not: "
                f"with momentum={momentum} they stay near their initial values in the first steps",
            )
    for name in problems.keys() - chosen.keys():
        warn(
            f"{package}: {problems[name]}; choose the {name} of the layers: "
            f"stand_in_for({package!r}, {name}=...)"
        )
    return defaults


class Finder(MetaPathFinder, Loader):
    """Finds and loads the stand-ins.

    Attributes:
        packages: The replaced packages, with the constructor defaults and the classes chosen for
            their layers.
    """

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, Any]] = {}

    def _split(self, fullname: str) -> tuple[str, str]:
        """Returns the package of a module, and the key of the module in `_NAMES`."""
        package, _, name = fullname.rpartition(".")
        return (fullname, "") if fullname in self.packages else (package, name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, name = self._split(fullname)
        if package not in self.packages or name not in _NAMES:
            return None
        copy = None if name else PathFinder.find_spec(fullname, path)
        spec = ModuleSpec(fullname, self, origin=__name__, loader_state=copy, is_package=not name)
        if copy is not None:  # its other modules stay importable
            spec.submodule_search_locations = list(copy.submodule_search_locations or ())
        return spec

    def exec_module(self, module: ModuleType) -> None:
        package, name = self._split(module.__name__)
        if name:  # the classes of the package, which may have defaults of their own
            layers = vars(sys.modules[package])
        else:
            chosen = self.packages[package]
            defaults = {key: value for key, value in chosen.items() if key in _DEFAULTS}
            if copy := module.__spec__ and module.__spec__.loader_state:
                defaults = {**defaults_of_copy(package, copy, defaults), **defaults}
            layers = {
                key: with_defaults(chosen.get(key, layer), defaults, package, key)
                for key, layer in _CLASSES.items()
            }
        names = _NAMES[name]
        vars(module).update((key, layers.get(key, value)) for key, value in names.items())
        vars(module)["__all__"] = [key for key in names if not key.startswith("_")]


_finder = Finder()


def stand_in_for(package: str = "sync_batchnorm", **chosen: Any) -> None:
    """Makes imports of a vendored copy of an older toolkit return this package's classes.

    Call it once, before the code that imports the copy. Its modules ``batchnorm``, ``replicate``
    and ``comm`` (or ``sync_manager``) are replaced as well; others are imported from where they
    are.

    >>> import syncbn
    >>> syncbn.stand_in_for("sync_batchnorm")
    >>> from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d
    >>> SynchronizedBatchNorm2d is syncbn.SynchronizedBatchNorm2d
    True

    The layers keep the constructor defaults of the copy, whose source is read but not run, unless
    ``chosen`` overrides them. If the copy corrects the bias of running statistics, as CSAIL's do,
    the import warns unless you choose a momentum. A name that no import uses has no effect.

    The layers divide by ``sqrt(var + eps)``, as `torch.nn.BatchNorm2d` does. That is not the older
    toolkit's default: see `set_sbn_eps_mode`.

    Args:
        package: The full dotted name under which the copy is imported, such as
            ``"models.networks.sync_batchnorm"``.
        chosen: Defaults of the layers' constructor, such as ``momentum=0.001``, and classes to
            import under the names ``SynchronizedBatchNorm1d``, ``2d`` or ``3d``, for a copy whose
            layers take more arguments. Their constructors get the same defaults.

    Raises:
        ValueError: ``package`` is not the name of a package.
        TypeError: A value of ``chosen`` is not what the layers' constructor accepts, or no class.
        RuntimeError: The package is already imported.
    """
    if not isinstance(package, str) or not all(map(str.isidentifier, package.split("."))):
        raise ValueError(f"package must be the dotted name of a package (got {package!r})")
    if unknown := [name for name in chosen if name not in {**_DEFAULTS, **_CLASSES}]:
        raise TypeError(
            f"expected keyword arguments of the layers' constructor, {', '.join(_DEFAULTS)}, or "
            f"names of layers, {', '.join(_CLASSES)} (got {', '.join(unknown)})"
        )
    for name in chosen.keys() & _CLASSES.keys():
        if not isinstance(chosen[name], type):
            raise TypeError(f"{name} must be a class (got {chosen[name]!r})")
    # Raises on bad values.
    _CLASSES["SynchronizedBatchNorm2d"](1, **{k: v for k, v in chosen.items() if k in _DEFAULTS})
    loaded = sys.modules.get(package)
    previous = _finder.packages.get(package, {})
    if loaded is not None:
        is_replaced = getattr(loaded, "__loader__", None) is _finder
        if not is_replaced or chosen not in ({}, previous):
            came = f", with {previous} (got {chosen})" if is_replaced else ""
            raise RuntimeError(
                f"{package} has been imported already{came}; call stand_in_for({package!r}) with "
                "all arguments before the first import of it"
            )
    _finder.packages[package] = chosen or previous
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
