"""Code that is not edited gets our layers under the names it imports: torch's, or of a copy."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn

import replication
import syncbn
from syncbn import compat as stand_in
from syncbn import patch_sync_batchnorm
from tests.processes import run_python

LAYERS = ["SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d"]
FUNCTIONS = ["set_sbn_eps_mode", "patch_sync_batchnorm", "convert_model"]
WRAPPERS = ["DataParallelWithCallback", "patch_replication_callback"]
PIPES = ["FutureResult", "SlavePipe", "SyncMaster"]
#: The public names of the older toolkit's package and of its modules.
NAMES = {
    "": [*LAYERS, *FUNCTIONS, *WRAPPERS],
    ".batchnorm": [*LAYERS, *FUNCTIONS],
    ".replicate": [*WRAPPERS, "CallbackContext", "execute_replication_callbacks"],
    ".comm": PIPES,
    ".sync_manager": PIPES,
}


@pytest.fixture(params=["older_sync_batchnorm", "email.sync_batchnorm"])
def package(request):
    """The name of a stand-in, which is there until the test is over."""
    syncbn.stand_in_for(request.param)
    yield request.param
    forget(request.param)


def imported(package, **chosen):
    syncbn.stand_in_for(package, **chosen)
    return importlib.import_module(package)


def forget(package):
    """Takes a stand-in away."""
    stand_in._packages.pop(package, None)
    for name in [n for n in sys.modules if f"{n}.".startswith(f"{package}.")]:
        del sys.modules[name]


@pytest.mark.parametrize("module", NAMES)
def test_names_refer_to_our_objects(package, module):
    imported = importlib.import_module(package + module)
    assert set(imported.__all__) >= set(NAMES[module])
    for name in NAMES[module]:
        assert getattr(imported, name) is (getattr(syncbn, name, None) or vars(replication)[name])
    assert importlib.util.find_spec(package + module).name == package + module


def test_names_that_our_packages_do_not_export(package):
    module = importlib.import_module(f"{package}.batchnorm")
    assert module._SynchronizedBatchNorm is syncbn.batchnorm.SynchronizedBatchNorm
    module = importlib.import_module(f"{package}.replicate")
    assert module.execute_callbacks is replication.execute_replication_callbacks


@pytest.mark.slow
def test_program_for_the_older_toolkit_runs_unchanged(tmp_path):
    """Guarantee 8: layers for the older toolkit run, with one line in front.

    Below it are the call forms of the older toolkit's own readme.
    """
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").touch()
    (tmp_path / "lib" / "generator.py").write_text(
        textwrap.dedent(
            """
            from torch import nn
            from .sync_batchnorm import SynchronizedBatchNorm2d as BatchNorm2d
            from lib.sync_batchnorm.batchnorm import _SynchronizedBatchNorm

            net = nn.Sequential(nn.Conv2d(1, 2, 1), BatchNorm2d(2, momentum=0.01, affine=True))
            assert isinstance(net[1], _SynchronizedBatchNorm)
            """
        )
    )
    (tmp_path / "lib" / "sync_batchnorm").mkdir()
    (tmp_path / "lib" / "sync_batchnorm" / "__init__.py").write_text("raise AssertionError")
    # A module that the older toolkit has not.
    (tmp_path / "lib" / "sync_batchnorm" / "extra.py").write_text(
        "from .batchnorm import SynchronizedBatchNorm2d as layer\ndoubled = [layer] * 2"
    )
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import syncbn

            syncbn.stand_in_for("lib.sync_batchnorm")
            import torch
            from torch import nn
            from lib.generator import net
            from lib import sync_batchnorm
            from lib.sync_batchnorm import *
            from lib.sync_batchnorm.comm import SyncMaster, SlavePipe
            from lib.sync_batchnorm.replicate import execute_replication_callbacks
            import lib.sync_batchnorm.batchnorm
            from lib.sync_batchnorm.extra import doubled

            assert lib.sync_batchnorm.batchnorm.SynchronizedBatchNorm2d is doubled[0]
            assert lib.sync_batchnorm.SynchronizedBatchNorm2d is doubled[1]

            x = torch.randn(6, 1, 4, 4)
            model = sync_batchnorm.DataParallelWithCallback(net, device_ids=["cpu", "cpu"])
            y = model(x)
            torch.testing.assert_close(y, nn.BatchNorm2d(2)(net[0](x)), rtol=1e-5, atol=1e-5)
            patched = nn.DataParallel(net)
            sync_batchnorm.patch_replication_callback(patched)
            with patch_sync_batchnorm():
                assert type(nn.BatchNorm1d(3)) is SynchronizedBatchNorm1d
            assert isinstance(convert_model(nn.BatchNorm3d(3)), SynchronizedBatchNorm3d)
            set_sbn_eps_mode("clamp")
            print("done", sync_batchnorm.SynchronizedBatchNorm2d.__module__)
            """
        )
    )
    done = run_python("-W", "error", "-W", "ignore::UserWarning", "train.py", cwd=tmp_path)
    assert done.stdout == "done syncbn.batchnorm\n", done.stderr


