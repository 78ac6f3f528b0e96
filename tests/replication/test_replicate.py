"""Replicas on any list of devices. The "meta" device stands in for a second one."""

from __future__ import annotations

import importlib
import itertools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from replication import DataParallel, execute_replication_callbacks, replicate
from replication._torch import HOOKS
from syncbn import SynchronizedBatchNorm2d
from tests.kit.layers import Numbered
from tests.kit.memory import no_garbage_collection
from tests.kit.shards import BATCH, norm, whole_batch
from tests.kit.threads import profiled
from tests.kit.wrappers import WRAPS

CPU, META = torch.device("cpu"), torch.device("meta")


# -- devices -----------------------------------------------------------------------------------


def test_replicas_are_of_the_modules_class_and_leave_it_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ModuleList(), nn.ModuleDict())
    before = [dict(vars(module)) for module in net.modules()]
    for replica in replicate(net, ["cpu", "meta"]):
        assert [type(m) for m in replica.modules()] == [type(m) for m in net.modules()]
        assert all(m is not n for m, n in zip(replica.modules(), net.modules(), strict=True))
    assert [vars(module) for module in net.modules()] == before


# -- parameters --------------------------------------------------------------------------------


class Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_gradients_are_summed_in_replica_order(order):
    """Whatever the order in which the engine meets them."""
    # Added from left to right these give 1, from right to left 0.
    grads = [torch.tensor(value) for value in (1e8, -1e8, 1.0)]
    module = Weight()
    weights = [replica.weight for replica in replicate(module, ["cpu"] * 3)]
    sum(weights[i] * grads[i] for i in order).backward()
    assert module.weight.grad.item() == 1.0


def test_replicas_have_their_own_tensors_which_share_the_storage_of_the_parameters():
    net = nn.Linear(2, 2)
    replicas = replicate(net, ["cpu"] * 3)
    assert len({id(replica.weight) for replica in replicas}) == 3
    for replica in replicas:
        assert replica.weight.data_ptr() == net.weight.data_ptr()
        assert list(replica.parameters()) == []
        assert list(replica._former_parameters) == ["weight", "bias"]


def test_a_hook_on_a_replicas_parameter_gets_the_gradient_of_that_replica():
    weights = [replica.weight for replica in replicate(nn.Linear(1, 1, bias=False), ["cpu"] * 3)]
    seen = []
    for weight in weights:
        weight.register_hook(lambda grad: seen.append(grad.item()))
    sum(weight.sum() * 10**i for i, weight in enumerate(weights)).backward()
    assert sorted(seen) == [1.0, 10.0, 100.0]


def test_gradients_come_only_from_replicas_and_parameters_that_take_part():
    net = nn.ModuleList([Weight(2), Weight(2)])
    replicas = replicate(net, ["cpu"] * 3)
    (replicas[1][0].weight * torch.tensor([2.0, 3.0])).sum().backward()
    assert net[0].weight.grad.tolist() == [2, 3]
    assert net[1].weight.grad is None


def test_parameters_that_do_not_train_do_not_train_in_replicas():
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    net.count = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    for replica in replicate(net, ["cpu"] * 2):
        assert replica.weight.requires_grad
        assert not replica.bias.requires_grad
        assert replica.count.tolist() == [3, 4]


@pytest.mark.parametrize("detach", [False, True])
def test_detach_cuts_the_replicas_off(detach):
    net = nn.Linear(2, 2)
    net.register_buffer("trainable", torch.ones(2, requires_grad=True))
    for replica in replicate(net, ["cpu"] * 2, detach=detach):
        for tensor in (replica.weight, replica.bias, replica.trainable):
            assert tensor.requires_grad is not detach


