"""What `summary` says of a network, and `convert_model(report=True)` prints."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from replication import DataParallel, patch_replication_callback
from replication.groups.registry import ProcessGroupHandle
from syncbn import SynchronizedBatchNorm1d, convert_model, summary
from tests.kit.layers import Fused
from tests.kit.wrappers import CustomDataParallel


class Mine(SynchronizedBatchNorm1d):
    """A user's own synchronized layer."""


def network() -> nn.Module:
    """A layer of every kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        scripted = torch.jit.trace(nn.BatchNorm2d(8).eval(), torch.randn(2, 8, 3, 3))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        Fused(8),
        nn.LazyBatchNorm2d(),
        nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)),
        nn.SyncBatchNorm(8),
        nn.BatchNorm3d(8).eval(),
        Mine(8),
        scripted,
    )


def kinds(net: nn.Module) -> dict[str, str]:
    return {layer.path: layer.kind.name for layer in summary(net).layers}


def test_every_layer_that_normalizes_is_listed_with_its_kind():
    expected = {
        "1": "plain",
        "2": "left alone",
        "3": "left alone",
        "5": "plain",
        "6": "plain",
        "7": "synchronized",
        "8": "left alone",
    }
    net = network()
    assert kinds(net) == expected
    with pytest.warns(UserWarning, match="unsynchronized") as caught:
        convert_model(net)
    assert kinds(net) == {k: v.replace("plain", "synchronized") for k, v in expected.items()}
    named = [path for path in expected if f"`{path}` (" in str(caught[0].message)]
    assert named == ["2", "3", "8"]  # what is left alone


def test_a_report_is_printed_instead_of_a_warning_and_reads_as_a_table(capsys):
    net = convert_model(DataParallel(network(), ["cpu"] * 2), group_size=2, report=True)
    assert capsys.readouterr().out == f"{summary(net)}\n"
    lines = str(summary(net)).splitlines()
    begins = lines[0].index("layer"), lines[0].index("note")
    assert all(len(line) <= 110 for line in lines)
    for line in lines[:-1]:
        assert all(line[begin - 2 : begin].strip() == "" for begin in begins)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows["`module.1`"] == "SynchronizedBatchNorm2d synchronized in groups of 2"
    assert rows["`(root)`"] == "DataParallel wrapper connects the copies of its layers"
    assert rows["`module.2`"].startswith("Fused left alone a derived class: pass")
    assert rows["`module.3`"].startswith("LazyBatchNorm2d left alone lazy")
    assert "in eval()" in rows["`module.6`"]
    assert lines[-1].startswith("4 synchronized, 0 not converted, 3 left alone")


class Bare(nn.modules.batchnorm._BatchNorm):
    """Derived from torch's private base."""


def in_groups() -> nn.Module:
    layer = SynchronizedBatchNorm1d(3, group_size=2).eval()
    layer._process_group = ProcessGroupHandle(object())
    return layer


def patched(model: nn.Module) -> nn.Module:
    patch_replication_callback(model)
    return model


spectral_norm = nn.utils.parametrizations.spectral_norm
LINEAR = nn.Linear(2, 2)
NOTES = "in eval(): does not synchronize; in groups of 2; in a process group"


@pytest.mark.parametrize(
    ("layer", "kind", "note"),
    [
        (nn.BatchNorm2d(3), "plain", "convert_model synchronizes it"),
        (in_groups(), "synchronized", NOTES),
        (spectral_norm(convert_model(nn.BatchNorm2d(3))), "synchronized", ""),
        (spectral_norm(nn.BatchNorm2d(3)), "left alone", "parametrized: convert before"),
        (spectral_norm(Fused(3)), "left alone", "parametrized: convert before"),
        (Bare(3), "left alone", "a derived class: pass classes={Bare: SyncBare}"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "left alone", "by sample, but its"),
        (nn.DataParallel(LINEAR), "wrapper", "does not connect copies"),
        (DataParallel(LINEAR, ["cpu"] * 2), "wrapper", "connects the copies"),
        (patched(CustomDataParallel(LINEAR, 2)), "wrapper", "connects the copies"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_notes(layer, kind, note):
    (found,) = summary(layer).layers
    assert found.kind.name == kind and found.kind.note.startswith(note)
    assert summary(layer).paths(kind) == [""]


def test_what_is_not_listed():
    assert str(summary(nn.Linear(2, 2))) == "No layer normalizes over the batch."


def test_only_kinds_and_modules_are_accepted():
    with pytest.raises(ValueError, match=r"'left alone'.*got 'leftalone'"):
        summary(nn.ReLU()).paths("leftalone")
    with pytest.raises(TypeError, match="Module"):
        summary([nn.BatchNorm1d(3)])
