"""Code that ships a copy of the older toolkit gets ours, under the names it imports."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import textwrap
import unittest

import pytest
import torch
from torch import nn

import replication
import syncbn
from syncbn import stand_in

#: The names of the older toolkit's package and of its modules.
NAMES = {
    "": [
        "SynchronizedBatchNorm1d",
        "SynchronizedBatchNorm2d",
        "SynchronizedBatchNorm3d",
        "set_sbn_eps_mode",
        "patch_sync_batchnorm",
        "convert_model",
        "DataParallelWithCallback",
        "patch_replication_callback",
    ],
    ".batchnorm": [
        "set_sbn_eps_mode",
        "SynchronizedBatchNorm1d",
        "SynchronizedBatchNorm2d",
        "SynchronizedBatchNorm3d",
        "patch_sync_batchnorm",
        "convert_model",
    ],
    ".replicate": [
        "CallbackContext",
        "execute_replication_callbacks",
        "DataParallelWithCallback",
        "patch_replication_callback",
    ],
    ".comm": ["SlavePipe", "SyncMaster"],
    ".sync_manager": ["SlavePipe", "SyncMaster"],
}
SUPERSEDED = [
    (".comm", "FutureResult"),
    (".replicate", "execute_callbacks"),
    (".batchnorm_reimpl", "BatchNorm2dReimpl"),
    (".unittest", "TorchTestCase"),
]


@pytest.fixture(params=["older_sync_batchnorm", "email.sync_batchnorm"])
def package(request):
    """The name of a stand-in, which is there until the test is over."""
    syncbn.stand_in_for(request.param)
    yield request.param
    stand_in._finder.packages.discard(request.param)
    for name in [
        n for n in sys.modules if n == request.param or n.startswith(request.param + ".")
    ]:
        del sys.modules[name]


@pytest.mark.parametrize(("module", "name"), [(m, n) for m in NAMES for n in NAMES[m]])
def test_name_is_ours(package, module, name):
    own = getattr(syncbn, name, None) or getattr(replication, name)
    assert getattr(importlib.import_module(package + module), name) is own


@pytest.mark.parametrize(("module", "name"), SUPERSEDED)
def test_superseded_name_answers_with_advice(package, module, name):
    with pytest.warns(DeprecationWarning, match=name) as caught:
        assert getattr(importlib.import_module(package + module), name) is not None
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", ["", *{m for m, _ in SUPERSEDED}, *NAMES])
def test_unknown_name_is_no_attribute(package, module):
    imported = importlib.import_module(package + module)
    with pytest.raises(AttributeError, match="has no attribute 'magic'"):
        imported.magic  # noqa: B018
    assert importlib.util.find_spec(package + module).name == package + module


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("SynchronizedBatchNorm2d", {"eps": 1e-5, "momentum": 0.1, "affine": True}),
        ("SynchronizedBatchNorm1d", {"track_running_stats": True}),
        ("DataParallelWithCallback", {"device_ids": None, "output_device": None, "dim": 0}),
    ],
)
def test_defaults_are_those_of_the_older_toolkit(package, name, defaults):
    own = inspect.signature(getattr(importlib.import_module(package), name)).parameters
    assert {key: own[key].default for key in defaults} == defaults


def test_program_for_the_older_toolkit_runs_unchanged(tmp_path):
    """With one line in front; below it are the call forms of the older toolkit's own readme."""
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
    path = [str(tmp_path), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::UserWarning", "train.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "done syncbn.batchnorm\n", done.stderr


def test_test_case_of_the_older_toolkit_compares_tensors(package):
    with pytest.warns(DeprecationWarning):
        case = importlib.import_module(f"{package}.unittest").TorchTestCase()
    assert isinstance(case, unittest.TestCase)
    x = torch.ones(3)
    case.assertTensorClose(x, x + 5e-4)
    with pytest.raises(AssertionError):
        case.assertTensorClose(x, x + 5e-3)


def test_modules_are_attributes_of_what_contains_them(package):
    module = importlib.import_module(f"{package}.comm")
    parent, _, name = package.rpartition(".")
    if parent:
        assert getattr(sys.modules[parent], name) is sys.modules[package]
    assert sys.modules[package].comm is module
    assert {"SyncMaster", "FutureResult"} <= set(dir(module))
    assert importlib.reload(module).SyncMaster is replication.SyncMaster


def test_a_package_in_no_package_is_not_found():
    syncbn.stand_in_for("nowhere.sync_batchnorm")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("nowhere.sync_batchnorm.batchnorm")


def test_other_modules_are_found_as_ever(package):
    assert importlib.util.find_spec("email.mime").name == "email.mime"
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


def test_a_second_call_changes_nothing(package):
    before = importlib.import_module(package).SynchronizedBatchNorm2d
    syncbn.stand_in_for(package)
    assert importlib.import_module(package).SynchronizedBatchNorm2d is before
