"""The life of a model: copied, stored, sent, changed between forwards, and freed."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware, ReplicasDiverged
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.kit.deadlines import soon
from tests.kit.layers import FailsAt, LayerError, Repeat
from tests.kit.memory import freed, no_garbage_collection, pickled
from tests.kit.ranks import needs_gloo, run_ranks
from tests.kit.shards import randomized
from tests.kit.steps import assert_alike, inner

pytestmark = pytest.mark.slow

REPLICAS = 3


def network() -> nn.Module:
    layers = [nn.Linear(3, 4), nn.Identity(), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)]
    return randomized(nn.Sequential(*layers).double())


def replicated(net: nn.Module) -> DataParallel:
    return DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * REPLICAS)


def train(model: nn.Module, seeds: range = range(2)) -> list[Tensor]:
    """A few steps; the outputs, and what they have made of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    dtype = next(model.parameters()).dtype
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(7, 3, dtype=torch.float64, generator=generator).to(dtype)
        dy = torch.randn(7, 2, dtype=torch.float64, generator=generator).to(dtype)
        y = model(x)
        optimizer.zero_grad()
        if y.requires_grad:
            y.backward(dy)
            optimizer.step()
        outputs.append(y.detach())
    return [*outputs, *(tensor.clone() for tensor in model.state_dict().values())]


# -- copies ------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


DUPLICATES = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved_and_loaded}
duplicates = pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
wrapped = pytest.mark.parametrize("whole", [True, False], ids=["DataParallel", "module"])


def assert_independent(model: DataParallel, twin: nn.Module, net: nn.Module, steps: int) -> None:
    """Both are where one device is after ``steps``, and go on from there by themselves."""
    twin = twin if isinstance(twin, DataParallel) else DataParallel(twin, ["cpu"] * REPLICAS)
    train(net, range(steps))
    expected = train(copy.deepcopy(net), range(9, 12))
    for one, other in ((twin, model), (model, twin)):
        before = copy.deepcopy(other.state_dict())
        torch.testing.assert_close(train(one, range(9, 12)), expected)
        torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)


@duplicates
@wrapped
@pytest.mark.parametrize("steps", [0, 2])
def test_copy_trains_exactly_and_independently(duplicate, whole, steps):
    """Clause 7c: models can be copied and pickled."""
    net = network()
    model = replicated(net)
    train(model, range(steps))
    assert_independent(model, duplicate(model if whole else model.module), net, steps)


# -- other processes ---------------------------------------------------------------------------


def trained_further(rank: int, model: nn.Module) -> list[Tensor]:
    return train(model, range(2, 4))


@needs_gloo
def test_a_model_is_an_argument_of_another_process():
    """After use. Its tensors are in shared memory, as torch sends them: it is sent a copy."""
    net = network()
    model = replicated(net)
    torch.testing.assert_close(train(model), train(net))
    (there,) = run_ranks(1, trained_further, copy.deepcopy(model))
    expected = trained_further(0, net)
    torch.testing.assert_close(there, expected)
    torch.testing.assert_close(trained_further(0, model), expected)


# -- changed between forwards ------------------------------------------------------------------


def set_layer(index: int, make: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        torch.manual_seed(1)
        layer = make().double()
        inner(model)[index] = convert_model(layer) if model is not inner(model) else layer

    return change


def load_state(model: nn.Module) -> None:
    state = inner(model).state_dict()
    inner(model).load_state_dict({key: value * 2 for key, value in state.items()})


def append(model: nn.Module) -> None:
    set_layer(1, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))(model)
    inner(model)[3] = inner(model)[2]  # one layer in two places


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "normalization": set_layer(2, lambda: nn.BatchNorm1d(4, momentum=None, affine=False)),
    "linear": set_layer(0, lambda: nn.Linear(3, 4, bias=False)),
    "added and shared": append,
    "parameter": lambda model: setattr(
        inner(model)[2], "weight", nn.Parameter(torch.linspace(-1, 2, 4, dtype=torch.float64))
    ),
    "no parameter": lambda model: inner(model)[2].register_parameter("bias", None),
    "state dict": load_state,
    "evaluation": lambda model: model.eval(),
    "evaluation of one layer": lambda model: inner(model)[2].eval(),
    "frozen": lambda model: model.requires_grad_(False),
    "options": lambda model: vars(inner(model)[2]).update(momentum=0.7, eps=0.5),
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
}
TOLERANCES = {"float": 1e-4, "half": 0.02}


# A layer without batch norm is converted as well.
@pytest.mark.filterwarnings("ignore:convert_model found no batch norm")
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_be_changed_between_forwards(change):
    """It is changed, trained, brought back to float64 and to training, and trained again."""

    def use(model: nn.Module) -> list[Tensor]:
        seen = train(model)
        CHANGES[change](model)
        seen += train(model, range(2, 4))
        model.double().train().requires_grad_()
        seen += train(model, range(4, 6))
        model.zero_grad()  # the outputs have shown them, and rounding is coarse in float16
        return seen

    net, tolerance = network(), TOLERANCES.get(change, 1e-9)
    assert_alike(use, net, replicated(net), rtol=tolerance, atol=tolerance)


# -- freed, and nothing left -------------------------------------------------------------------


class Center(ReplicaAware, nn.Module):
    """Subtracts the mean of the replicas' means."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.group.all_reduce(x.mean(0), "mean")


def talking(middle: nn.Module) -> DataParallel:
    layers = [nn.Linear(3, 4), SynchronizedBatchNorm1d(4), middle, Center()]
    return DataParallel(nn.Sequential(*layers, nn.Linear(4, 2)), ["cpu"] * REPLICAS)


def forward(model: nn.Module) -> Tensor:
    return model(torch.randn(7, 3, requires_grad=True))


def backward(model: nn.Module) -> None:
    y = forward(model)
    y.backward(torch.randn_like(y))


def in_vain(model: nn.Module) -> None:
    with suppress(LayerError, ReplicasDiverged):
        forward(model)
        raise AssertionError("this forward should fail")


LIVES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "unused": (nn.Identity, lambda model: None),
    "forward": (nn.Identity, forward),
    "backward": (nn.Identity, backward),
    "failed": (lambda: FailsAt(1, LayerError), in_vain),
    "diverged": (lambda: Repeat(Center(), (1, 2, 1)), in_vain),
}
lives = pytest.mark.parametrize("life", LIVES)


@lives
def test_a_model_is_freed_by_reference_counting_alone(life):
    """Clause 7d: models can be freed."""
    make, live = LIVES[life]
    with no_garbage_collection():
        model = talking(make())
        for _ in range(2):
            live(model)
        gone = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
        del model
        assert freed(*gone)


def census() -> Counter[str]:
    """How many there are of what a forward makes, by class."""
    # By the type itself: some objects execute code when they are asked for their class.
    kinds = [type(thing) for thing in gc.get_objects()]
    counts = Counter(kind.__name__ for kind in kinds if is_of_a_forward(kind))
    counts["threads"] = threading.active_count()
    return counts


def is_of_a_forward(kind: type) -> bool:
    known = issubclass(kind, (Tensor, nn.Module, torch.autograd.function.BackwardCFunction))
    return known or str(kind.__module__).startswith(("replication.", "syncbn."))


@lives
def test_many_forwards_leave_nothing_behind(life):
    """Clause 7d: models can be freed."""
    make, live = LIVES[life]
    model = talking(make())
    live(model)
    with no_garbage_collection():
        before = census()
        for _ in range(20):
            live(model)
        # Threads end right after the caller goes on.
        assert soon(lambda: census() <= before), census() - before
