"""What people do with autograd, around and inside replicas: always the numbers of one device.

Each use is run twice, on a network with `nn.BatchNorm` that sees the whole batch, and on replicas
of the converted one with uneven shards; everything it gives, and all gradients and buffers that
it leaves behind, must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from replication import DataParallel
from replication.sync.lifecycle import this_thread
from syncbn import convert_model
from tests.kit import steps
from tests.kit.deadlines import soon
from tests.kit.devices import several
from tests.kit.memory import no_garbage_collection
from tests.kit.shards import not_joined_only, randomized
from tests.kit.threads import outcome_of, together, values

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("joined_or_not")]

#: Three replicas have 3, 3 and 1 of them.
SAMPLES = 7

Use = Callable[[nn.Module, Tensor, Tensor], Sequence[Any]]


def network(*after: nn.Module) -> nn.Module:
    """A normalization between two layers; ``after`` comes right behind it."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), *after, nn.Tanh(), nn.Linear(4, 2)]
    return randomized(nn.Sequential(*layers).double())


def assert_alike(use: Use, net: nn.Module | None = None, **options: Any) -> None:
    """Asserts that ``use(model, x, dy)`` gives and leaves the same with and without replicas."""
    net = network() if net is None else net
    replicated = DataParallel(convert_model(copy.deepcopy(net)), several(3), **options)

    def run(model: nn.Module) -> list[Any]:
        x = torch.randn(SAMPLES, 3, dtype=torch.float64, requires_grad=True)
        return [*use(model, x, torch.randn(SAMPLES, 2, dtype=torch.float64)), x.grad]

    steps.assert_alike(run, net, replicated)


def forward_and_backward(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = model(x)
    y.backward(dy)
    return [y]


# -- several forwards, several backwards -------------------------------------------------------


def test_two_forwards_and_several_backwards():
    """pytorch#24397. And further ones through the same graph."""

    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        first, second = model(x), model(x.square() + 1)
        loss = first * dy + second * first.cos()
        loss.backward(dy, retain_graph=True)
        once = [parameter.grad.clone() for parameter in model.parameters()]
        loss.backward(dy.cos(), retain_graph=True)
        loss.backward(dy.sin())
        return [first, second, *once]

    assert_alike(use)


SUBSETS = [["x"], ["1.weight"], ["1.bias"], ["0.weight"], ["3.bias"], ["x", "1.weight", "0.bias"]]


def leaf_of(model: nn.Module, x: Tensor, name: str) -> Tensor:
    return x if name == "x" else getattr(model, "module", model).get_parameter(name)


@pytest.mark.parametrize("names", SUBSETS, ids=" ".join)
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_gradients_of_some_leaves_only(names, by):
    """Before and after a backward through the whole graph."""

    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        leaves = [leaf_of(model, x, name) for name in names]
        y, results = model(x), []
        for retained in (True, False):
            if by == "grad":
                results += torch.autograd.grad(y, leaves, dy, retain_graph=True)
            else:
                y.backward(dy, retain_graph=True, inputs=leaves)
            if retained:
                y.backward(dy.cos(), retain_graph=True)
        return results

    assert_alike(use)


# -- in place ----------------------------------------------------------------------------------


class PlusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


@pytest.mark.cpu("mixes the outputs of replicas on one device")
@pytest.mark.parametrize(
    "net",
    [
        network(nn.ReLU(inplace=True)),
        network(PlusOne(), nn.LeakyReLU(inplace=True)),
        network(PlusOne(), nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True), nn.BatchNorm1d(2)).double(),
    ],
    ids=["relu", "plus", "between", "before"],
)
def test_activations_in_place_around_the_layer(net):
    assert_alike(forward_and_backward, copy.deepcopy(net))  # it keeps gradients


# -- hooks -------------------------------------------------------------------------------------

MODULE_HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, y: y * 3),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0].sin(),)),
    "full backward": lambda m: m.register_full_backward_hook(lambda m, dx, dy: (dx[0] * 3,)),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, dy: (dy[0] * 3,)),
}


@pytest.mark.parametrize("kind", MODULE_HOOKS)
@pytest.mark.parametrize("where", ["", "0", "1"], ids=["root", "before", "layer"])
def test_hooks_of_modules_change_what_they_would_change_without_replicas(kind, where):
    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        handle = MODULE_HOOKS[kind](getattr(model, "module", model).get_submodule(where))
        hooked = model(x)
        hooked.backward(dy)
        handle.remove()
        plain = model(x)
        plain.backward(dy)
        return [hooked, plain]

    assert_alike(use)


def test_an_optimizer_may_step_inside_the_backward():
    """By hooks that run when a gradient has been accumulated; the next steps build on it."""

    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        outputs = []
        for _ in range(3):
            outputs.append(model(x))
            outputs[-1].backward(dy)
        return outputs

    assert_alike(use)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)


class HooksTensors(Layer):
    """Sets hooks on what goes in and out of its layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x.register_hook(lambda grad: grad * 5)
        y = self.layer(x)
        y.register_hook(lambda grad: grad.tanh())
        return self.head(y)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("creates_graph", [False, True])
def test_hooks_of_tensors_inside_the_forward(creates_graph):
    """They run once, also where the node differentiates its forward inside its backward."""

    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        y = model(x)
        y.retain_grad()
        y.backward(dy, create_graph=creates_graph)
        return [y, y.grad]

    assert_alike(use, HooksTensors().double())


# -- saved tensors -----------------------------------------------------------------------------


class OnCpu(Layer):
    """Moves what its layer saves for backward to the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return self.head(self.layer(x * 2))


