"""Each model whose layers train without their copies warns once and says what to do."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from replication import DataParallel, UnsynchronizedWarning, data_parallel
from replication.warning import _answers
from syncbn import convert_model, patch_sync_batchnorm, verify

CPUS = ["cpu"] * 2
#: `replication.data_parallel` itself is the function.
X = torch.randn(4, 3)


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(*(layers or [nn.BatchNorm1d(3)])))


def warnings_of(call, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [warning for warning in caught if warning.category is UnsynchronizedWarning]


# -- plain batch norm --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False),
    ],
    ids=str,
)
def test_plain_batch_norm_in_replicas_warns_once_for_each_model_at_the_users_line(layer):
    """Clause 6b: plain BatchNorm in replicas warns."""
    for model in (DataParallel(network(layer), CPUS), DataParallel(layer, CPUS)):
        (warning,) = warnings_of(model, X)
        assert warning.filename == __file__
        assert "syncbn.convert_model(model)" in str(warning.message)
        path = "(root)" if model.module is layer else "1.0"
        assert f"`{path}` (BatchNorm1d);" in str(warning.message)
        assert warnings_of(model, X) == []


def test_torchs_layer_for_processes_in_replicas_warns():
    """Clause 6c: `nn.SyncBatchNorm` in replicas warns."""
    (warning,) = warnings_of(DataParallel(network(nn.SyncBatchNorm(3)), CPUS), X)
    assert "`1.0` (SyncBatchNorm);" in str(warning.message)
    assert "syncbn.convert_model(model)" in str(warning.message)


def test_first_layers_are_named_and_the_others_counted():
    """Those in evaluation, such as the first one, are neither named nor counted."""
    layers = [nn.BatchNorm1d(3) for _ in range(5)]
    net = network(nn.BatchNorm1d(3).eval(), *layers, layers[0])
    (warning,) = warnings_of(DataParallel(net, CPUS), X)
    named = " ".join(re.findall(r"\S+ \(BatchNorm1d\).*;", str(warning.message)))
    assert named == "`1.1` (BatchNorm1d), `1.2` (BatchNorm1d), `1.3` (BatchNorm1d) and 2 more;"


def test_first_forward_that_trains_is_the_one_that_warns():
    model = DataParallel(network(), CPUS).eval()
    assert warnings_of(model, X) == []
    assert len(warnings_of(model.train(), X)) == 1


class Cyclic(nn.Module):
    """A module whose child knows its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.child.none = None
        self.child.register_module("absent", None)
        self.child.parent = self

    def forward(self, x):
        return self.child(x)


class Derived(nn.BatchNorm1d):
    """A class of a user's, which may compute anything."""


def built_in_a_block():
    with patch_sync_batchnorm():
        return nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("module", "devices", "x"),
    [
        (convert_model(network()), CPUS, X),
        (built_in_a_block(), CPUS, X),
        (network().eval(), CPUS, X),
        (network(nn.InstanceNorm1d(3), Derived(3)), CPUS, torch.randn(4, 3, 3)),
        (network(), ["cpu"], X),
        (nn.BatchNorm2d(3), CPUS, torch.randn(1, 3, 2, 2)),
        (Cyclic(), CPUS, X),
    ],
    ids=[
        "converted",
        "patched",
        "evaluation",
        "other classes",
        "one device",
        "one sample",
        "cyclic",
    ],
)
def test_what_is_no_reason_to_warn(module, devices, x):
    assert warnings_of(DataParallel(module, devices), x) == []


def test_verify_reports_instead_of_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not verify(network(), torch.randn(8, 3), CPUS)


# -- no accelerator ----------------------------------------------------------------------------

both_forms = pytest.mark.parametrize(
    "make",
    [DataParallel, lambda net, ids=None: data_parallel(net, X, ids)],
    ids=["DataParallel", "data_parallel"],
)


@pytest.fixture
def first_time(monkeypatch):
    """Lets the process warn of missing accelerators, as if for the first time."""
    monkeypatch.delitem(_answers, id(DataParallel), raising=False)


@both_forms
def test_indices_without_accelerators_warn_at_the_users_line(make):
    (warning,) = warnings_of(make, nn.Linear(3, 3), [0, 1, 2])
    assert warning.filename == __file__
    assert "device_ids=[0, 1, 2]" in str(warning.message)
    assert "device_ids=['cpu'] * 3" in str(warning.message)


@both_forms
def test_layers_that_communicate_warn_once_if_no_device_is_named_and_there_is_none(
    make, first_time
):
    (warning,) = warnings_of(make, convert_model(network()))
    assert warning.filename == __file__
    assert "device_ids=['cpu'] * 4" in str(warning.message)
    assert warnings_of(make, convert_model(network())) == []


def test_a_warning_that_is_an_error_is_raised_once(first_time):
    net = convert_model(network())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnsynchronizedWarning, match="no GPU or other accelerator found"):
            DataParallel(net)
        DataParallel(net)


@pytest.mark.parametrize("device_ids", [[0], ["cpu"], CPUS], ids=str)
@both_forms
def test_a_device_that_is_named_is_no_reason_to_warn(make, device_ids, first_time):
    for net in convert_model(network()), nn.Linear(3, 3):
        assert warnings_of(make, net, device_ids) == []
    assert warnings_of(make, nn.Linear(3, 3), None) == []  # whose copies have nothing to say
