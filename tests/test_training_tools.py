"""What torch offers beside the training loop, around and inside replicas: one device's numbers.

Averages of weights, parametrizations, functional calls, scaled losses. Each use is run twice over
some batches, on a network with `nn.BatchNorm` that sees them whole, and on replicas of the
converted one. Everything it gives, gradients, parameters and buffers must agree.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from syncbn import convert_model
from tests.kit.layers import Numbered
from tests.kit.shards import randomized
from tests.kit.steps import assert_alike, batch, inner, network
from tests.kit.wrappers import as_torch_does, ours

pytestmark = pytest.mark.slow

#: None divides by 3; the second keeps two of three replicas busy.
SIZES = (7, 4, 5, 8)

setups = pytest.mark.parametrize(("wrap", "n"), [(ours, 3), (as_torch_does, 2)])

Batches = list[tuple[Tensor, Tensor]]
Use = Callable[[nn.Module, Batches], Sequence[Any]]


def assert_trains_alike(
    use: Use,
    wrap: Callable[[nn.Module, int], nn.Module],
    n: int,
    make: Callable[[], nn.Module] = network,
    **tolerances: float,
) -> None:
    """Asserts that ``use(model, batches)`` gives and leaves the same with and without replicas."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make())  # made twice, because not every network can be copied
    model = wrap(convert_model(nets[1]), n)
    assert_alike(lambda one: use(one, [batch(n) for n in SIZES]), nets[0], model, **tolerances)


def sgd(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[Tensor]:
    """What each step gives."""
    seen: list[Tensor] = []
    for x, dy in batches:
        x.requires_grad_()
        optimizer.zero_grad()
        y = model(x)
        y.backward(dy)
        optimizer.step()
        seen += [y, x.grad]
    return seen


def train_and_evaluate(model: nn.Module, batches: Batches) -> list[Any]:
    seen = train(model, sgd(model), batches)
    return [*seen, model.eval()(batches[0][0])]


# -- frozen for a while ------------------------------------------------------------------------


FREEZES: dict[str, Callable[[Any], object]] = {
    "one layer in eval": lambda net: net[0].eval(),
    "all layers in eval": lambda net: [net[0].eval(), net[2].eval()],
    "a block": lambda net: net[:3].eval().requires_grad_(False),
    "a block that learns statistics": lambda net: net[:3].requires_grad_(False),
    "weights": lambda net: [net[i].weight.requires_grad_(False) for i in (0, 1, 2, 5)],
    "all but the normalizations": lambda net: [net[i].requires_grad_(False) for i in (1, 5)],
}


@setups
@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
def test_frozen_parts_stay_and_train_again_after_unfreezing(freeze, n, wrap):
    def use(model: nn.Module, batches: Batches) -> list[Tensor]:
        freeze(inner(model))
        optimizer = sgd(model)
        seen = train(model, optimizer, batches[:2])
        seen += copy.deepcopy(list(model.state_dict().values()))
        model.train().requires_grad_(True)
        return seen + train(model, optimizer, batches[2:])

    assert_trains_alike(use, wrap, n)


# -- averages of weights -----------------------------------------------------------------------

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "plain": AveragedModel,
    "exponential, with buffers": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True
    ),
}


@setups
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("of", ["the model", "the module"])
def test_weight_average_follows_the_training_without_changing_it(average, of, n, wrap):
    """It evaluates, and trains, on its own replicas if the model does."""

    def use(model: nn.Module, batches: Batches) -> list[Any]:
        averaged = model if of == "the model" else inner(model)
        optimizer = sgd(model)
        mean = None
        seen: list[Any] = []
        for x, dy in batches:
            optimizer.zero_grad()
            y = model(x)
            if mean is None:  # while a graph is there
                mean = average(averaged)
            y.backward(dy)
            optimizer.step()
            mean.update_parameters(averaged)
            seen += [mean.eval()(x), mean.train()(x)]
        return [*seen, list(mean.state_dict().values())]

    assert_trains_alike(use, wrap, n)


ARRANGED: dict[str, Callable[[Any, Any], nn.Module]] = {
    "the model": lambda model, wrap: model,
    "an average of the model": lambda model, wrap: AveragedModel(model),
    "replicas of an average": lambda model, wrap: wrap(AveragedModel(inner(model))),
}


@setups
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("arrange", ARRANGED.values(), ids=ARRANGED)
def test_update_bn_estimates_the_statistics_over_all_batches(arrange, momentum, n, wrap):
    def use(model: nn.Module, batches: Batches) -> list[Any]:
        replicated = isinstance(model, nn.DataParallel)
        arranged = arrange(model, lambda net: wrap(net, n) if replicated else net)
        train(model, sgd(model), batches)
        update_bn(batches[:3], arranged.eval())
        assert not arranged.training
        norms = [layer for layer in arranged.modules() if isinstance(layer, nn.BatchNorm1d)]
        assert [layer.momentum for layer in norms] == [momentum] * 2
        return [arranged(batches[3][0]), *arranged.buffers()]

    def make() -> nn.Module:
        net = network()
        net[0].momentum = net[2].momentum = momentum
        return net

    assert_trains_alike(use, wrap, n, make)


# -- functional calls --------------------------------------------------------------------------


