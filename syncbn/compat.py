"""Replaces vendored copies of older synchronized batch norm toolkits, under their own names."""

from __future__ import annotations

import ast
import inspect
import sys
import unittest
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

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
    def assertTensorClose(self, x: Tensor, y: Tensor) -> None:
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


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
_WRAPPERS = {
    "DataParallelWithCallback": DataParallelWithCallback,
    "patch_replication_callback": patch_replication_callback,
}
_PIPES = {"FutureResult": FutureResult, "SlavePipe": SlavePipe, "SyncMaster": SyncMaster}
#: The names that each of the older toolkit's modules defines. The package has the empty key.
_NAMES: dict[str, dict[str, Any]] = {
    "": {**_LAYERS, **_WRAPPERS},
    "batchnorm": {**_LAYERS, "_SynchronizedBatchNorm": SynchronizedBatchNorm},
    "replicate": {
        **_WRAPPERS,
        "CallbackContext": CallbackContext,
        "execute_replication_callbacks": execute_replication_callbacks,
        "execute_callbacks": execute_replication_callbacks,
    },
    "comm": _PIPES,
    "sync_manager": _PIPES,
    "batchnorm_reimpl": {"BatchNorm2dReimpl": nn.BatchNorm2d},
    "unittest": {"TorchTestCase": TorchTestCase},
}
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(SynchronizedBatchNorm.__init__).parameters.items()
    if parameter.default is not parameter.empty
}


