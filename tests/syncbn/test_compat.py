"""Code that is not edited gets our layers under the names it imports: torch's, or of a copy."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest
from torch import nn

import replication
import syncbn
from syncbn import patch_sync_batchnorm
from tests.kit.programs import run_python

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


def forget(package):
    """Takes a stand-in away."""
    for name in [n for n in sys.modules if f"{n}.".startswith(f"{package}.")]:
        del sys.modules[name]


@pytest.mark.parametrize("module", NAMES)
def test_names_refer_to_our_objects(package, module):
    imported = importlib.import_module(package + module)
    assert set(imported.__all__) >= set(NAMES[module])
    for name in NAMES[module]:
        assert getattr(imported, name) is (getattr(syncbn, name, None) or vars(replication)[name])


def test_names_that_our_packages_do_not_export(package):
    module = importlib.import_module(f"{package}.batchnorm")
    assert module._SynchronizedBatchNorm is syncbn.batchnorm.SynchronizedBatchNorm
    module = importlib.import_module(f"{package}.replicate")
    assert module.execute_callbacks is replication.execute_replication_callbacks


@pytest.mark.slow
def test_program_for_the_older_toolkit_runs_unchanged(tmp_path):
    """Clause 8a: programs for vacancy's toolkit run.

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

            assert lib.sync_batchnorm.batchnorm.SynchronizedBatchNorm2d is SynchronizedBatchNorm2d

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


def test_other_modules_are_found_as_ever(package):
    assert importlib.util.find_spec("email.mime").name == "email.mime"
    assert importlib.util.find_spec(f"{package}s") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.magic")


def test_a_second_call_changes_nothing(package):
    first = sys.modules[package]
    syncbn.stand_in_for(package)
    assert sys.modules[package] is first


def test_a_call_that_fails_leaves_nothing_behind():
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError) as caught:
            syncbn.stand_in_for("no_such_package.sync_batchnorm")
        assert "pass the name as your imports write it" in caught.value.__notes__[0]
    assert not [name for name in sys.modules if name.startswith("no_such_package")]


def test_a_package_that_imports_its_copy_at_once_gets_the_stand_in(tmp_path, monkeypatch):
    (tmp_path / "eager_toolkit" / "sync").mkdir(parents=True)
    (tmp_path / "eager_toolkit" / "__init__.py").write_text(
        "from .sync.batchnorm import SynchronizedBatchNorm2d"
    )
    (tmp_path / "eager_toolkit" / "sync" / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    syncbn.stand_in_for("eager_toolkit.sync")
    package = sys.modules["eager_toolkit"]
    assert package.SynchronizedBatchNorm2d is syncbn.SynchronizedBatchNorm2d
    assert package.sync is sys.modules["eager_toolkit.sync"]
    forget("eager_toolkit")


def test_what_has_been_imported_already_is_not_replaced():
    with pytest.raises(RuntimeError, match="imported already"):
        syncbn.stand_in_for("textwrap")
    assert sys.modules["textwrap"] is textwrap


@pytest.mark.parametrize("package", ["", "a b", ".sync_batchnorm", "lib.", None, nn])
def test_what_names_no_package_is_refused(package):
    with pytest.raises(ValueError, match="package must be"):
        syncbn.stand_in_for(package)


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