COPY = {
    "__init__.py": "from . import batchnorm, replicate",
    "batchnorm.py": "class SynchronizedBatchNorm2d: pass",
    "replicate.py": "class DataParallelWithCallback: pass",
}


@pytest.mark.parametrize("name", ["lib.copied", "copeid", "lib.copied.batchnorm"])
def test_copy_under_another_name_than_the_stand_in_is_warned_of(name, tmp_path, monkeypatch):
    (tmp_path / "lib" / "copied").mkdir(parents=True)
    for file, text in COPY.items():
        (tmp_path / "lib" / "copied" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    syncbn.stand_in_for(name)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            importlib.import_module("lib.copied")
    finally:
        forget(name)
        forget("lib")
    expected = [] if name == "lib.copied" else ["stand_in_for('lib.copied')"]
    assert [re.findall(r"call (\S+)", str(warning.message))[0] for warning in caught] == expected


def test_other_modules_are_found_as_ever(package):
    assert importlib.util.find_spec("email.mime").name == "email.mime"
    assert importlib.util.find_spec(f"{package}s") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.magic")


def test_what_has_been_imported_already_is_not_replaced():
    with pytest.raises(RuntimeError, match="imported already"):
        syncbn.stand_in_for("textwrap")
    assert sys.modules["textwrap"] is textwrap


@pytest.mark.parametrize("package", ["", "a b", ".sync_batchnorm", "lib.", None, nn])
def test_what_names_no_package_is_refused(package):
    with pytest.raises(ValueError, match="package must be"):
        syncbn.stand_in_for(package)


@pytest.mark.parametrize("first", ["outer_toolkit", "outer_toolkit.sync"])
def test_innermost_package_answers(first):
    """Whichever was asked for first, and whatever the order of a set of their names."""
    packages = ["outer_toolkit", "outer_toolkit.sync"]
    for package in packages if first == packages[0] else packages[::-1]:
        syncbn.stand_in_for(package)
    for package in packages:
        imported = importlib.import_module(f"{package}.batchnorm")
        assert imported.SynchronizedBatchNorm2d is syncbn.SynchronizedBatchNorm2d
    forget(packages[0])
    forget(packages[1])


# -- defaults ----------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Writes the source of a package ``shipped.sync``, whose parent has no ``__init__.py``."""
    (tmp_path / "shipped" / "sync").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)

    def write(source, file="batchnorm.py"):
        text = "raise AssertionError('only read')\n" + textwrap.dedent(source)
        (tmp_path / "shipped" / "sync" / file).write_text(text, encoding="utf-8")

    write("")
    yield write
    forget("shipped.sync")
    sys.modules.pop("shipped", None)


class Sub:
    """Made a subclass of a layer class in the tests, and then importable from here."""


def test_chosen_defaults_are_what_layers_have_unless_they_are_given(shipped):
    toolkit = imported("shipped.sync", momentum=0.001, eps=1e-3, affine=False)
    for name in LAYERS:
        layer = getattr(toolkit, name)(3)
        assert type(layer) is getattr(syncbn, name)
        assert (layer.momentum, layer.eps, layer.affine) == (0.001, 1e-3, False)
        given = getattr(toolkit, name)(3, 1e-4, momentum=None)
        assert (given.momentum, given.eps, given.affine) == (None, 1e-4, False)
        with pytest.raises(TypeError, match="magic"):
            getattr(toolkit, name)(3, magic=1)
    assert syncbn.SynchronizedBatchNorm2d(3).momentum == 0.1