def test_change_of_a_parameter_between_forward_and_backward_is_noticed():
    net, x = nn.Linear(2, 2), torch.randn(3, 2, requires_grad=True)
    y = replicate(net, ["cpu"] * 2)[0](x)
    with torch.no_grad():
        net.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Weighted(nn.Module):
    """Has any tensor as a parameter or as a buffer, as after a ``functional_call``."""

    def __init__(self, kind: str, tensor: Tensor) -> None:
        super().__init__()
        getattr(self, kind)["weight"] = tensor


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it first loads a jvp
@pytest.mark.parametrize("kind", ["_parameters", "_buffers"])
@pytest.mark.parametrize("grad", [True, False])
def test_derivatives_that_do_not_reach_replicas_are_refused(kind, grad):
    def first_weight(weight: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad):
            return replicate(Weighted(kind, weight), ["cpu"] * 2)[0].weight

    x = torch.ones(3)
    text = "torch.func transforms and forward-mode derivatives do not reach"
    with pytest.raises(NotImplementedError, match=text):
        torch.func.grad(lambda x: first_weight(x).sum())(x)
    with pytest.raises(NotImplementedError, match=text):
        torch.func.jvp(first_weight, (x,), (x,))
    with forward_ad.dual_level():
        assert first_weight(x) is not None
        with pytest.raises(NotImplementedError, match=text):
            first_weight(forward_ad.make_dual(x, x))


# -- buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [CPU, META], ids=str)
def test_copy_0_has_the_buffers_of_the_original_and_the_others_have_copies(last):
    net = nn.BatchNorm1d(2)
    first, second, third = replicate(net, ["cpu", "cpu", last])
    assert first.running_mean is net.running_mean
    assert third.running_mean.device == last
    second.running_mean.fill_(5)
    assert net.running_mean.tolist() == [0, 0]
    first.running_mean.fill_(6)
    assert (net.running_mean.tolist(), second.running_mean.tolist()) == ([6, 6], [5, 5])


def test_buffer_that_requires_grad_gets_the_summed_gradient():
    net = nn.Module()
    net.register_buffer("trainable", torch.ones(2, requires_grad=True))
    replicas = replicate(net, ["cpu"] * 3)
    assert {r.trainable.data_ptr() for r in replicas} == {net.trainable.data_ptr()}
    torch.autograd.backward(
        [replica.trainable * factor for factor, replica in enumerate(replicas, 1)],
        [torch.tensor([1.0, 10.0])] * 3,
    )
    assert net.trainable.grad.tolist() == [6, 60]


# -- structure ---------------------------------------------------------------------------------


def test_what_is_none_stays_none():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, track_running_stats=False))
    net.register_module("absent", None)
    for replica in replicate(net, ["cpu"] * 2):
        assert (replica.absent, replica[0].bias, replica[1].running_mean) == (None,) * 3
    assert replicate(net, []) == []


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (nn.ParameterList([torch.ones(2), torch.zeros(3)]), [0, 1]),
        (nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(3)}), ["a", "b"]),
    ],
)
def test_containers_of_parameters_are_replicated(net, names):
    *replicas, elsewhere = replicate(net, ["cpu", "cpu", "meta"])
    for replica in (*replicas, elsewhere):
        assert [tuple(replica[name].shape) for name in names] == [(2,), (3,)]
        assert len(replica) == 2
    assert {elsewhere[name].device for name in names} == {META}
    sum(replica[names[0]].sum() * i for i, replica in enumerate(replicas, 1)).backward()
    assert net[names[0]].grad.tolist() == [3, 3]


def test_tied_parameters_are_tied_in_each_copy():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    x, dy = torch.randn(3, 2), torch.randn(3, 2)
    (expected,) = torch.autograd.grad(net(x), net[0].weight, 2 * dy)
    replicas = replicate(net, ["cpu"] * 2)
    for replica in replicas:
        assert replica[0].weight is replica[1].weight
    (actual,) = torch.autograd.grad([r(x) for r in replicas], net[0].weight, [dy, dy])
    torch.testing.assert_close(actual, expected)


def test_tied_modules_and_buffers_are_tied_in_each_copy():
    shared = nn.BatchNorm1d(2)
    shared.register_buffer("again", shared.running_mean)
    for replica in replicate(nn.Sequential(shared, nn.Sequential(shared)), ["cpu"] * 2):
        assert replica[0] is replica[1][0]
        assert replica[0] is not shared
        assert replica[0].again is replica[0].running_mean


