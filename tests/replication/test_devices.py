"""Devices: what they are called, which there are, and where replicas have their tensors."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from replication import gather, parallel_apply, replicate, scatter, scatter_kwargs
from replication.devices import (
    accelerator,
    current_stream,
    default_devices,
    device_of,
    parse_devices,
    use_device,
)
from tests.kit.junk import X
from tests.kit.programs import program, run_python

# -- replicas on their devices -----------------------------------------------------------------


def test_indices_stand_for_the_accelerators_that_torch_names(monkeypatch):
    found = SimpleNamespace(device_count=lambda: 0, current_accelerator=lambda: pytest.fail())
    monkeypatch.setattr(torch, "accelerator", found)  # torch 2.6 raises where there is none
    assert accelerator() is None
    found.device_count, found.current_accelerator = lambda: 2, lambda: torch.device("xpu")
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert accelerator() == "xpu"
    assert default_devices() == [torch.device("xpu", 0), torch.device("xpu", 1)]
    with pytest.raises(ValueError, match="no accelerator of index -2"):
        parse_devices([0, -2])


def test_a_backend_needs_neither_streams_nor_a_current_device(monkeypatch):
    module = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    first, second = parse_devices(["hpu", "hpu:1"])
    assert (first, second) == (torch.device("hpu:0"), torch.device("hpu:1"))
    assert current_stream(second) is None
    with ExitStack() as stack:
        use_device(stack, second, None)
    with pytest.raises(ValueError, match="this machine has no device 'hpu:2'"):
        parse_devices(["hpu:2"])


@pytest.mark.slow
def test_nothing_needs_what_builds_for_the_cpu_lack():
    """pytorch#109709, #143239."""
    done = run_python(program("runs_without_cuda"))
    assert (done.stdout.split(), done.stderr) == (["1"], "")


# -- the device of a module --------------------------------------------------------------------


def with_constant(module: nn.Module) -> nn.Module:
    module.constant = torch.ones(1)
    return module


@pytest.mark.parametrize(
    ("module", "device"),
    [
        (nn.Linear(1, 1, device="meta"), "meta"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm1d(1, affine=False, device="meta")), "meta"),
        (nn.Sequential(with_constant(nn.ReLU()), nn.Linear(1, 1, device="meta")), "meta"),
        (with_constant(nn.ReLU()), "cpu"),
        (nn.ReLU(), None),
    ],
    ids=["parameter", "buffer", "constant before", "constant alone", "none"],
)
def test_device_of_a_module_comes_from_its_first_tensor(module, device):
    assert device_of(module) == (device and torch.device(device))


# -- devices that are refused ------------------------------------------------------------------


@pytest.mark.skipif(accelerator() == "cuda", reason="of a machine without CUDA")
@pytest.mark.parametrize(
    "call",
    [
        lambda: replicate(nn.Linear(3, 2), ["cuda:0"]),
        lambda: scatter(X, ["cuda:0"]),
        lambda: scatter_kwargs((X,), None, ["cuda:0"]),
        lambda: parallel_apply([nn.ReLU()] * 2, [X, X], devices=["cpu", "cuda:0"]),
        lambda: gather([X, X], "cuda:0"),
    ],
    ids=["replicate", "scatter", "scatter_kwargs", "parallel_apply", "gather"],
)
def test_each_step_refuses_a_device_that_is_not_there(call):
    with pytest.raises(ValueError, match="this machine has no device 'cuda:0'"):
        call()
