"""Replicas on a foreign backend, and on what such backends lack."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from replication import DataParallel
from replication.devices import default_devices
from syncbn import channels, convert_model
from tests import accelerator
from tests.kit.collectives import CASES, derivatives, in_replicas, leaves
from tests.kit.devices import ACCELERATORS, HOME, has_simulated
from tests.kit.shards import randomized

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not has_simulated(), reason="needs pytest --simulated-accelerator"),
]

every_path = pytest.mark.parametrize("path", ["kernels", "textbook"], indirect=True)
every_list = pytest.mark.parametrize(
    "devices", [ACCELERATORS, ACCELERATORS * 2], ids=["once", "twice"]
)


@pytest.fixture(autouse=True)
def default_device() -> None:
    """Overrides the fixture of all other tests: these name their devices."""


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the kernels from the backend for the textbook."""
    if request.param == "textbook":
        monkeypatch.setattr("syncbn.batchnorm.kernels_for", lambda kind: None)


@pytest.mark.parametrize("other", ["sim:1", "cpu"])
def test_operations_on_two_devices_are_refused(other):
    x, y = torch.ones(3, device="sim:0"), torch.ones(3, device=other)
    for operation in (torch.add, torch.dot, torch.outer):
        with pytest.raises(RuntimeError, match="on the same device"):
            operation(x, y)
    # As on CUDA.
    assert (x * torch.tensor(2.0)).sum().item() == 6
    assert x[torch.tensor([0, 2])].shape == (2,)


def test_the_devices_of_the_backend_are_the_default():
    assert default_devices() == [torch.device("sim", 0), torch.device("sim", 1)]


@every_path
@every_list
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_replicas_train_like_one_device_on_the_cpu(devices, dtype, path):
    """Uneven shards, and fewer samples than replicas."""
    plain = nn.Sequential(nn.Conv2d(2, 4, 1), randomized(nn.BatchNorm2d(4)), nn.Tanh()).double()
    model = DataParallel(convert_model(copy.deepcopy(plain)).to("sim:0", dtype), devices)
    loose = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
    for samples in (7, 4, 1):
        x, dy = torch.randn(samples, 2, 3, 3).double(), torch.randn(samples, 4, 3, 3).double()
        found = []
        for module, device, kind in ((plain, "cpu", torch.float64), (model, "sim:0", dtype)):
            module.zero_grad()
            leaf = x.to(device, kind, copy=True).requires_grad_()
            y = module(leaf)
            y.backward(dy.to(y))
            grads = [leaf.grad, *(p.grad for p in module.parameters())]
            found.append([t.detach().cpu().double() for t in (y, *grads)])
        torch.testing.assert_close(found[1], found[0], rtol=loose, atol=loose)


@pytest.mark.parametrize("name", CASES)
def test_collectives_and_their_derivatives_equal_the_oracle(name):
    case = CASES[name]
    inputs = leaves(case, len(ACCELERATORS))
    there = [tuple(x.to(d) for x in own) for own, d in zip(inputs, ACCELERATORS, strict=True)]
    outputs = in_replicas(case.call, there, ACCELERATORS)
    home = [tuple(y.cpu() for y in own) for own in outputs]
    expected = case.oracle(inputs)
    torch.testing.assert_close(home, expected)
    torch.testing.assert_close(derivatives(home, inputs), derivatives(expected, inputs))


@every_path
@every_list
@pytest.mark.parametrize("momentum", [0.1, None], ids=str)
def test_devices_without_float64_train_like_torchs_layer(devices, momentum, path):
    """The statistics of the batch are merged on the CPU."""
    plain = randomized(nn.BatchNorm2d(3, momentum=momentum)).to(HOME)
    model = DataParallel(convert_model(copy.deepcopy(plain)), devices)
    x = torch.randn(5, 3, 2, 2, device=HOME, requires_grad=True)
    dy = torch.randn_like(x)
    inputs = [[x, *m.parameters()] for m in (plain, model)]
    with accelerator.no_float64():
        for create_graph in (False, True):
            grads = [
                torch.autograd.grad(m(x), leaves, dy, create_graph=create_graph)
                for m, leaves in zip((plain, model), inputs, strict=True)
            ]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())


@every_path
def test_backends_without_record_stream_train_like_torchs_layer(path):
    plain = randomized(nn.BatchNorm2d(3)).to(HOME)
    model = DataParallel(convert_model(copy.deepcopy(plain)), ACCELERATORS)
    x, dy = torch.randn(2, 5, 3, 2, 2, device=HOME)
    found = []
    with accelerator.no_record_stream(), torch.sim.stream(torch.Stream(device="sim:0")):
        with pytest.raises(NotImplementedError, match="record_stream"):
            x.record_stream(torch.sim.current_stream())
        for m in (plain, model):
            leaf = x.clone().requires_grad_()
            m(leaf).backward(dy)
            found.append([leaf.grad, *(p.grad for p in m.parameters()), *m.buffers()])
    torch.testing.assert_close(*found)


def test_a_device_is_asked_for_float64_once(monkeypatch):
    def refuse(*args, **kwargs):
        raise TypeError("no float64")

    device = torch.device(HOME)
    monkeypatch.setattr(channels, "_has_float64", {})
    with monkeypatch.context() as context:
        context.setattr(torch, "zeros", refuse)
        assert not channels.has_float64(device)
    assert not channels.has_float64(device)
    channels._has_float64.clear()
    with FakeTensorMode():  # whose answer is not kept
        assert channels.has_float64(device)
    assert not channels._has_float64
    assert channels.has_float64(device)
