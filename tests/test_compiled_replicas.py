"""`torch.compile` around, inside and beside replicas: the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from replication import DataParallel
from syncbn import convert_model, verify
from tests.kit.programs import needs_cpp_compiler
from tests.kit.ranks import needs_gloo, run_ranks

pytestmark = pytest.mark.slow

#: The first two trace and differentiate as the last one does, which needs a C++ compiler.
BACKENDS = ["eager", "aot_eager", "inductor"]
backends = pytest.mark.parametrize(
    "backend", [*BACKENDS[:2], pytest.param(BACKENDS[2], marks=needs_cpp_compiler)]
)


@pytest.fixture(scope="module", autouse=True)
def compiler_in_this_process() -> Iterator[None]:
    """Starts no pool of processes and threads for kernels that take a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Removes the functions that other tests have compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        torch.compiler.reset()
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*layers, nn.BatchNorm1d(5)).double()


def data() -> tuple[Tensor, Tensor]:
    """A batch that two replicas share unevenly, and an upstream gradient."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 3, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(7, 5, dtype=torch.float64, generator=generator)


def stepped(
    model: Callable[[Tensor], Tensor], net: nn.Module, share: slice = slice(None), scale: int = 1
) -> list[Tensor]:
    """What two steps with a share of the batch give: outputs, gradients and buffers."""
    x, upstream = (tensor[share] for tensor in data())
    found = []
    for factor in (1, 2):
        y = model(factor * x)
        y.backward(scale * upstream)
        found += [y.detach(), *(p.grad.clone() for p in net.parameters())]
        found += [b.clone() for b in net.buffers()]
    return found


def assert_is_that_of_one_device(found: list[Tensor]) -> None:
    plain = network()
    torch.testing.assert_close(found, stepped(plain, plain), rtol=1e-9, atol=1e-9)


# How torch's own operators become C++ is the same as in training.
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_evaluation_compiles_into_one_graph(backend):
    net = convert_model(network()).eval()
    x, _ = data()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), network().eval()(x))


@backends
def test_training_without_replicas_compiles_into_one_graph(backend):
    net = convert_model(network())
    assert_is_that_of_one_device(stepped(torch.compile(net, backend=backend, fullgraph=True), net))


def in_place(net: nn.Module, backend: str) -> nn.Module:
    net.compile(backend=backend)
    return DataParallel(net, ["cpu"] * 2)


def wrapped(net: nn.Module, backend: str) -> nn.Module:
    return DataParallel(torch.compile(net, backend=backend), ["cpu"] * 2)


def layers_wrapped(net: nn.Sequential, backend: str) -> nn.Module:
    for index in (0, 1, 4):
        net[index] = torch.compile(net[index], backend=backend)
    return DataParallel(net, ["cpu"] * 2)


def replicas_wrapped(net: nn.Module, backend: str) -> nn.Module:
    return torch.compile(DataParallel(net, ["cpu"] * 2), backend=backend)


ARRANGEMENTS = [in_place, wrapped, layers_wrapped, replicas_wrapped]


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_replicas_of_what_is_compiled_train_as_one_device(arrange, backend):
    net = convert_model(network())
    assert_is_that_of_one_device(stepped(arrange(net, backend), net))


class Compiled(nn.Module):
    """A network whose forward is a compiled function, which all replicas call at once."""

    def __init__(self, net: nn.Module, backend: str) -> None:
        super().__init__()
        self.net = net
        self.function = torch.compile(lambda net, x: net(x), backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net, x)


@backends
def test_a_compiled_function_is_called_by_several_replicas(backend):
    net = convert_model(network())
    assert_is_that_of_one_device(stepped(DataParallel(Compiled(net, backend), ["cpu"] * 3), net))


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_what_is_compiled_can_be_verified(arrange):
    x, _ = data()
    assert verify(arrange(convert_model(network()), "eager"), x, ["cpu"] * 2)
    difference = verify(arrange(network(), "eager"), x, ["cpu"] * 2).first_difference
    assert "BatchNorm" in difference.where


def test_callback_of_a_compiled_wrapper_is_called_for_the_wrapped_module():
    calls = []

    class Called(nn.Linear):
        def __data_parallel_replicate__(self, ctx, copy_id):
            calls.append(copy_id)

    wrapper = torch.compile(Called(3, 2), backend="eager")
    DataParallel(nn.Sequential(wrapper), ["cpu"] * 2)(torch.randn(4, 3))
    assert calls == [0, 1]


def in_processes(rank: int) -> list[list[Tensor]]:
    """Steps of networks that are compiled before and after DDP wraps them."""
    warnings.simplefilter("ignore")  # the compiler's own
    found = []
    for compiles_first in (True, False):
        net = convert_model(network())
        if compiles_first:
            model = DistributedDataParallel(torch.compile(net, backend="eager"))
        else:
            model = torch.compile(DistributedDataParallel(net), backend="eager")
        share = slice(4) if rank == 0 else slice(4, None)
        found.append(stepped(model, net, share, scale=2))  # DDP takes the mean over the ranks
    return found


@needs_gloo
def test_compiled_networks_train_between_processes():
    plain = network()
    expected = stepped(plain, plain)
    per_step = len(expected) // 2
    for first, second in zip(*run_ranks(2, in_processes), strict=True):
        joined = list(first)
        for index in (0, per_step):
            joined[index] = torch.cat([first[index], second[index]])
        torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-9)
