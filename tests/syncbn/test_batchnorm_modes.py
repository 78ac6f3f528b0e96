"""Layers in training and in evaluation, together and in turn, as users have reported them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel, execute_replication_callbacks, replicate
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.kit.shards import randomized
from tests.kit.wrappers import WRAPS


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("replica", range(3))
@pytest.mark.parametrize("connected", [True, False])
def test_a_single_replica_evaluates_alone(track, replica, connected):
    """Clause 2b: evaluation never communicates (pytorch#48988, #22538).

    It does not warn that it is not connected.
    """
    layer = SynchronizedBatchNorm1d(3, track_running_stats=track).eval()
    replicas = replicate(layer, ["cpu"] * 3)
    if connected:
        execute_replication_callbacks(replicas)
    x = torch.randn(4, 3)
    expected = nn.BatchNorm1d(3, track_running_stats=track).eval()(x)
    assert torch.equal(replicas[replica](x), expected)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("frozen", [[1], [3], [1, 5], [1, 3, 5]], ids=str)
def test_only_layers_in_training_communicate(wrap, frozen):
    """Clause 2b: evaluation never communicates (mmengine#1624, pytorch-deeplab-xception#140).

    Frozen before the conversion.
    """
    layers = [layer for i in range(3) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))]
    net = randomized(nn.Sequential(*layers)).double()
    for index in frozen:
        net[index].eval().requires_grad_(False)
    twin = copy.deepcopy(net)
    convert_model(net)
    assert [layer.training for layer in net] == [layer.training for layer in twin]
    assert [p.requires_grad for p in net.parameters()] == [
        p.requires_grad for p in twin.parameters()
    ]
    run = wrap(net)
    for samples in (7, 4):
        x, dy = torch.randn(2, samples, 3, dtype=torch.float64)
        seen = []
        for forward, module in ((run, net), (twin, twin)):
            leaf = x.clone().requires_grad_()
            y = forward(leaf)
            y.backward(dy)
            grads = [p.grad for p in module.parameters()]
            seen.append([y, leaf.grad, grads, *module.buffers()])
        torch.testing.assert_close(*seen)
    net.train()
    twin.train()
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(run(x), twin(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_buffers_that_are_not_tracked_for_a_while_stay_as_they_are(dtype):
    """An infinite statistic times a momentum of 0 is NaN."""
    layer = SynchronizedBatchNorm1d(3)
    layer(torch.randn(4, 3))
    layer.track_running_stats = False
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(4, 3, dtype=dtype)
    expected = nn.functional.batch_norm(x.float(), None, None, training=True)
    torch.testing.assert_close(layer(x), expected.to(dtype), rtol=1e-2, atol=1e-2)
    layer(torch.full((4, 3), float("inf"), dtype=dtype))
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert layer.eval()(x).isfinite().all()  # with the buffers


def test_evaluation_in_the_middle_of_an_epoch_changes_nothing():
    """A training forward, an evaluation, and the backward of the former."""
    net = randomized(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).double()
    model = DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * 3)
    x, dy, other = torch.randn(3, 7, 3, dtype=torch.float64)
    seen = []
    for trained in (net, model):
        leaf = x.clone().requires_grad_()
        y = trained.train()(leaf)
        evaluated = trained.eval()(other)
        y.backward(dy)
        seen.append([y, evaluated, leaf.grad, *(p.grad for p in trained.parameters())])
        seen[-1] += trained.buffers()
    torch.testing.assert_close(*seen)


FIRSTS: dict[str, Callable[[DataParallel, Tensor], Tensor]] = {
    "a short batch": lambda model, x: model(x),
    "the module itself": lambda model, x: getattr(model, "module", model)(x),
    "another model": lambda model, x: (
        DataParallel(model.module, ["cpu"])(x) if isinstance(model, DataParallel) else model(x)
    ),
}


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_forward_of_one_replica_and_one_of_several_before_their_backward(first, momentum):
    """pytorch#24397. As when gradients are accumulated, or of two forwards at once."""
    net = randomized(nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Tanh())).double()
    model = DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * 3)
    x = torch.randn(7, 3, 2, dtype=torch.float64)
    dy = torch.randn_like(x)
    seen = []
    for trained in (net, model):
        leaf = x.clone().requires_grad_()
        short, whole = FIRSTS[first](trained, leaf[:1]), trained(leaf)
        torch.autograd.backward([short, whole], [dy[:1].cos(), dy])
        seen.append([leaf.grad, *(p.grad for p in trained.parameters()), *trained.buffers()])
    torch.testing.assert_close(*seen)
