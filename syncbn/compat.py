"""Stand-ins for copies of the older toolkit, under the names by which programs import them."""

from __future__ import annotations

import ast
import inspect
import sys
import tokenize
import unittest
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
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
from replication.warning import warn
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
    """The base class of the older toolkit's tests."""

    def assertTensorClose(self, x: Tensor, y: Tensor) -> None:
        """Compares with the older toolkit's tolerances."""
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


class Superseded(NamedTuple):
    """A name that warns when it is used, with advice on what to use instead."""

    value: Any
    advice: str


_CLASSES = {
    "SynchronizedBatchNorm1d": SynchronizedBatchNorm1d,
    "SynchronizedBatchNorm2d": SynchronizedBatchNorm2d,
    "SynchronizedBatchNorm3d": SynchronizedBatchNorm3d,
}
_LAYERS = {
    **_CLASSES,
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
#: The names in each of the older toolkit's modules; the package itself has the empty name.
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
    """A module with the names of another one."""

    def fill(self, names: dict[str, Any]) -> None:
        """Defines the names."""
        self.__all__ = [key for key in names if not key.startswith("_")]
        self._superseded = {k: v for k, v in names.items() if isinstance(v, Superseded)}
        vars(self).update({k: v for k, v in names.items() if not isinstance(v, Superseded)})

    def __getattr__(self, name: str) -> Any:
        superseded = self.__dict__.get("_superseded", {}).get(name)
        if superseded is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        text = f"{self.__name__}.{name}: {superseded.advice}"
        warn(text, DeprecationWarning)
        return superseded.value

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__dict__.get("_superseded", ())})