def test_class_with_other_defaults_is_the_same_in_every_module_and_to_isinstance(shipped):
    toolkit = imported("shipped.sync", momentum=0.001)
    kind = importlib.import_module("shipped.sync.batchnorm").SynchronizedBatchNorm2d
    assert kind is toolkit.SynchronizedBatchNorm2d
    own = syncbn.SynchronizedBatchNorm2d
    assert isinstance(own(3), kind) and isinstance(kind(3), own)
    assert issubclass(own, kind) and issubclass(kind, own)
    assert pickle.loads(pickle.dumps(kind)) is kind  # networks keep it in attributes
    for other in (nn.BatchNorm2d, syncbn.SynchronizedBatchNorm1d):
        assert not isinstance(other(3), kind) and not issubclass(other, kind)


def test_subclass_of_a_class_with_other_defaults_is_an_ordinary_class(shipped, monkeypatch):
    kind = imported("shipped.sync", momentum=0.001).SynchronizedBatchNorm2d

    class Named(kind):
        def __init__(self, channels):
            super().__init__(channels, eps=1e-3)
            self.name = "mine"

    layer = Named(3)
    assert type(layer) is Named and isinstance(layer, Named) and isinstance(layer, kind)
    assert (layer.momentum, layer.eps, layer.name) == (0.001, 1e-3, "mine")
    assert not isinstance(kind(3), Named) and not issubclass(kind, Named)
    Named.__qualname__ = Named.__name__ = "Sub"
    monkeypatch.setitem(globals(), "Sub", Named)
    assert type(pickle.loads(pickle.dumps(layer))) is Named


def test_momentum_survives_what_happens_to_a_layer(shipped):
    layer = imported("shipped.sync", momentum=0.001).SynchronizedBatchNorm2d(3)
    pickled = pickle.dumps(layer)
    forget("shipped.sync")  # a program that loads it needs no stand-in
    others = [pickle.loads(pickled), copy.deepcopy(layer)]
    others.append(syncbn.revert_model(copy.deepcopy(layer)))
    assert type(others[-1]) is nn.BatchNorm2d
    others.append(syncbn.convert_model(copy.deepcopy(others[-1])))
    layer.load_state_dict(others[-1].state_dict())
    assert [other.momentum for other in (layer, *others)] == [0.001] * 5
    x = torch.randn(6, 3, 2, 2)
    replication.DataParallel(layer, ["cpu"] * 2)(x)
    torch.testing.assert_close(layer.running_mean, 0.001 * x.mean((0, 2, 3)))


def test_bad_defaults_are_refused_before_anything_changes():
    for name in ("magic", "num_features", "SynchronizedBatchNorm2d"):
        with pytest.raises(TypeError, match=name):
            syncbn.stand_in_for("refused_toolkit", **{name: 3})
    with pytest.raises(TypeError, match="group_size must be an int"):
        syncbn.stand_in_for("refused_toolkit", group_size="2")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("refused_toolkit")


def test_defaults_are_chosen_before_the_first_import(package):
    syncbn.stand_in_for(package, momentum=0.01)
    syncbn.stand_in_for(package)  # keeps what was chosen
    layer = importlib.import_module(package).SynchronizedBatchNorm2d(3)
    assert layer.momentum == 0.01
    syncbn.stand_in_for(package, momentum=0.01)
    syncbn.stand_in_for(package)
    with pytest.raises(RuntimeError, match="with all arguments before"):
        syncbn.stand_in_for(package, eps=1e-3)


# -- names of torch ----------------------------------------------------------------------------


def names_of_torch():
    return [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]


PLAIN = names_of_torch()
SYNCHRONIZED = [getattr(syncbn, name) for name in LAYERS]


def test_the_patch_changes_what_a_builder_builds_and_ends():
    with patch_sync_batchnorm():
        assert names_of_torch() == SYNCHRONIZED
        with patch_sync_batchnorm():
            assert names_of_torch() == SYNCHRONIZED
        assert names_of_torch() == SYNCHRONIZED
    with pytest.raises(KeyError), patch_sync_batchnorm():
        raise KeyError
    assert names_of_torch() == PLAIN
    assert nn.BatchNorm2d.__module__.startswith("torch.")


class Mine(nn.BatchNorm2d):
    """A user's patch of torch."""


def test_patch_of_a_user_around_the_block_stays(monkeypatch):
    monkeypatch.setattr(nn, "BatchNorm2d", Mine)
    with patch_sync_batchnorm():
        assert names_of_torch() == SYNCHRONIZED
    assert names_of_torch() == [PLAIN[0], Mine, PLAIN[2]]
