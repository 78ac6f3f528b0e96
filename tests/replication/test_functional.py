"""Collectives as functions: those of the `Group` that an argument stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from replication import (
    DataParallel,
    ReplicaAware,
    ReplicasDiverged,
    ReplicationError,
    SoloGroup,
    functional,
)
from tests.kit.collectives import CASES, OPS, derivatives, leaves, upstream
from tests.kit.ranks import errors_of, needs_gloo, recorded_collectives, run_ranks
from tests.kit.threads import outcome_of

#: There is no function that splits a group.
NAMES = [name for name in CASES if name != "split"]


def functions(size: int, group: Any = None) -> Any:
    """The functions, with the interface of a `Group` that `Case.call` expects."""
    return SimpleNamespace(
        size=size,
        all_reduce=lambda x, op="sum": functional.all_reduce(x, op, group),
        all_gather=lambda x: functional.all_gather(x, group),
        reduce_scatter=lambda xs, op="sum": functional.reduce_scatter(xs, op, group),
        broadcast=lambda x, src: functional.broadcast(x, src, group),
    )


def results_of(name: str, rank: int, group: Any = None) -> list[list[Tensor]]:
    """Outputs of one of two members, and the first and second derivatives by its tensors."""
    case, own = CASES[name], leaves(CASES[name], 2)[rank]
    outputs = case.call(functions(2, group), *own)
    gradients = upstream(case.oracle(leaves(case, 2)))[rank]
    loss = sum((g * y.square()).sum() for g, y in zip(gradients, outputs, strict=True))
    first = torch.autograd.grad(loss, own, create_graph=True, materialize_grads=True)
    penalty = sum(g.square().sum() for g in first)
    second = torch.autograd.grad(penalty, own, materialize_grads=True)
    return [[t.detach() for t in ts] for ts in (outputs, first, second)]


GROUPS: dict[str, Callable[[], Any]] = {
    "all": lambda: None,
    "group": lambda: distributed.new_group([0, 1]),
    "mesh": lambda: init_device_mesh("cpu", (2,)),
    "Group": lambda: Total().group,
}


def results_in_rank(rank: int) -> dict[Any, list[list[Tensor]]]:
    found = {(name, "all"): results_of(name, rank) for name in NAMES}
    others = [key for key in GROUPS if key != "all"]
    return found | {
        (name, key): results_of(name, rank, GROUPS[key]()) for name in OTHERS for key in others
    }


#: The cases that all kinds of groups run.
OTHERS = ("all_reduce-max", "all_gather-uneven", "broadcast-last")


class Total(ReplicaAware, nn.Module):
    """Adds samples, on request without telling to which copies of the layer."""

    def forward(self, x: Tensor, knows: bool = True) -> Tensor:
        return functional.all_reduce(x, group=self.group if knows else None)


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, list[list[Tensor]]]]:
    return run_ranks(2, results_in_rank)


@needs_gloo
@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name in NAMES for key in GROUPS if key == "all" or name in OTHERS],
)
def test_results_and_derivatives_equal_the_oracle(ranks, name, key):
    inputs = leaves(CASES[name], 2)
    outputs = CASES[name].oracle(inputs)
    first, second = (iter(grads) for grads in derivatives(outputs, inputs))
    for found, own, expected in zip(ranks, inputs, outputs, strict=True):
        y, dx, ddx = found[name, key]
        torch.testing.assert_close(y, [t.detach() for t in expected])
        torch.testing.assert_close(dx, [next(first) for _ in own])
        torch.testing.assert_close(ddx, [next(second) for _ in own])


# -- names and arguments -------------------------------------------------------------------------


def test_names_and_order_of_arguments_are_those_of_torch():
    theirs = pytest.importorskip("torch.distributed.nn.functional")
    common = [name for name in functional.__all__ if hasattr(theirs, name)]
    assert common == ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]
    for name in common:
        parameters = inspect.signature(getattr(functional, name)).parameters.values()
        ours = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        torchs = list(inspect.signature(getattr(theirs, name)).parameters)
        if name == "reduce_scatter":  # which returns the result, and takes no tensor for it
            torchs = ["tensors", *torchs[2:]]
        assert ours == torchs, name


@pytest.mark.parametrize("op", OPS)
def test_an_op_may_be_that_of_torch(op):
    named = {"mean": "AVG"}.get(op, op.upper())
    x = torch.randn(3)
    for other in (op, getattr(distributed.ReduceOp, named)):
        assert torch.equal(functional.all_reduce(x, other), x)
        assert torch.equal(functional.reduce_scatter([x], other), x)


def test_one_process_gets_copies_of_its_arguments():
    x, obj = torch.randn(3, requires_grad=True), {"a": 1}
    copies = [
        functional.all_reduce(x),
        functional.reduce_scatter([x]),
        functional.broadcast(x),
        *functional.all_gather(x),
        *functional.all_gather(x, same_shape=True),
    ]
    assert len(copies) == 5
    for copy in copies:
        assert torch.equal(copy, x)
        assert copy.data_ptr() != x.data_ptr()
    (gradient,) = torch.autograd.grad(sum(copies).sum(), x)
    assert gradient.tolist() == [5] * 3
    assert functional.all_gather_object(obj) == (obj,)
    functional.barrier()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: functional.all_reduce(x, "sun"), ValueError, "knows the ops sum, "),
        (
            lambda x: functional.all_reduce(x, distributed.ReduceOp.BXOR),
            ValueError,
            "(got 'bxor')",
        ),
        (lambda x: functional.all_reduce(3), TypeError, "takes dense, local tensors of "),
        (lambda x: functional.all_gather(x, "dp"), TypeError, "group must be a Group, a torch."),
        (lambda x: functional.reduce_scatter(x, [x]), TypeError, "takes a list of 1 tensors"),
        (lambda x: functional.broadcast(x, 1), ValueError, "takes a src from 0 to 0 (got 1)"),
    ],
)
def test_wrong_arguments_are_refused(call, error, text):
    outcome = outcome_of(lambda: call(torch.ones(2)))
    assert type(outcome.error) is error
    assert text in str(outcome.error)


# -- replicas ------------------------------------------------------------------------------------


def test_replicas_take_the_group_of_their_layer():
    model, x = DataParallel(Total(), ["cpu"] * 3), torch.randn(3, 2)
    torch.testing.assert_close(model(x), x.sum(0).expand(3, 2))


def test_a_replica_that_passes_no_group_is_told_how():
    x = torch.ones(2, 1)
    for call in (
        lambda: functional.all_gather(x),
        lambda: functional.all_gather_object(x),
        functional.barrier,
        lambda: functional.global_mean(x),
    ):
        model = DataParallel(Calls(call), ["cpu"] * 2)
        with pytest.raises(ReplicationError, match=r"derive .*ReplicaAware, and pass group=self"):
            model(x)
    # One replica has no others.
    assert torch.equal(DataParallel(Total(), ["cpu"])(x, knows=False), x)


class Calls(nn.Module):
    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return x


# -- gathers of one shape ------------------------------------------------------------------------


def test_replicas_that_gather_other_shapes_than_they_say_are_named():
    class Gathers(ReplicaAware, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(self.group.all_gather(x, same_shape=True))[: len(x)]

    model, x = DataParallel(Gathers(), ["cpu"] * 2), torch.arange(4.0)
    assert model(x).tolist() == [0, 1, 0, 1]
    with pytest.raises(ReplicasDiverged, match=r"same_shape=True\) of float32 \[2\]; replica 1:"):
        model(x[:3])


def in_one_exchange(rank: int) -> None:
    x = torch.arange(4.0).reshape(2, 2) + rank
    x.requires_grad_()
    with recorded_collectives() as calls:
        rows = functional.all_gather(x, same_shape=True)
    assert [name for name, _ in calls] == ["all_gather"]
    assert [row.tolist() for row in rows] == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]
    weights = torch.tensor([[1.0], [10.0]]) * (rank + 1)
    with recorded_collectives() as calls:
        sum((weight * row).sum() for weight, row in zip(weights, rows, strict=True)).backward()
    assert [name for name, _ in calls] == ["all_to_all_single"]
    assert torch.equal(x.grad, torch.full((2, 2), [3.0, 30.0][rank]))
    rows[0].detach().fill_(7)  # shares no memory with what others have
    assert rows[1].sum() == 10
    (scalar, other) = functional.all_gather(torch.tensor(rank), same_shape=True)
    assert (scalar, other) == (0, 1)


def objects_and_barriers(rank: int) -> None:
    assert functional.all_gather_object([rank]) == ([0], [1])
    functional.barrier()


def groups_of_one_are_alone(rank: int) -> None:
    own = [distributed.new_group([member]) for member in (0, 1)][rank]
    with recorded_collectives() as calls:
        assert functional.all_reduce(torch.tensor(rank), group=own) == rank
        assert functional.all_reduce(torch.tensor(rank), group=SoloGroup()) == rank
        x = torch.ones(2)
        model = DataParallel(Calls(lambda: functional.all_reduce(x, group=own)), ["cpu"] * 2)
        model(x)
    assert calls == []
    other = [distributed.new_group([member]) for member in (1, 0)][rank]
    with pytest.raises(ValueError, match=r"`replication\.functional`: process_group must contain"):
        functional.all_reduce(torch.tensor(rank), group=other)


def a_replica_cannot_use_the_ranks(rank: int) -> None:
    x, group = torch.ones(2), distributed.new_group([0, 1])
    for given in (None, group):
        call = Calls(lambda given=given: functional.all_reduce(x, group=given))
        with pytest.raises(ReplicationError, match=r"pass group=self\.group"):
            DataParallel(call, ["cpu"] * 2)(x)


CHECKS = [
    in_one_exchange, objects_and_barriers, groups_of_one_are_alone, a_replica_cannot_use_the_ranks
]  # fmt: skip


@pytest.fixture(scope="module")
def two() -> list[list[str | None]]:
    return run_ranks(2, errors_of, CHECKS)


@needs_gloo
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(two, check):
    for found in two:
        assert found[CHECKS.index(check)] is None