def test_saving_on_the_cpu_inside_the_forward():
    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        y = model(x)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (dx.square().sum() + (y * dy).sum()).backward()
        return [y, dx]

    assert_alike(use, OnCpu().double())


class Copies(Layer):
    """Saves copies for backward and changes the layer's input in place afterwards.

    Some replicas do so, as the hooks are seen by their thread only.
    """

    def __init__(self, replicas: Sequence[int]) -> None:
        super().__init__()
        self.replicas = replicas

    def forward(self, x: Tensor) -> Tensor:
        place = this_thread.current
        if place is not None and place.replica not in self.replicas:
            return self.head(self.layer(x * 2))
        z = x * 2
        with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            y = self.layer(z)
        with torch.no_grad():
            z.zero_()
        return self.head(y)


@pytest.mark.parametrize("replicas", [[0], [1], [1, 2], [0, 1, 2]], ids=str)
def test_an_input_changed_in_place_behind_hooks_that_copy_it(replicas):
    assert_alike(forward_and_backward, Copies(replicas).double())


@pytest.mark.cpu("NumPy's arrays are on the CPU")
def test_hooks_on_saved_tensors_around_forward_and_backward():
    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        with saved_tensors_hooks(lambda tensor: tensor.numpy(force=True), torch.from_numpy):
            y = model(x).sin()
            y.backward(dy)
        return [y]

    pytest.importorskip("numpy")
    assert_alike(use)


# -- derivatives of derivatives ----------------------------------------------------------------


@pytest.mark.parametrize("function", ["jacobian", "hessian", "vjp", "vhp", "hvp"])
def test_functional_derivatives(function):
    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Any]:
        def loss(x: Tensor) -> Tensor:
            return (model(x).sin() * dy).sum()

        derive = getattr(torch.autograd.functional, function)
        if function == "jacobian":
            return [derive(model, x)]
        if function == "hessian":
            return [derive(loss, x)]
        return list(derive(loss, x, *([] if function == "vjp" else [x.cos()])))

    assert_alike(use)


# -- in training loops -------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [False, True])
def test_training_forward_may_come_between_an_evaluation_and_its_backward(trains):
    """On one device `nn.BatchNorm` returns a gradient of the training's statistics."""
    net = network()
    model = DataParallel(convert_model(copy.deepcopy(net)), several(3))
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(SAMPLES, 2, dtype=torch.float64)
    (expected,) = torch.autograd.grad(net.eval()(x), x, dy)
    evaluated = model.eval()(x)
    if trains:
        model.train()(x)
    (actual,) = torch.autograd.grad(evaluated, x, dy)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_detection():
    """It finds nothing where there is nothing, and the same as without replicas elsewhere."""
    errors = []

    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        with torch.autograd.detect_anomaly():
            y = model(x)
            y.backward(dy, retain_graph=True)
            nan = torch.full_like(dy, float("nan"))
            errors.append(str(outcome_of(lambda: torch.autograd.grad(y, x, nan)).error))
        return [y]

    assert_alike(use)
    assert all("returned nan values" in error for error in errors), errors


@pytest.mark.parametrize("elsewhere", ["forward", "backward", "both"])
def test_forward_and_backward_in_different_threads(elsewhere):
    def use(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        def call(step: Callable[[], Any], name: str) -> Any:
            return step() if elsewhere not in (name, "both") else values(together(step))[0]

        y = call(lambda: model(x), "forward")
        call(lambda: y.backward(dy), "backward")
        return [y]

    assert_alike(use)


# -- graphs that are dropped -------------------------------------------------------------------


class Watching(nn.Module):
    """Notes what passes it, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        self.seen.append(StorageWeakRef(x.untyped_storage()))
        return x


def fails(grad: Tensor) -> Tensor:
    raise ArithmeticError


DROPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "without a backward": lambda y, x: None,
    "after a backward": lambda y, x: y.backward(torch.randn_like(y)),
    "after one that retains it": lambda y, x: y.backward(torch.randn_like(y), retain_graph=True),
    "after a derivative": lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True),
    "after a partial backward": lambda y, x: y[:1].backward(torch.randn_like(y[:1])),
    "after a failed backward": lambda y, x: outcome_of(
        lambda: (y.register_hook(fails), (y * 1).backward(torch.randn_like(y)))
    ),
}


@not_joined_only
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_a_graph_is_freed_with_its_outputs(drop):
    watching = Watching()
    net = convert_model(network(watching, nn.BatchNorm1d(4)))
    net.insert(1, watching)  # before and behind the first normalization
    model = DataParallel(net, several(3))
    with no_garbage_collection():
        x = torch.randn(SAMPLES, 3, dtype=torch.float64, requires_grad=True)
        y = model(x)
        assert len(watching.seen) == 6
        assert not all(storage.expired() for storage in watching.seen)
        drop(y, x)
        del y
        assert soon(lambda: all(storage.expired() for storage in watching.seen))
