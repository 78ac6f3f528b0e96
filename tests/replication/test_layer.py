"""`ReplicaAware`: which group a layer has, alone and in replicas, and when it warns."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    DataParallel,
    ReplicaAware,
    UnsynchronizedWarning,
    patch_replication_callback,
)
from syncbn import SynchronizedBatchNorm1d
from tests.kit.memory import pickled
from tests.kit.threads import HAS_GIL
from tests.kit.wrappers import CustomDataParallel


class Total(ReplicaAware, nn.Module):
    """The sum over the batch, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.group.all_reduce((self.weight * x).sum(0))
        return total.expand_as(x)


@pytest.mark.parametrize("where", ["class", "object"])
def test_group_size_makes_it_the_layers_part(where):
    class Parted(Total):
        group_size = 2 if where == "class" else None

    layer = Parted()
    if where == "object":
        layer.group_size = 2
    y = DataParallel(layer, ["cpu"] * 5)(torch.ones(5, 1))
    assert y.flatten().tolist() == [2, 2, 2, 2, 1]
    assert layer(torch.ones(3, 1)).tolist() == [[3]] * 3


def test_overridden_callback_that_calls_super_works():
    class Numbered(Total):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            super().__data_parallel_replicate__(ctx, copy_id)
            ctx.group = self.copy_id = copy_id  # contexts may have any attribute

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.copy_id

    assert DataParallel(Numbered(), ["cpu"] * 2)(torch.ones(2, 1)).tolist() == [[2], [3]]


def test_it_must_be_in_front():
    with pytest.raises(TypeError, match=r"in front: class Behind\(ReplicaAware, Linear\)"):

        class Behind(nn.Linear, ReplicaAware):
            pass


@pytest.mark.parametrize("value", ["gloo", 2, object(), torch.ones(3)], ids=str)
def test_what_is_no_process_group_is_refused(value):
    with pytest.raises(TypeError, match=r"ProcessGroup, a DeviceMesh of one dimension, or"):
        Total().process_group = value


def test_group_is_its_name():
    layer = Total()
    with pytest.raises(AttributeError):
        layer.group = 3
    layer.group = nn.Linear(1, 1)  # which torch registers as a submodule
    for model in (layer, DataParallel(layer, ["cpu"] * 2)):
        with pytest.raises(TypeError, match="rename the submodule"):
            model(torch.ones(2, 1))


# -- never silently alone ----------------------------------------------------------------------


def test_replica_without_a_group_warns_once_and_names_the_remedy():
    """Clause 6a: a layer that is not connected warns."""
    model = CustomDataParallel(nn.Sequential(Total()), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(3, 1))
        y = model(torch.ones(3, 1))
    assert y.tolist() == [[1]] * 3
    (found,) = caught
    assert found.category is UnsynchronizedWarning
    assert "Total() is not synchronized, because its replica is not connected" in str(
        found.message
    )
    assert "patch_replication_callback(model)" in str(found.message)


class Calls(nn.Module):
    """A user's module whose forward has its own line."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "torchs_own",
    [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_GIL, reason="needs the GIL"))],
)
def test_warning_of_a_layer_points_at_the_line_that_calls_it(torchs_own):
    """In a user's forward, or else where the model is called, in another thread."""

    class Unconnected(SynchronizedBatchNorm1d):
        __data_parallel_replicate__ = None

    layer = Unconnected(1)
    module = nn.Sequential(layer) if torchs_own else nn.Sequential(Calls(layer))
    model = DataParallel(module, ["cpu"] * 3)
    with pytest.warns(UnsynchronizedWarning) as caught:
        line = inspect.currentframe().f_lineno + 1
        model(torch.ones(6, 1))
    assert len(caught) == 1
    if not torchs_own:
        line = Calls.forward.__code__.co_firstlineno + 1
        assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_warning_leaves_nothing_on_the_original_and_a_copy_warns_again(copied):
    layer = Total()
    before = dict(vars(layer))
    early = copied(layer)
    for make in (lambda: layer, lambda: early, lambda: copied(layer)):
        with pytest.warns(UnsynchronizedWarning, match="is not connected to the others"):
            CustomDataParallel(make(), 2)(torch.ones(2, 1))
    assert vars(layer) == before


def test_replica_of_a_replica_without_a_group_does_not_take_the_outer_group():
    inner = CustomDataParallel(Total(), 2)
    with pytest.warns(UserWarning, match="is not connected to the others"):
        y = DataParallel(nn.Sequential(inner), ["cpu"] * 2)(torch.ones(8, 1))
    assert y.tolist() == [[2]] * 8


# -- life --------------------------------------------------------------------------------------


class CopiesItself(Total):
    """Calls copies of itself that differ in an attribute, as a teacher may from its student."""

    factor = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.factor != 1:
            return self.factor * x
        twins = [copy.copy(self) for _ in range(2)]
        for factor, twin in enumerate(twins, 2):
            twin.factor = factor
        return super().forward(x) + twins[0](x) + twins[1].forward(x)


@pytest.mark.parametrize("kind", [DataParallel, CustomDataParallel])
def test_shallow_copy_of_a_replica_runs_on_itself(kind):
    model = kind(CopiesItself(), ["cpu"] * 2 if kind is DataParallel else 2)
    patch_replication_callback(model)
    x = torch.randn(4, 1)
    torch.testing.assert_close(model(x), x.sum(0) + 5 * x)
