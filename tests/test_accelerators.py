"""The laws on accelerators: the simulated ones, or the machine's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from replication import DataParallel, Scattered, replicate
from syncbn import SynchronizedBatchNorm2d, convert_model
from syncbn.kernels import Fused
from tests.collective_cases import CASES, derivatives, in_replicas, leaves
from tests.devices import ACCELERATORS, HOME, LISTS
from tests.sharded import randomized
from tests.syncbn.test_kernels import check_every_kernel, moments_of, statistics_of

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not ACCELERATORS, reason="needs an accelerator"),
]

every_list = pytest.mark.parametrize("devices", LISTS.values(), ids=LISTS)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_kernels_give_the_numbers_of_float64(shape, dtype, channels_last):
    x, dy = torch.randn(2, *shape).to(HOME, dtype)
    if channels_last and x.dim() == 4:
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    mean, inverse = Fused.moments(x, 1e-5)
    stats = statistics_of(*moments_of(x), x, 1e-5)
    torch.testing.assert_close((mean, inverse), stats[1:3], rtol=1e-4, atol=1e-4)
    tolerance = 1e-2 if dtype == torch.float16 else 1e-4
    check_every_kernel(Fused, x, dy, stats, 1e-5, tolerance)


@every_list
def test_training_on_replicas_equals_training_on_one_device(devices):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(16, 3)
    )
    net = net.double().to(devices[0])
    model = DataParallel(convert_model(copy.deepcopy(net)), devices)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, model)]
    for samples in (7, 4, 1 + 1):
        x = torch.randn(samples, 2, 4, 4, dtype=torch.float64, device=devices[0])
        dy = torch.randn(samples, 3, dtype=torch.float64, device=devices[0])
        for m, optimizer in zip((net, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).backward(dy)
            optimizer.step()
    for one, other in zip(
        model.module.state_dict().values(), net.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other)


@every_list
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("mean", [0, 1e2])
def test_error_is_at_most_twice_the_error_of_torchs_layer(devices, dtype, last, mean):
    layout = torch.channels_last if last else torch.contiguous_format
    plain = randomized(nn.BatchNorm2d(5)).to(devices[0])
    layer = convert_model(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).double()
    samples = 4 * len(devices) - 1
    x = (torch.randn(samples, 5, 6, 7) + mean).to(devices[0], dtype, memory_format=layout)
    dy = torch.randn(samples, 5, 6, 7).to(devices[0], dtype, memory_format=layout)
    results = []
    for module in (exact, plain, DataParallel(layer, devices)):
        double = module is exact
        leaf = (x.double() if double else x).detach().requires_grad_()
        y = module(leaf)
        y.backward(dy.double() if double else dy)
        inner = module.module if isinstance(module, DataParallel) else module
        assert double or y.dtype == dtype
        assert double or y.is_contiguous(memory_format=layout)
        grads = [leaf.grad, *(p.grad for p in inner.parameters())]
        statistics = [inner.running_mean, inner.running_var]
        results.append([t.double().cpu() for t in (y, *grads, *statistics)])
    for right, own, ours in zip(*results, strict=True):
        ulp = torch.finfo(dtype).eps * right.abs().max()
        assert (ours - right).abs().max() <= 2 * (own - right).abs().max() + ulp


@every_list
def test_the_host_does_not_wait(devices):
    layer = SynchronizedBatchNorm2d(3).to(devices[0])
    model = DataParallel(layer, devices, gather_to_one_device=False)
    shards = [torch.randn(2, 3, 4, 4, device=d, requires_grad=True) for d in devices]
    upstream = [torch.randn_like(shard) for shard in shards]

    def step() -> None:
        torch.autograd.backward(model(Scattered(shards)), upstream)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_large_tensors_go_through_the_fused_kernels(monkeypatch):
    calls: list[str] = []
    for name in ("stats", "elemt", "backward_reduce", "backward_elemt"):
        kernel = getattr(torch, f"batch_norm_{name}")

        def noting(*args, name=name, kernel=kernel):
            calls.append(name)
            return kernel(*args)

        monkeypatch.setattr(torch, f"batch_norm_{name}", noting)
    model = DataParallel(SynchronizedBatchNorm2d(3).to(HOME), [HOME] * 2)
    y = model(torch.randn(4, 3, 5, 5, device=HOME, requires_grad=True))
    y.backward(torch.randn_like(y))
    assert sorted(calls) == sorted(["stats", "elemt", "backward_reduce", "backward_elemt"] * 2)


@every_list
def test_a_forward_in_a_stream_of_the_callers_is_in_order(devices):
    layer = randomized(nn.BatchNorm2d(3)).to(devices[0])
    model = DataParallel(convert_model(copy.deepcopy(layer)), devices)
    x = torch.randn(2 * len(devices), 3, 256, 256, device=devices[0])
    expected = layer(x.exp())
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            busy = torch.randn(2048, 2048, device=devices[0])
            for _ in range(10):  # what follows would come too early if it did not wait for this
                busy = busy @ busy / 2048
            y = model(x.exp() + 0 * busy.sum().nan_to_num())
    side.synchronize()
    torch.testing.assert_close(y, expected)


@every_list
def test_second_derivatives(devices):
    layer = randomized(SynchronizedBatchNorm2d(3).double()).to(devices[0])
    model = DataParallel(layer, devices)
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, device=devices[0], requires_grad=True)
    torch.autograd.gradgradcheck(model, (x,))


@every_list
def test_a_parameter_that_no_replica_uses_gets_no_gradient(devices):
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).to(devices[0])
    replicas = replicate(net, devices)
    replicas[0][0].weight.sum().backward()
    assert net[0].weight.grad is not None
    assert net[1].weight.grad is None


@every_list
@pytest.mark.parametrize("name", CASES)
def test_collectives_and_their_derivatives_equal_the_oracle(name, devices):
    case = CASES[name]
    inputs = leaves(case, len(devices))
    there = [tuple(x.to(d) for x in own) for own, d in zip(inputs, devices, strict=True)]
    outputs = in_replicas(case.call, there, devices)
    assert all(
        y.device == torch.device(d) for own, d in zip(outputs, devices, strict=True) for y in own
    )
    home = [tuple(y.cpu() for y in own) for own in outputs]
    expected = case.oracle(inputs)
    torch.testing.assert_close(home, expected)
    torch.testing.assert_close(derivatives(home, inputs), derivatives(expected, inputs))