@setups
@pytest.mark.parametrize("which", ["parameters", "buffers too"])
def test_a_functional_call_uses_what_it_is_given(which, n, wrap):
    """Gradients arrive there, and what is trainable; the model's own keep out of it."""

    def use(model: nn.Module, batches: Batches) -> list[Any]:
        holder = nn.Sequential(model)
        parameters = {
            name: torch.randn_like(parameter).requires_grad_()
            for name, parameter in holder.named_parameters()
        }
        buffers = {}
        if which == "buffers too":
            buffers = {name: (buffer + 2).clone() for name, buffer in holder.named_buffers()}
        outputs = [functional_call(holder, {**parameters, **buffers}, (x,)) for x, _ in batches]
        holder.eval()
        outputs.append(functional_call(holder, {**parameters, **buffers}, (batches[0][0],)))
        upstream = [dy for _, dy in batches] + [batches[0][1].cos()]
        torch.autograd.backward(outputs, upstream)
        assert all(parameter.grad is None for parameter in model.parameters())
        return [outputs, [p.grad for p in parameters.values()], list(buffers.values())]

    assert_trains_alike(use, wrap, n)


# -- parametrizations --------------------------------------------------------------------------


class Scaled(nn.Module):
    """Has a parameter, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (self.scale + self.calls)


def old(function: Callable[..., object], *args: Any) -> None:
    """A hook of the older kind, which newer releases of torch advise against."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        function(*args)


#: Each takes a module, and the name of its weight if that is another than "weight".
TOOLS: dict[str, Callable[..., Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": partial(parametrizations.spectral_norm, n_power_iterations=2),
    **{
        f"orthogonal, {tool}": partial(parametrizations.orthogonal, orthogonal_map=tool)
        for tool in ("matrix_exp", "cayley", "householder")
    },
    "own": lambda m: register_parametrization(m, "weight", Scaled().double()),
    "a chain": lambda m: parametrizations.spectral_norm(TOOLS["own"](m)),
    "old weight_norm": partial(old, nn.utils.weight_norm),
    "old spectral_norm": partial(old, nn.utils.spectral_norm),
    "pruned": lambda m, name="weight": prune.random_unstructured(m, name, amount=3),
}


def square(*tools: Callable[[Any], object]) -> nn.Module:
    """Takes ``(n, 3, 2)`` to ``(n, 2)``; the tools apply to its two linear layers."""
    layers = [nn.Flatten(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)]
    net = randomized(nn.Sequential(*layers)).double()
    for tool in tools:
        tool(net[1])
        tool(net[4])
    return net


@setups
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_parametrized_network_trains_like_one_device(tool, n, wrap):
    """So do its buffers: a power iteration writes them once per forward."""
    assert_trains_alike(train_and_evaluate, wrap, n, lambda: square(tool))


@pytest.mark.parametrize("tool", ["weight_norm", "old weight_norm", "old spectral_norm", "pruned"])
def test_a_recurrent_weight_may_be_parametrized(tool):
    """It is also one of the flat weights of the layer."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = nn.LSTM(2, 4, batch_first=True), nn.BatchNorm1d(3)
            self.head = nn.Linear(12, 2)
            self.double()
            TOOLS[tool](self.rnn, "weight_hh_l0")

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.rnn(x)[0]).flatten(1))

    assert_trains_alike(train_and_evaluate, ours, 3, Recurrent)


@setups
def test_the_normalization_itself_may_be_parametrized_once_it_is_converted(n, wrap):
    def use(model: nn.Module, batches: Batches) -> list[Any]:
        register_parametrization(inner(model)[0], "weight", Scaled().double())
        parametrizations.spectral_norm(inner(model)[2])
        seen = train_and_evaluate(model, batches)
        remove_parametrizations(inner(model)[0], "weight")
        return [*seen, *train_and_evaluate(model.train(), batches)]

    assert_trains_alike(use, wrap, n)


# -- scaled losses -----------------------------------------------------------------------------


class Overflows(Numbered):
    """Passes on its input; multiplies its gradient by infinity in the last of the replicas."""

    active = False

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        self.is_last = copy_id == ctx.num_copies - 1

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if self.active and (self.copy_id is None or self.is_last):
            x.register_hook(lambda grad: grad * float("inf"))
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_whose_gradient_overflows_in_one_replica_is_skipped(dtype):
    """Under autocast. The scale has the same history; numbers agree as far as the dtype goes."""

    def use(model: nn.Module, batches: Batches) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales, moved, dtypes = [], [], []
        for step, (x, dy) in enumerate(batches * 2):
            before = parameters_to_vector(model.parameters()).detach()
            inner(model)[-1].active = step in (1, 6)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                y = model(x.float())
                dtypes.append(y.dtype)
                loss = (y * dy).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(not parameters_to_vector(model.parameters()).equal(before))
        assert moved == [True, False, True, True, True, True, False, True]
        assert scales == [1024, 512, 512, 1024, 1024, 2048, 1024, 1024]
        assert set(dtypes) == {dtype}
        return []

    eps = torch.finfo(dtype).eps
    assert_trains_alike(
        use, ours, 3, lambda: network().append(Overflows()).float(), rtol=8 * eps, atol=4 * eps
    )
