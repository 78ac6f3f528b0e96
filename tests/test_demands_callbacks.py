"""What users of such toolkits asked of callbacks and hooks; see the references."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import CallbackContext, DataParallel, execute_replication_callbacks, replicate
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.faults import WRAPS, N
from tests.layers import Centering, Numbered, freed


class Notes(Numbered):
    """Notes its callbacks and forwards, with the context; passes its input on."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        super().__init__()
        self.name, self.notes = name, notes
        self.none = None
        self.register_module("nothing", None)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        self.notes.append((copy_id, self.name, ctx))
        if self.name == f"fails in {copy_id}":
            raise ValueError(self.name)

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(threading.current_thread().name)
        return x


@pytest.mark.parametrize("wrap", WRAPS)
def test_hooks_of_a_synchronized_layer_run_once_per_replica_and_step(wrap):
    """Forward and backward hooks, before and after, in every runner."""
    ran: list[str] = []
    layer = SynchronizedBatchNorm1d(3)
    layer.register_forward_pre_hook(lambda module, args: ran.append("before forward"))
    layer.register_forward_hook(lambda module, args, y: ran.append("after forward"))
    layer.register_full_backward_pre_hook(lambda module, dy: ran.append("before backward"))
    layer.register_full_backward_hook(lambda module, dx, dy: ran.append("after backward"))
    run = wrap(nn.Sequential(nn.Linear(3, 3), layer))
    y = run(torch.randn(7, 3))
    assert sorted(ran) == sorted(["before forward", "after forward"] * N)
    ran.clear()
    y.backward(torch.randn_like(y))
    assert sorted(ran) == sorted(["before backward", "after backward"] * N)


@pytest.mark.parametrize("replicas", [1, 2])
def test_layers_that_were_the_only_copy_go_on_alone(replicas):
    """Callbacks run on the original itself; replicas may be made of it after that."""
    net = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).double()
    older = Centering()
    twin = nn.Sequential(copy.deepcopy(net[0]), nn.BatchNorm1d(3).double())
    twin.load_state_dict(net.state_dict())
    execute_replication_callbacks([nn.Sequential(net, older)])
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(older(x), x - x.mean(0))
    for _ in range(2):
        torch.testing.assert_close(net(x), twin(x))
        torch.testing.assert_close(DataParallel(net, ["cpu"] * replicas)(x), twin(x))
    torch.testing.assert_close([*net.buffers()], [*twin.buffers()])


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 2])
def test_a_network_is_whole_after_it_was_inside_a_replica(outer, inner):
    """A DataParallel in a replica has copies of its own; then its module is used again.

    On a single device it has none, but calls its module, which is the outer replicas' layer.
    """
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    nested = DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * inner)
    x = torch.randn(12, 3, dtype=torch.float64)
    parts = x.chunk(1 if inner == 1 else outer)
    expected = [copy.deepcopy(net)(part) for part in parts]
    parameters = [*nested.parameters()]
    y = DataParallel(nested, ["cpu"] * outer)(x)
    torch.testing.assert_close(y, torch.cat(expected))
    y.backward(torch.randn_like(y))
    assert all(map(lambda a, b: a is b, nested.parameters(), parameters))
    net.load_state_dict(nested.module.state_dict())
    torch.testing.assert_close(nested(x), net(x))
    torch.testing.assert_close(nested.module(x), net(x))
    torch.testing.assert_close([*nested.buffers()], [*net.buffers()])


def test_nothing_but_the_replicas_holds_a_context():
    """Nothing of a forward's callbacks outlives it."""
    notes: list[Any] = []
    net = Notes("layer", notes)
    replicas = replicate(net, ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    context = weakref.ref(notes[0][2])
    notes.clear()
    del replicas
    assert freed(context)
