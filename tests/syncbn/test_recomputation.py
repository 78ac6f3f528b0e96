"""Activation checkpoints inside replicas: the same gradients, nothing trainable twice, no waiting.

mapillary/inplace_abn#48, #60, pytorch#43946 (stuck), #96136 (trainable twice).
"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from replication import DataParallel, ReplicaAware, ReplicationError
from syncbn import SynchronizedBatchNorm1d, convert_model
from syncbn.replicas import PastCall, recall
from syncbn.statistics import KernelMoments
from tests.kit.devices import HOME, several
from tests.kit.memory import freed
from tests.kit.shards import Sharded, randomized, run_sharded

pytestmark = pytest.mark.accelerator

Forward = Callable[[Tensor], Tensor]

aten = torch.ops.aten


def recomputed(function: Forward, **options: Any) -> Forward:
    return partial(checkpoint, function, use_reentrant=False, **options)


def saving(policy: Any) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


def plain(function: Forward) -> Forward:
    """Takes the place of `recomputed` where nothing is recomputed."""
    return function


class Body(nn.Module):
    """Runs ``function(norm, x)``, and what follows it, in a checkpoint or as ``wrap`` says."""

    def __init__(
        self,
        function: Callable[[nn.Module, Tensor], Tensor] = lambda norm, x: norm(x),
        wrap: Callable[[Forward], Forward] = recomputed,
        head: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.norm, self.head = SynchronizedBatchNorm1d(3, **options), head or nn.Identity()
        self.function, self.wrap = function, wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(lambda x: self.head(self.function(self.norm, x)))(x)


class Net(nn.Module):
    """Two layers, one of them called twice. Any part may be in a checkpoint."""

    def __init__(self, where: str = "nowhere") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.norm, self.shared = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)
        self.where = where

    def body(self, x: Tensor) -> Tensor:
        return self.tail(self.shared(torch.relu(self.norm(self.first(x)))))

    def tail(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.second(x)))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.where)(x)  # type: ignore[no-any-return]

    def nowhere(self, x: Tensor) -> Tensor:
        return self.body(x)

    def around_each_layer(self, x: Tensor) -> Tensor:
        norm, shared = recomputed(self.norm), recomputed(self.shared)
        x = shared(torch.relu(norm(self.first(x))))
        return torch.tanh(shared(self.second(x)))

    def around_several_layers(self, x: Tensor) -> Tensor:
        return recomputed(self.tail)(self.shared(torch.relu(self.norm(self.first(x)))))

    def around_the_replica(self, x: Tensor) -> Tensor:
        return recomputed(self.body)(x)

    def without_early_stop(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return recomputed(self.body)(x)

    def nested(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return recomputed(self.tail)(self.shared(torch.relu(self.norm(self.first(x)))))

        return recomputed(recomputed(inner))(x)

    def saving_everything(self, x: Tensor) -> Tensor:
        options = saving(lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        return recomputed(self.body, **options)(x)

    def saving_some_operations(self, x: Tensor) -> Tensor:
        """Among them such as the layers consist of."""
        some = [aten.addmm.default, aten.sum.dim_IntList, aten.mul.Tensor, aten.add.Tensor]
        return recomputed(self.body, **saving(some))(x)


PLACES = [
    "around_each_layer",
    "around_several_layers",
    "around_the_replica",
    "without_early_stop",
    "nested",
]
SELECTIVE_PLACES = ["saving_everything", "saving_some_operations"]


def step(model: Forward, net: nn.Module, order: str = "first") -> list[Tensor]:
    """Output, buffers, and gradients: the first ones, the same of a second use, or second ones."""
    generator = torch.Generator(HOME).manual_seed(0)
    x, dy, direction = torch.randn(3, 9, 4, generator=generator, dtype=torch.float64)
    x = x[:, :3].clone().requires_grad_()
    y = model(x)
    inputs = [x, *net.parameters()]
    grads = torch.autograd.grad(
        y, inputs, dy, create_graph=order == "second", retain_graph=order != "first"
    )
    if order == "second":
        grads = torch.autograd.grad(grads[0], inputs[:2], direction[:, :3])
    elif order == "again":
        grads = torch.autograd.grad(y, inputs, dy)
    return [y.detach(), *grads, *net.buffers()]


@pytest.mark.parametrize(
    ("where", "order"),
    [
        *itertools.product(PLACES, ["first", "again", "second"]),
        *itertools.product(SELECTIVE_PLACES, ["first"]),  # torch's allow for one backward only
    ],
)
@pytest.mark.parametrize("sizes", [[5, 4], [3, 0, 6], [1, 1, 7]], ids=str)
def test_a_recomputation_gives_the_same_gradients_and_learns_nothing_twice(where, sizes, order):
    net = randomized(Net()).double()
    twin = convert_model(copy.deepcopy(net))
    twin.where = where
    torch.testing.assert_close(step(Sharded(twin, sizes), twin, order), step(net, net, order))


def test_groups_of_replicas_recompute_by_themselves():
    net = convert_model(randomized(Net()).double(), group_size=2)
    twin = copy.deepcopy(net)
    twin.where = "around_the_replica"
    expected = step(DataParallel(net, several(3)), net)
    torch.testing.assert_close(step(DataParallel(twin, several(3)), twin), expected)


@pytest.mark.parametrize("second", [False, True])
def test_one_replica_recomputes_while_the_others_do_not(second):
    """Also those do not whose outputs are unused, and those without a checkpoint."""
    shards = torch.randn(3, 4, 3, dtype=torch.float64)
    dy = torch.randn(4, 4, dtype=torch.float64)
    net = convert_model(randomized(Net()).double())
    grads = []
    for where in ("nowhere", "around_the_replica"):
        net.where = where
        leaves = [shard.clone().requires_grad_() for shard in shards]
        inputs, y = [*leaves, *net.parameters()], run_sharded(net, leaves)[1]
        found = torch.autograd.grad(y, inputs, dy, create_graph=second)
        if second:
            found = torch.autograd.grad(found[1].square().sum(), inputs[:3])
        grads.append(found)
    torch.testing.assert_close(*grads)


def test_replicas_whose_inputs_need_no_gradient_recompute():
    """The recomputation saves as many tensors as the forward: the layer itself has no graph."""
    x, dy = torch.randn(6, 3), torch.randn(6, 2)
    head, grads = nn.Linear(3, 2), []
    for wrap in (plain, recomputed):
        net = Body(wrap=wrap, head=copy.deepcopy(head), affine=False)
        DataParallel(net, several(2))(x).backward(dy)
        grads.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*grads)


@pytest.mark.usefixtures("joined_or_not")
@pytest.mark.parametrize("constant", [0, 1])
@pytest.mark.parametrize("affine", [True, False])
def test_a_replica_recomputes_whose_own_input_needs_no_gradient(affine, constant):
    dys, found = torch.randn(2, 4, 3).double(), []
    for wrap in (plain, recomputed):
        net = Body(wrap=wrap, head=nn.Tanh(), affine=affine).double()
        shards = [torch.linspace(0, i + 1, 12).double().view(4, 3) for i in range(2)]
        leaves = [shards[1 - constant].requires_grad_(), *net.parameters()]
        found.append(torch.autograd.grad(run_sharded(net, shards), leaves, [*dys]))
    torch.testing.assert_close(*found)


def test_a_checkpoint_around_the_whole_model_learns_once():
    """Its hooks do not reach the replicas; what it recomputes is another forward of all."""
    net = randomized(Net()).double()
    twin = convert_model(copy.deepcopy(net))
    model = DataParallel(twin, several(2))
    torch.testing.assert_close(
        step(recomputed(lambda x: model(x).exp()), twin), step(lambda x: net(x).exp(), net)
    )


@pytest.mark.filterwarnings("ignore:a DataParallel runs Sequential inside a replica")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("replicas", "group_size", "outer"),
    [
        (4, 2, 1),
        (3, 2, 1),
        pytest.param(2, None, 2, marks=pytest.mark.cpu("replicas of replicas are on one device")),
    ],
)
def test_running_statistics_of_parts_of_the_replicas_are_updated_once(
    replicas, group_size, outer, reentrant
):
    net = convert_model(nn.Sequential(nn.BatchNorm1d(3)), group_size=group_size)
    model = DataParallel(net, several(replicas))
    if outer > 1:
        model = DataParallel(nn.Sequential(model), several(outer))
    x = torch.randn(2 * replicas * outer, 3, requires_grad=True)
    checkpoint(lambda x: model(x).square(), x, use_reentrant=reentrant).sum().backward()
    assert net[0].num_batches_tracked == 1


def test_a_checkpoint_frees_the_activations():
    """What a replica keeps for the recomputation is not of the size of its input."""
    seen = []

    def watched(norm: nn.Module, x: Tensor) -> Tensor:
        x = x * 2
        seen.append(weakref.ref(x))
        return norm(x).tanh()

    y = DataParallel(Body(watched), several(2))(torch.randn(6, 3, requires_grad=True))
    assert len(seen) == 2
    assert freed(*seen)
    y.backward(torch.randn_like(y))
    assert len(seen) == 4


class Calls(nn.Module):
    """Calls one layer with each of several inputs, in a checkpoint each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = SynchronizedBatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([recomputed(self.norm)(part) for part in x.unbind(1)], 1)