@pytest.mark.parametrize("rnn", [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_is_replicated(rnn):
    net = rnn(3, 4, num_layers=2, bidirectional=True)
    x, dy = torch.randn(2, 5, 6, 3), torch.randn(2, 5, 6, 8)
    expected_y, _ = net(x.transpose(0, 1).flatten(1, 2))
    expected = torch.autograd.grad(
        expected_y, list(net.parameters()), dy.transpose(0, 1).flatten(1, 2)
    )
    outputs = [r(part)[0] for r, part in zip(replicate(net, ["cpu"] * 2), x, strict=True)]
    torch.testing.assert_close(torch.cat(outputs, 1), expected_y)
    actual = torch.autograd.grad(outputs, list(net.parameters()), list(dy))
    torch.testing.assert_close(actual, expected)


def test_rnn_on_another_device_has_its_flat_weights_there():
    (replica,) = replicate(nn.LSTM(2, 2), ["meta"])
    assert {weight.device for weight in replica._flat_weights} == {META}


def test_compiled_module_is_replicated_eagerly():
    calls = []
    net = nn.Linear(2, 2)
    net._compiled_call_impl = lambda *args: calls.append(args)
    x = torch.randn(3, 2)
    for replica in replicate(net, ["cpu"] * 2):
        torch.testing.assert_close(replica(x), nn.functional.linear(x, net.weight, net.bias))
    assert calls == []
    assert net._compiled_call_impl is not None


def compiled(module: nn.Module) -> nn.Module:
    """What ``torch.compile(module)`` returns, as far as replicas know it, without the compiler."""

    class OptimizedModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = module

    OptimizedModule.__module__ = "torch._dynamo.eval_frame"
    return OptimizedModule()


def test_replicas_have_the_module_in_place_of_its_compiled_wrapper():
    inner = nn.Linear(2, 2)
    net = nn.Sequential(compiled(inner), inner)
    net.held = [net[0], compiled(compiled(inner))]
    for replica in replicate(net, ["cpu"] * 2):
        assert type(replica[0]) is nn.Linear
        assert replica[0] is replica[1] is replica.held[0] is replica.held[1]
        assert replica[0] is not inner
    for replica in replicate(compiled(compiled(inner)), ["cpu"] * 2):
        assert type(replica) is nn.Linear


def test_hooks_of_a_compiled_wrapper_are_refused():
    net = nn.Sequential(compiled(nn.Linear(2, 2)))
    net[0].register_forward_hook(lambda module, args, output: None)
    with pytest.raises(TypeError, match=r"would be lost .*`0` .*register them before"):
        replicate(net, ["cpu"] * 2)


def test_a_script_module_is_refused_at_any_depth():
    with pytest.raises(TypeError, match=r"replicate a torch\.jit\.ScriptModule .*`0\.0`"):
        replicate(nn.Sequential(nn.Sequential(torch.jit.ScriptModule())), ["cpu"] * 2)


def test_gradients_that_are_sparse_in_some_replicas_are_summed():
    net = nn.Embedding(3, 2, sparse=True)
    first, second, third = replicate(net, ["cpu"] * 3)
    index, weights = torch.tensor([0, 2]), torch.randn(3, 3, 2)
    out = (first(index) * weights[0][index]).sum() + (third(index) * weights[2][index]).sum()
    (out + (second.weight * weights[1]).sum()).backward()
    expected = weights[1].clone()
    expected[index] += weights[0][index] + weights[2][index]
    torch.testing.assert_close(net.weight.grad, expected)


DICTIONARIES = ["_parameters", "_buffers", "_modules", *HOOKS]


@pytest.mark.parametrize(
    "name", [name for name in DICTIONARIES if isinstance(vars(nn.ReLU())[name], dict)]
)
def test_what_a_replica_registers_stays_in_that_replica(name):
    net = nn.BatchNorm1d(2)
    dictionaries = [vars(module)[name] for module in (net, *replicate(net, ["cpu"] * 2))]
    dictionaries[1]["new"] = None
    assert ["new" in found for found in dictionaries] == [False, True, False]


class Scaled(nn.Module):
    """Has its own parameter and a nested module, like many traced networks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


@pytest.mark.parametrize("wrap", WRAPS[:3])
@pytest.mark.parametrize("is_nested", [False, True])
def test_graph_modules_of_torch_fx_are_replicated_like_other_modules(wrap, is_nested):
    net = Scaled()
    traced = torch.fx.symbolic_trace(net)
    traced.register_forward_hook(lambda module, args, y: y + module.scale)
    x = torch.randn(6, 2)
    expected = net(x) + net.scale
    expected.sum().backward()
    grads = [parameter.grad for parameter in net.parameters()]
    net.zero_grad(set_to_none=True)
    y = wrap(nn.Sequential(traced) if is_nested else traced)(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in net.parameters()], grads)
    for replica in replicate(traced, ["cpu"] * 2):
        assert type(replica) is type(traced) and list(replica.parameters()) == []


def test_torchs_copies_of_a_graph_module_are_connected_although_their_classes_differ():
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), Numbered())

    copies = [Net(), Net()]
    assert type(copies[0][0]) is not type(copies[1][0])
    execute_replication_callbacks(copies)
    assert [copy[1].copy_id for copy in copies] == [0, 1]


def test_replica_can_be_replicated_again():
    module = Weight(2)
    (replica, _) = replicate(module, ["cpu"] * 2)
    sum(r.weight.sum() for r in replicate(replica, ["cpu"] * 3)).backward()
    assert module.weight.grad.tolist() == [3, 3]


# -- plain attributes --------------------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def arrived(value: Any, device: str = "meta") -> Any:
    """The attribute as the second of two copies has it, the one on ``device``."""
    return replicate(Holder(value), ["cpu", device])[1].value


def test_attributes_that_a_replica_sets_are_its_own():
    net = nn.Sequential(nn.ReLU())
    replicas = replicate(net, ["cpu"] * 3)
    for index, replica in enumerate(replicas):
        replica[0].index = index
    assert [replica[0].index for replica in replicas] == [0, 1, 2]
    assert not hasattr(net[0], "index")


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), [torch.ones(1)], {"t": torch.ones(1)}, ["text"], {"n": 1}, object()],
    ids=repr,
)
def test_what_needs_no_move_is_shared(value):
    assert arrived(value, "cpu") is value


def test_each_container_is_looked_into_once():
    value = [torch.ones(1)]
    for _ in range(60):
        value = [value, value]
    moved = arrived(value)
    assert moved[0] is moved[1]


def test_plain_attribute_with_a_gradient_carries_it_back():
    tensor = torch.ones(2, requires_grad=True)
    sum(r.value[0].sum() for r in replicate(Holder([tensor]), ["cpu"] * 3)).backward()
    assert tensor.grad.tolist() == [3, 3]


def test_references_to_parts_of_the_module_become_the_copys_own():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())
    net.order = [net[1], net[0]]
    net.named = {"weight": net[0].weight, "mean": net[0].running_mean}
    net.functions = {"first": net[0].forward}
    net[0].parent = [net]
    for replica in replicate(net, ["cpu"] * 2):
        assert replica.order == [replica[1], replica[0]]
        assert replica.named["weight"] is replica[0].weight
        assert replica.named["mean"] is replica[0].running_mean
        assert replica.functions["first"].__self__ is replica[0]
        assert replica[0].parent == [replica]
    assert net.order == [net[1], net[0]]
    assert net.functions["first"].__self__ is net[0]


def test_what_is_not_part_of_the_module_is_shared():
    foreign, other = nn.Linear(2, 2), object()
    module, method, found, _ = arrived([foreign, foreign.forward, other, torch.ones(1)])
    assert (module, method, found) == (foreign, foreign.forward, other)


# -- its cost ----------------------------------------------------------------------------------


def nested(layers: int) -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(2, 2, 1), SynchronizedBatchNorm2d(2), nn.ReLU())
            for _ in range(layers)
        )
    )


def calls_to_replicate(net: nn.Module) -> int:
    """The number of calls of Python functions, after a first forward."""
    model = DataParallel(net, ["cpu"] * 2)
    model.replicate(net, model.device_ids)
    events = []
    # The garbage collector is off, because finalizers would be counted.
    with no_garbage_collection(), profiled(lambda frame, event, arg: events.append(event)):
        model.replicate(net, model.device_ids)
    return events.count("call")


def test_replicate_with_callbacks_makes_at_most_8_calls_per_module_and_replica():
    calls = calls_to_replicate(nested(25)) - calls_to_replicate(nested(5))
    assert calls <= 8 * 20 * 4 * 2  # layers, modules in each, replicas


# -- the parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [torch.float32, torch.complex64])
def test_on_distinct_cuda_devices_all_tensors_are_copied_and_added_at_once(monkeypatch, phase):
    """torch's coalesced copies and sums stand in for themselves without two such devices."""
    copied, added = [], []

    def broadcast_coalesced(tensors, devices):
        copied.append(len(tensors))
        real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        return [real, *([t.clone() for t in real] for _ in devices[1:])]

    def reduce_add_coalesced(of_devices, destination):
        added.append(len(of_devices[0]))
        return tuple(sum(grads) for grads in zip(*of_devices, strict=True))

    module = importlib.import_module("replication.steps.broadcast")
    monkeypatch.setattr(module, "can_coalesce", lambda tensors, devices: True)
    monkeypatch.setattr(module.comm, "broadcast_coalesced", broadcast_coalesced)
    monkeypatch.setattr(module.comm, "reduce_add_coalesced", reduce_add_coalesced)
    net = nn.BatchNorm1d(3)
    net.phase = nn.Parameter(torch.ones(2, dtype=phase))
    replicas = replicate(net, ["cpu"] * 3)
    assert copied == [3, 3]  # the parameters, and the buffers
    for replica in replicas:
        assert torch.equal(replica.phase, net.phase)
        assert torch.equal(replica.running_var, net.running_var)
    assert replicas[0].running_var is net.running_var
    weights = torch.randn(3, 3)
    sum((r.weight * w).sum() for r, w in zip(replicas, weights, strict=True)).backward()
    torch.testing.assert_close(net.weight.grad, weights.sum(0))
    assert net.bias.grad is None and added == []  # because some copies have no gradient
    net.zero_grad()
    for create_graph in (True, False):
        used = [r.weight * w + r.bias for r, w in zip(replicas, weights, strict=True)]
        loss = sum(y.sum() for y in used) + sum(r.phase.abs().sum() for r in replicas)
        parameters = [net.weight, net.bias, net.phase]
        grads = torch.autograd.grad(loss, parameters, create_graph=create_graph, retain_graph=True)
        torch.testing.assert_close(grads[0], weights.sum(0))
        assert [grad.tolist() for grad in grads[1:]] == [[3] * 3, [3] * 2]
        assert added == ([] if create_graph or phase.is_complex else [3])


# -- what refers to the original ---------------------------------------------------------------


def test_a_forward_set_on_the_object_becomes_the_replicas():
    net = nn.Sequential(norm())
    net.forward = types.MethodType(lambda self, x: self[0](x), net)
    torch.testing.assert_close(DataParallel(net, ["cpu"] * 4)(BATCH), whole_batch(BATCH))


def test_a_closure_that_refers_to_the_original_is_warned_of():
    net = nn.Sequential(norm())
    plain = net[0].forward
    net[0].forward = lambda x: plain(x)
    with pytest.warns(UserWarning, match="the replica uses the original layer"):
        DataParallel(net, ["cpu"] * 4)(BATCH)


class OwnDerivative(nn.Sequential):
    def forward(self, x):
        return torch.func.grad(lambda x: super(OwnDerivative, self).forward(x).sum())(x)


def test_torch_func_inside_a_replica_is_refused_by_a_synchronized_layer():
    with pytest.raises(RuntimeError, match=r"do not reach other"):
        DataParallel(OwnDerivative(norm()), ["cpu"] * 2)(BATCH)