class WithDefaults(type):
    """The class of a layer class whose constructor has other defaults.

    The constructor makes instances of the layer class itself, so that they are pickled, converted
    and reverted like every other layer. Subclasses are ordinary classes.
    """

    layer: type[SynchronizedBatchNorm]

    def __instancecheck__(cls, instance: object) -> bool:
        has_defaults = "layer" in vars(cls)
        return (
            isinstance(instance, cls.layer)
            if has_defaults
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        has_defaults = "layer" in vars(cls)
        return (
            issubclass(subclass, cls.layer)
            if has_defaults
            else super().__subclasscheck__(subclass)
        )


def with_defaults(layer: Any, defaults: Mapping[str, Any]) -> Any:
    """A class that makes objects of ``layer``, with other defaults of the constructor."""
    if not defaults:
        return layer
    signature = inspect.signature(layer.__init__)
    signature = signature.replace(
        parameters=[
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in signature.parameters.items()
        ]
    )

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        layer.__init__(*call.args, **call.kwargs)
        if type(self) is kind:
            self.__class__ = layer

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    attributes = {"__init__": __init__, "__doc__": layer.__doc__, "layer": layer}
    kind = WithDefaults(layer.__name__, (layer,), attributes)
    return kind


class Copy(NamedTuple):
    """What the source of a copy of the older toolkit says about its layers."""

    #: Of the constructor's arguments, where they differ from ours.
    defaults: dict[str, Any]
    #: Warnings, by the argument that settles each.
    doubts: dict[str, str]


#: The defaults that can be chosen.
_OURS = {
    name: parameter.default
    for name, parameter in inspect.signature(SynchronizedBatchNorm.__init__).parameters.items()
    if parameter.default is not parameter.empty
}


def read_copy(spec: ModuleSpec) -> Copy:
    """Reads the source of a copy, without running it."""
    defaults: dict[str, Any] = {}
    doubts: dict[str, str] = {}
    for tree in _sources(spec):
        for name, default in _defaults_of_layers(tree):
            if name not in _OURS:
                continue
            try:
                value = ast.literal_eval(default)
            except ValueError:
                doubts[name] = f"the default of {name}, {ast.unparse(default)}, is not a constant"
                continue
            if value != _OURS[name]:
                defaults[name] = value
        if any(isinstance(n, ast.Constant) and n.value == "_running_iter" for n in ast.walk(tree)):
            doubts.setdefault(
                "momentum",
                "the copy corrects the bias of its running statistics, which syncbn does not: "
                f"with momentum={defaults.get('momentum', _OURS['momentum'])} they stay near "
                "their initial values in the first steps",
            )
    return Copy(defaults, doubts)


def _sources(spec: ModuleSpec) -> Iterator[ast.Module]:
    folders = spec.submodule_search_locations
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.py"))]
    for file in files if folders else [Path(str(spec.origin))]:
        with suppress(OSError, SyntaxError, ValueError), tokenize.open(file) as source:
            yield ast.parse(source.read())


def _defaults_of_layers(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The defaults in the constructors of synchronized layers."""
    for layer in tree.body:
        if not isinstance(layer, ast.ClassDef) or "SynchronizedBatchNorm" not in layer.name:
            continue
        for method in layer.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                names = [argument.arg for argument in method.args.args]
                yield from zip(names[::-1], method.args.defaults[::-1], strict=False)


class Finder(MetaPathFinder, Loader):
    """Finds and loads the stand-ins.

    Attributes:
        packages: The packages that have one, and the layers' defaults that were asked for.
    """

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, Any]] = {}
        self._copies: dict[str, Copy] = {}

    def _package(self, module: str) -> str:
        """The innermost package with a stand-in that a module is in; empty if there is none."""
        found = (p for p in self.packages if f"{module}.".startswith(f"{p}."))
        return max(found, key=len, default="")

    def _names(self, module: str) -> dict[str, Any] | None:
        """The names of a module's stand-in; None if it has none."""
        package = self._package(module)
        return _NAMES.get(module[len(package) + 1 :]) if package else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system."""
        if self._names(fullname) is None:
            return None
        is_package = fullname in self.packages
        spec = ModuleSpec(fullname, self, origin=__name__, is_package=is_package)
        copy = PathFinder.find_spec(fullname, path) if is_package else None
        if copy is not None:
            self._copies[fullname] = read_copy(copy)
            # The copy may have modules of its own.
            spec.submodule_search_locations = list(copy.submodule_search_locations or ())
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Called by the import system."""
        return StandIn(spec.name, f"Stands in for a module of an older toolkit; see {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        """Called by the import system."""
        name = module.__name__
        names = self._names(name)
        if not isinstance(module, StandIn) or names is None:
            return
        package = self._package(name)
        parent = sys.modules.get(package)
        if name == package or parent is None:
            layers = self._layers(package)
        else:  # the same classes
            layers = {key: vars(parent)[key] for key in _CLASSES}
        module.fill({key: layers.get(key, value) for key, value in names.items()})

    def _layers(self, package: str) -> dict[str, Any]:
        """The layer classes of a package, with the defaults of its copy or the chosen ones."""
        copy, chosen = self._copies.get(package, Copy({}, {})), self.packages[package]
        for name, doubt in copy.doubts.items():
            if name not in chosen:
                warn(
                    f"{package}: {doubt}; pass the {name} that the layers should have: "
                    f"stand_in_for({package!r}, {name}=...)"
                )
        defaults = {**copy.defaults, **chosen}
        return {name: with_defaults(layer, defaults) for name, layer in _CLASSES.items()}


_finder = Finder()


def stand_in_for(package: str = "sync_batchnorm", **defaults: Any) -> None:
    """Makes imports of the older toolkit find this one, in code that ships a copy of it.

    Called once, before that code is imported::

        import syncbn

        syncbn.stand_in_for("models.networks.sync_batchnorm")
        from models.networks import generator  # which imports it in its own way

    Its modules ``batchnorm``, ``replicate``, ``comm`` (or ``sync_manager``), ``batchnorm_reimpl``
    and ``unittest`` answer as well. Other modules of the copy are found where they are. Superseded
    names come with a DeprecationWarning that says what to use instead. A plain
    ``sys.modules["sync_batchnorm"] = syncbn`` would load the modules below it a second time, with
    classes of their own.

    Copies differ in the defaults of their layers: CSAIL's have ``momentum=0.001``. The layers keep
    the defaults of the copy, whose source is read but not run, unless ``defaults`` says otherwise.
    Bias-corrected running statistics, which CSAIL's copies have, are not supported: the import
    warns unless a momentum was chosen.

    ``sqrt(var + eps)`` is used, as in `torch.nn.BatchNorm2d`, not the older toolkit's default:
    see `set_sbn_eps_mode`.

    >>> stand_in_for("sync_batchnorm")
    >>> from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d as layer
    >>> layer is SynchronizedBatchNorm2d
    True

    Args:
        package: The package's full name, with dots, as it is imported.
        defaults: Defaults of the layers' constructor, such as ``momentum=0.001``.

    Raises:
        ValueError: ``package`` is not the name of a package.
        TypeError: The layers' constructor has no such keyword argument, or refuses the value.
        RuntimeError: The package has been imported already, or has a stand-in with other defaults.
    """
    if not isinstance(package, str) or not all(map(str.isidentifier, package.split("."))):
        raise ValueError(f"package must be the dotted name of a package (got {package!r})")
    if unknown := [name for name in defaults if name not in _OURS]:
        raise TypeError(
            f"expected keyword arguments of the layers' constructor, {', '.join(_OURS)} "
            f"(got {', '.join(unknown)})"
        )
    SynchronizedBatchNorm2d(1, **defaults)  # raises on bad values
    loaded = sys.modules.get(package)
    if loaded is not None and not isinstance(loaded, StandIn):
        raise RuntimeError(
            f"{package} has been imported already; call stand_in_for({package!r}) before the "
            "first import of it"
        )
    before = _finder.packages.get(package, {})
    if loaded is not None and defaults not in ({}, before):
        raise RuntimeError(
            f"{package} has been imported already, with the defaults {before} (got {defaults}); "
            "call stand_in_for with the defaults before the first import"
        )
    _finder.packages[package] = defaults or before
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
