"""The guarantees on accelerators: of the machine, or simulated by `python -m tests.cuda`.

With lazy streams, a missing wait or a missing `record_stream` shows as wrong numbers here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from replication import DataParallel, ReplicasDiverged, Scattered
from syncbn import SynchronizedBatchNorm2d, channels, convert_model
from tests.kit.collectives import CASES, derivatives, in_replicas, leaves
from tests.kit.devices import ACCELERATORS, HOME, LISTS
from tests.kit.properties import pairwise
from tests.kit.shards import randomized

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not ACCELERATORS, reason="needs an accelerator"),
]

every_list = pytest.mark.parametrize("devices", LISTS.values(), ids=LISTS)
#: Layers refuse to mix accelerators with the CPU.
OF_ACCELERATORS = [devices for devices in LISTS.values() if "cpu" not in devices]
every_list_of_accelerators = pytest.mark.parametrize("devices", OF_ACCELERATORS, ids=str)
every_path = pytest.mark.parametrize("path", ["kernels", "textbook"], indirect=True)


@pytest.fixture(autouse=True)
def default_device() -> None:
    """Overrides the fixture of all other tests: these name their devices."""


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the kernels from accelerators for the textbook."""
    if request.param == "textbook":
        monkeypatch.setattr("syncbn.batchnorm.kernels_for", lambda kind: None)


@pairwise(
    devices=OF_ACCELERATORS,
    dtype=[torch.float32, torch.float16, torch.bfloat16],
    last=[False, True],
    mean=[0, 1e2],
)
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
    for index, (right, own, ours) in enumerate(zip(*results, strict=True)):
        # For a mean near zero, the ulp of the values that it is the mean of counts.
        scale = x.double().cpu() if index == len(results[0]) - 2 else right
        ulp = torch.finfo(dtype).eps * scale.abs().max()
        assert (ours - right).abs().max() <= 2 * (own - right).abs().max() + ulp