@pytest.mark.parametrize("factor", [1.001, 3.0])
def test_calls_that_cannot_be_told_apart_are_an_error(factor):
    """Replica 0 sees the same in both calls. Replica 1 does not."""
    pair = torch.randn(4, 1, 3).repeat(1, 2, 1)
    pair[2:, 1] *= factor
    y = DataParallel(Calls(), several(2))(pair.requires_grad_())
    with pytest.raises(ReplicationError, match=r"`norm`, replica 0: .* called 2 times"):
        y.backward(torch.randn_like(y))


def gradient(calls: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(DataParallel(calls, several(2))(x), x, dy)
    return grad


def assert_recomputes_alike(call: Callable[[nn.Module, Tensor], Tensor], dtype: Any) -> None:
    x, dy = torch.randn(2, 6, 3).to(dtype)
    nets = [Body(call, wrap).to(dtype) for wrap in (plain, recomputed)]
    torch.testing.assert_close(*(gradient(net, x.clone().requires_grad_(), dy) for net in nets))


def test_calls_without_a_graph_are_made_again_as_such():
    def target(norm: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = norm(3 * x + 1)
        return torch.tanh(norm(x.square()) * scale)

    assert_recomputes_alike(target, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_a_recomputation_may_round_otherwise(dtype):
    """As it does where a device adds in no fixed order."""
    calls, eps = itertools.count(), torch.finfo(dtype).eps
    net = Body(lambda norm, x: norm(x + x * eps * (next(calls) % 2)))
    x = (torch.randn(4, 3) + 10).to(dtype).requires_grad_()
    y = DataParallel(net, several(2))(x)
    y.backward(torch.randn_like(y))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_layer_with_parameters_in_half_precision_is_recomputed(dtype):
    assert_recomputes_alike(lambda norm, x: norm(x).tanh(), dtype)  # saves the layer's output


def test_calls_whose_statistics_differ_by_rounding_count_as_equal():
    """As in an iteration that converges in one replica sooner than in another."""
    x = torch.randn(4, 1, 3, dtype=torch.float64).expand(-1, 2, -1).clone()
    x[2:, 1] *= 1 + 1e-12
    dy = torch.randn_like(x)
    calls = Calls().double()
    expected = [gradient(calls, part.clone().requires_grad_(), d) for part, d in parts(x, dy)]
    actual = gradient(calls, x.requires_grad_(), dy)
    torch.testing.assert_close(actual, torch.cat(expected, 1), rtol=1e-6, atol=1e-6)


def parts(*tensors: Tensor) -> Any:
    return zip(*(t.split(1, 1) for t in tensors), strict=True)


@pytest.mark.parametrize("values", [3, 1], ids=["some", "all"])
def test_values_that_are_no_numbers_are_told_apart(values):
    x = torch.randn(6, 3, 3)
    x[0, 0, :values] = float("nan")
    if values == 1:
        x[5, 1, 1] = float("inf")
    dy = torch.randn_like(x)
    got = gradient(Calls(), x.clone().requires_grad_(), dy)
    for i, (part, d) in enumerate(parts(x, dy)):
        expected = gradient(Calls(), part.clone().requires_grad_(), d)
        torch.testing.assert_close(got[:, i : i + 1], expected, equal_nan=True)


@pytest.mark.cpu("accelerators compare no moments of a single call: the host would wait")
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("before", [torch.neg, torch.tanh], ids=["alone", "behind saved tensors"])
@pytest.mark.parametrize("factor", [1.01, 2.0])
def test_a_recomputation_with_other_values_is_noticed(size, before, factor):
    """Dropout does so where replicas on one device draw from one generator.

    Also where the layer is the last to save a tensor: there a checkpoint ends the recomputation.
    """
    drawn = itertools.count()
    net = Body(lambda norm, x: norm(before(x) * (1.0 if next(drawn) < 2 else factor)))
    # Of mean 0 on each replica: the variance has to tell.
    x = size * torch.randn(2, 1, 3) * torch.tensor([[1.0], [-1.0]])
    y = DataParallel(net, several(2))(x.flatten(0, 1).requires_grad_())
    with pytest.raises(ReplicationError, match=r"`norm`, .* recomputed .*dropout"):
        y.backward(torch.randn_like(y))


def test_moments_of_a_constant_channel_may_differ_by_rounding():
    """As where a device adds in no fixed order: the deviation gives no scale for the mean."""
    mean, var = torch.tensor([[5.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
    own = KernelMoments(4, mean, (var + 1e-5).rsqrt(), 1e-5)
    past = PastCall(own, own, makes_graph=True, requires_grad=True)
    nearly = own._replace(mean=own.mean * (1 + 1e-12))
    assert recall([past], nearly, torch.zeros(4, 2), "`norm`, replica 0") is past


@pytest.mark.cpu("calls replicas with inputs of one device")
def test_another_call_in_backward_is_an_error():
    def calls_again(norm: nn.Module, x: Tensor) -> Tensor:
        y = norm(x)
        y.register_hook(lambda grad: grad + norm(torch.zeros(7, 3)).sum())
        return y

    y = DataParallel(Body(calls_again, plain), several(2))(torch.randn(4, 3, requires_grad=True))
    with pytest.raises(ReplicationError, match=r"`norm`, .* recomputed this layer .* .7 values"):
        y.backward(torch.randn_like(y))


@pytest.mark.cpu("backward runs in the caller's thread")
def test_a_layer_may_ask_whether_it_is_recomputed():
    answers: list[tuple[str, bool]] = []

    class Asks(ReplicaAware, nn.Module):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            super().__data_parallel_replicate__(ctx, copy_id)
            assert not self.group.recomputes

        def forward(self, x: Tensor) -> Tensor:
            answers.append((threading.current_thread().name, self.group.recomputes))
            return x.exp()

    class GlobalMoments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Asks()

        def forward(self, x: Tensor) -> Tensor:
            return recomputed(self.layer)(x)

    for model in (DataParallel(GlobalMoments(), several(2)), GlobalMoments()):
        y = model(torch.randn(4, 3, requires_grad=True))
        y.backward(torch.randn_like(y))
    here = threading.current_thread().name
    alone = [(here, False), (here, True)]
    assert sorted(answers[:2]) == [("replica-0", False), ("replica-1", False)]
    assert answers[2:] == [(here, True)] * 2 + alone


@pytest.mark.parametrize("skipped", [True, False], ids=["no backward", "partial backward"])
def test_a_checkpoint_without_a_whole_backward_is_freed(skipped):
    """As where a step is skipped for a loss that is NaN."""
    watched: list[Any] = []

    def watch(x: Tensor) -> Tensor:
        x = x.clone()
        watched.append(weakref.ref(x))
        return x

    net = Body(lambda norm, x: norm(x.exp()).sin(), lambda f: lambda x: recomputed(f)(watch(x)))
    model = DataParallel(net, several(2))
    x = torch.randn(8, 3, requires_grad=True)
    y = model(x)
    if not skipped:
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    del y, model
    gc.collect()
    assert freed(*watched)