class _WithDefaults(type):
    """The metaclass of a layer class whose constructor has other defaults.

    The constructor makes instances of the layer class, so that they are pickled, converted and
    reverted like every other layer. Subclasses are ordinary classes.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:
        layer = vars(cls).get("layer")
        return issubclass(subclass, layer) if layer else super().__subclasscheck__(subclass)

    def __instancecheck__(cls, instance: object) -> bool:
        return issubclass(type(instance), cls)


def with_defaults(layer: Any, defaults: Mapping[str, Any]) -> Any:
    """Returns a class that makes instances of ``layer`` with other constructor defaults."""
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
    kind = _WithDefaults(layer.__name__, (layer,), attributes)
    return kind


def _constructors(copy: ModuleSpec) -> Iterator[tuple[ast.arguments, bool]]:
    """Parses the synchronized layers of a vendored copy.

    Yields:
        The arguments of each constructor, and whether its module corrects the bias of running
        statistics.
    """
    folders = copy.submodule_search_locations
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.py"))]
    for file in files if folders else [Path(str(copy.origin))]:
        with suppress(OSError, SyntaxError, ValueError):
            source = file.read_bytes()
            for layer in ast.parse(source).body:
                if isinstance(layer, ast.ClassDef) and "SynchronizedBatchNorm" in layer.name:
                    for method in layer.body:
                        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                            yield method.args, b"_running_iter" in source


def defaults_of_copy(package: str, copy: ModuleSpec, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Reads, from the source of a vendored copy, the constructor defaults that differ from ours.

    Warns of a default that is not a constant and of bias-corrected running statistics, unless the
    caller has chosen a value.
    """
    defaults: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for arguments, corrects_bias in _constructors(copy):
        names = [argument.arg for argument in arguments.args[::-1]]
        for name, default in zip(names, arguments.defaults[::-1], strict=False):
            try:
                value = ast.literal_eval(default)
            except ValueError:
                problems[name] = (
                    f"the default of {name}, {ast.unparse(default)}, is not a constant"
                )
                continue
            if name in _DEFAULTS and value != _DEFAULTS[name]:
                defaults[name] = value
        if corrects_bias:
            problems.setdefault(
                "momentum",
                "the copy corrects the bias of its running statistics, which syncbn does not: "
                f"with momentum={defaults.get('momentum', _DEFAULTS['momentum'])} they stay near "
                "their initial values in the first steps",
            )
    for name in (problems.keys() & _DEFAULTS.keys()) - chosen.keys():
        warn(
            f"{package}: {problems[name]}; pass the {name} that the layers should have: "
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
        self._copies: dict[str, ModuleSpec] = {}
        #: The copies under other names that a warning has named.
        self._warned: set[str] = set()

    def _package(self, module: str) -> str:
        """Returns the innermost replaced package that contains a module, or an empty string."""
        packages = (p for p in tuple(self.packages) if f"{module}.".startswith(f"{p}."))
        return max(packages, key=len, default="")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = self._package(fullname)
        if not package:
            self._warn_of_other_copy(fullname, path)
            return None
        if fullname[len(package) + 1 :] not in _NAMES:
            return None
        is_package = fullname == package
        spec = ModuleSpec(fullname, self, origin=__name__, is_package=is_package)
        copy = PathFinder.find_spec(fullname, path) if is_package else None
        if copy is not None:
            self._copies[fullname] = copy
            # Other modules of the copy stay importable.
            spec.submodule_search_locations = list(copy.submodule_search_locations or ())
        return spec

    def _warn_of_other_copy(self, module: str, path: Sequence[str] | None) -> None:
        """Warns if a module belongs to a copy, and no import uses the name of a stand-in.

        The name may be misspelled.
        """
        unused = [package for package in tuple(self.packages) if package not in sys.modules]
        package, _, name = module.rpartition(".")
        copy: ModuleSpec | None = None
        if unused and package and name in _NAMES:
            copy = getattr(sys.modules.get(package), "__spec__", None)
        elif get_close_matches(name, [other.rpartition(".")[2] for other in unused], cutoff=0.8):
            package, copy = module, PathFinder.find_spec(module, path)
        if copy and package not in self._warned and any(_constructors(copy)):
            self._warned.add(package)
            warn(
                f"`{package}` keeps its own layers: no import has used "
                f"{' or '.join(f'stand_in_for({other!r})' for other in unused)} so far; if the "
                f"name is misspelled, call stand_in_for({package!r})"
            )

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        package = self._package(name)
        parent = sys.modules.get(package)
        layers: Mapping[str, Any]
        if name == package or parent is None:
            chosen = self.packages[package]
            defaults = {key: value for key, value in chosen.items() if key in _DEFAULTS}
            if copy := self._copies.get(package):
                defaults = {**defaults_of_copy(package, copy, defaults), **defaults}
            classes = {key: chosen.get(key, layer) for key, layer in _CLASSES.items()}
            layers = {key: with_defaults(layer, defaults) for key, layer in classes.items()}
        else:  # the classes of the package, which may have defaults of their own
            layers = {key: vars(parent)[key] for key in _CLASSES}
        names = _NAMES[name[len(package) + 1 :]]
        vars(module).update((key, layers.get(key, value)) for key, value in names.items())
        vars(module)["__all__"] = [key for key in names if not key.startswith("_")]


_finder = Finder()


def stand_in_for(package: str = "sync_batchnorm", **chosen: Any) -> None:
    """Makes imports of a vendored copy of an older toolkit return this package's classes.

    Call it once, before the code that imports the copy::

        import syncbn

        syncbn.stand_in_for("models.networks.sync_batchnorm")
        from models.networks import generator  # imports the copy as it always did

    The copy's modules ``batchnorm``, ``replicate``, ``comm`` (or ``sync_manager``),
    ``batchnorm_reimpl`` and ``unittest`` are replaced as well. Its other modules are imported from
    where they are.

    Copies differ in the defaults of their layers: CSAIL's have ``momentum=0.001``. The layers keep
    the defaults of the copy, whose source is read but not run, unless ``chosen`` overrides them.
    Bias-corrected running statistics, which CSAIL's copies have, are not supported: the import
    warns unless you choose a momentum.

    If no import uses ``package``, and a copy is imported under another name, a warning names both.

    In some copies the layers take more arguments: BigGAN's have ``forward(input, gain, bias)``.
    Pass a class of your own for such a name::

        syncbn.stand_in_for("sync_batchnorm", SynchronizedBatchNorm2d=MyBatchNorm2d)

    The layers divide by ``sqrt(var + eps)``, as `torch.nn.BatchNorm2d` does. That is not the older
    toolkit's default: see `set_sbn_eps_mode`.

    >>> import syncbn
    >>> syncbn.stand_in_for("sync_batchnorm")
    >>> from sync_batchnorm.batchnorm import SynchronizedBatchNorm2d
    >>> SynchronizedBatchNorm2d is syncbn.SynchronizedBatchNorm2d
    True

    Args:
        package: The full dotted name under which the copy is imported.
        chosen: Defaults of the layers' constructor, such as ``momentum=0.001``, and classes to
            import under the names ``SynchronizedBatchNorm1d``, ``2d`` or ``3d``. Their
            constructors get the same defaults.

    Raises:
        ValueError: ``package`` is not the name of a package.
        TypeError: The layers' constructor refuses a value of ``chosen``, or the value for the
            name of a layer is not a class.
        RuntimeError: The package is already imported, or already has a stand-in with other
            defaults or classes.
    """
    if not isinstance(package, str) or not all(map(str.isidentifier, package.split("."))):
        raise ValueError(f"package must be the dotted name of a package (got {package!r})")
    defaults = {name: value for name, value in chosen.items() if name not in _CLASSES}
    if unknown := [name for name in defaults if name not in _DEFAULTS]:
        raise TypeError(
            f"expected keyword arguments of the layers' constructor, {', '.join(_DEFAULTS)}, or "
            f"names of layers, {', '.join(_CLASSES)} (got {', '.join(unknown)})"
        )
    SynchronizedBatchNorm2d(1, **defaults)  # raises on bad values
    for name in chosen.keys() & _CLASSES.keys():
        if not isinstance(chosen[name], type):
            raise TypeError(f"{name} must be a class (got {chosen[name]!r})")
    loaded = sys.modules.get(package)
    if loaded is not None and getattr(loaded, "__loader__", None) is not _finder:
        raise RuntimeError(
            f"{package} has been imported already; call stand_in_for({package!r}) before the "
            "first import of it"
        )
    previous = _finder.packages.get(package, {})
    if loaded is not None and chosen not in ({}, previous):
        raise RuntimeError(
            f"{package} has been imported already, with {previous} (got {chosen}); call "
            "stand_in_for with these arguments before the first import"
        )
    _finder.packages[package] = chosen or previous
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