@contextmanager
def no_host_wait() -> Iterator[None]:
    """Fails where the host waits for a device, or copies from its own pageable memory."""
    if not torch.cuda.is_available():
        pytest.skip("torch reports waits for CUDA devices only")
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # torch says once that not all waits are found
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_path
@pytest.mark.parametrize("momentum", [0.1, None, 1], ids=str)
@every_list_of_accelerators
def test_the_host_does_not_wait_even_at_a_new_shape(devices, momentum, path):
    layer = SynchronizedBatchNorm2d(3, momentum=momentum)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.Conv2d(3, 2, 1)).to(devices[0])
    model = DataParallel(net, devices, gather_to_one_device=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(*sizes: int) -> None:
        shards = [
            torch.randn(2, 3, size, 4, device=d, requires_grad=True)
            for size, d in zip(sizes, devices, strict=True)
        ]
        outputs = model(Scattered(shards))
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        optimizer.step()

    step(*[4] * len(devices))
    with no_host_wait():
        step(*[4] * len(devices))
        step(*range(9, 9 + len(devices)))
    assert net[1].num_batches_tracked.item() == 3


def test_constants_are_filled_in_order_of_each_stream():
    device, numbers = torch.device(HOME), (3, 3, 5, 3)
    with streams_of_the_callers([HOME]):
        channels.constant_tensor(numbers, device, torch.float32)
    with streams_of_the_callers([HOME]):
        again = channels.constant_tensor(numbers, device, torch.float32)
        assert (again * 1).tolist() == list(numbers)


def test_a_constant_that_a_graph_fills_is_not_kept(monkeypatch):
    module, device = torch.get_device_module(HOME), torch.device(HOME)
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
    captured = channels.constant_tensor((977,), device, torch.float32)
    monkeypatch.undo()
    kept = channels.constant_tensor((977,), device, torch.float32)
    assert kept is not captured
    assert channels.constant_tensor((977,), device, torch.float32) is kept


@contextmanager
def streams_of_the_callers(devices: Iterable[str]) -> Iterator[None]:
    """Makes a new stream current on each device."""
    with ExitStack() as stack:
        for device in map(torch.device, devices):
            if device.type != "cpu":
                module = torch.get_device_module(device)
                stack.enter_context(module.stream(torch.Stream(device=device)))
        yield


class Checkpointed(nn.Sequential):
    """Recomputes in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@every_list_of_accelerators
def test_recomputations_are_in_order_with_the_streams_of_the_forward(devices):
    """Those that begin when the node of a later layer unpacks its input, on any device."""
    plain = nn.Sequential(*[randomized(nn.BatchNorm2d(3)).double() for _ in range(3)]).cpu()
    x, dy = torch.randn(2, 8, 3, 4, 4, dtype=torch.float64, device="cpu")
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(leaf), leaf, dy)
    with streams_of_the_callers(ACCELERATORS):
        layers = convert_model(copy.deepcopy(plain))
        model = DataParallel(Checkpointed(*layers).to(devices[0]), devices)
        leaf, upstream = x.to(devices[0]).requires_grad_(), dy.to(devices[0])
        (dx,) = torch.autograd.grad(model(leaf), leaf, upstream)
        torch.testing.assert_close(dx.cpu(), expected)


@every_list_of_accelerators
def test_second_derivatives(devices):
    layer = randomized(SynchronizedBatchNorm2d(2).double()).to(devices[0])
    model = DataParallel(layer, devices)
    x = torch.randn(4, 2, 1, 2, dtype=torch.float64, device=devices[0], requires_grad=True)
    # The engine threads of several devices add gradients in order of arrival.
    torch.autograd.gradgradcheck(model, (x,), nondet_tol=1e-12)


@every_list
@pytest.mark.parametrize("streams", [False, True], ids=["default streams", "new streams"])
@pytest.mark.parametrize("name", CASES)
# Of leaves whose gradients come from another device.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_collectives_and_their_derivatives_equal_the_oracle(name, devices, streams):
    case = CASES[name]
    inputs = leaves(case, len(devices))
    with streams_of_the_callers(ACCELERATORS if streams else []):
        there = [tuple(x.to(d) for x in own) for own, d in zip(inputs, devices, strict=True)]
        outputs = in_replicas(case.call, there, devices)
        assert all(
            y.device == torch.device(d)
            for own, d in zip(outputs, devices, strict=True)
            for y in own
        )
        home = [tuple(y.cpu() for y in own) for own in outputs]
        expected = case.oracle(inputs)
        torch.testing.assert_close(home, expected)
        torch.testing.assert_close(derivatives(home, inputs), derivatives(expected, inputs))


# -- devices by any name -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled",
    [
        lambda kind: [0, 1],
        lambda kind: [f"{kind}:0", f"{kind}:1"],
        lambda kind: [torch.device(kind, 0), 1],
        lambda kind: [kind, 1],
        lambda kind: None,
    ],
    ids=["indices", "strings", "devices", "without index", "default"],
)
def test_accelerators_are_found_by_any_spelling(spelled):
    if len(ACCELERATORS) != 2:
        pytest.skip("needs two accelerators")
    model = DataParallel(Where().to(HOME), spelled(torch.device(HOME).type))
    assert model.device_ids == [0, 1]
    assert (model.output_device, model.src_device_obj) == (0, torch.device(HOME))
    output = model(torch.zeros(4, 1, device=HOME))
    assert output.device == torch.device(HOME)
    assert output.flatten().tolist() == [0, 0, 1, 1]


class Where(nn.Module):
    """Adds the index of the device that is current in the replica's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        module = torch.get_device_module(x.device)
        assert x.device == self.weight.device == torch.zeros(1, device=x.device.type).device
        return x + module.current_device()


@every_list
def test_the_output_may_be_elsewhere(devices):
    net = nn.Linear(3, 2).to(devices[0])
    x = torch.randn(7, 3, device=devices[0])
    for target in (*ACCELERATORS, "cpu"):
        y = DataParallel(net, devices, output_device=target)(x)
        assert y.device == torch.device(target)
        torch.testing.assert_close(y.to(devices[0]), net(x))


# -- training ----------------------------------------------------------------------------------


@every_path
@every_list_of_accelerators
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_steps_of_an_optimizer_equal_one_device_on_the_cpu(devices, dims, path):
    """Uneven shards, and fewer samples than replicas."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    batch_norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    plain = nn.Sequential(conv(2, 4, 1), randomized(batch_norm(4)), nn.Tanh(), conv(4, 2, 1))
    plain = plain.double().cpu()
    model = DataParallel(convert_model(copy.deepcopy(plain)).to(devices[0]), devices)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model)]
    for samples in (7, 4, 1, 12):
        x, dy = torch.randn(2, samples, 2, *[2] * dims, dtype=torch.float64, device="cpu")
        for m, optimizer, device in zip(
            (plain, model), optimizers, ("cpu", devices[0]), strict=True
        ):
            optimizer.zero_grad()
            y = m(x.to(device))
            y.backward(dy.to(y.device))
            optimizer.step()
    torch.testing.assert_close(model.module.cpu().state_dict(), plain.state_dict())


def test_autocast_and_default_device_reach_every_replica():
    kind = torch.device(HOME).type
    model = DataParallel(nn.Linear(3, 2).to(HOME), ACCELERATORS * 2)
    with torch.autocast(kind, torch.bfloat16), torch.device(HOME):
        assert model(torch.randn(8, 3)).dtype == torch.bfloat16
    assert model(torch.randn(8, 3, device=HOME)).dtype == torch.float32


@pytest.mark.parametrize("devices", [LISTS["with the CPU"], LISTS["CPU first"]], ids=str)
def test_replicas_on_accelerators_and_on_the_cpu_are_not_normalized_together(devices):
    model = DataParallel(SynchronizedBatchNorm2d(3).to(devices[0]), devices)
    with pytest.raises(ReplicasDiverged, match=r"replicas? \d.*on the CPU\) of float32 \[3\]"):
        model(torch.randn(6, 3, 2, 2, device=devices[0]))
