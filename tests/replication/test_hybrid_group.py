"""Groups of replicas in several processes, on gloo, give the results of groups of replicas."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from replication import (
    DataParallel,
    Group,
    ReplicaAware,
    ReplicaGroup,
    ReplicasTimedOut,
    ReplicationError,
    SoloGroup,
    execute_replication_callbacks,
    parallel_apply,
    replicate,
)
from replication.groups.hybrid import Forward, HybridGroup
from syncbn import SynchronizedBatchNorm1d
from tests.collective_cases import CASES, Case, derivatives, leaves, upstream
from tests.deadlines import soon
from tests.layers import outcome_of
from tests.ranks import needs_gloo, recorded_collectives, run_ranks

pytestmark = needs_gloo

#: The number of replicas in each process.
COUNTS = [(2, 2), (2, 3), (1, 2), (1, 2, 2)]


class Copy(ReplicaAware, nn.Module):
    """Calls a function with its group."""

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.group, *arguments)


def in_replicas(
    layer: Copy, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]
) -> list[Any]:
    """``function(group, *arguments[i])`` in replica i of this process; what each returned."""
    replicas = replicate(layer, ["cpu"] * len(arguments))
    execute_replication_callbacks(replicas)
    return parallel_apply(replicas, [(function, *own) for own in arguments])


def own_ranks(rank: int, counts: Sequence[int]) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def split_case(size: int) -> Case:
    return Case(
        lambda rank, members: [(rank + 1, 2)],
        lambda group, x: group.split(size).all_gather(x),
        lambda members: [
            result
            for start in range(0, len(members), size)
            for part in [members[start : start + size]]
            for result in [tuple(x for (x,) in part)] * len(part)
        ],
    )


ALL_CASES = {
    **CASES,
    "split-1": split_case(1),
    "split-3": split_case(3),
    "split-4": split_case(4),
    "split-all": split_case(9),
    # A part of a part: of ranks 0 to 2, and so on, the first two.
    "split-twice": Case(
        lambda rank, size: [(rank + 1,)],
        lambda group, x: group.split(3).split(2).all_gather(x),
        lambda members: [
            tuple(x for (x,) in members[first : min(first + 2 - first % 3 // 2, len(members))])
            for rank in range(len(members))
            for first in [rank - rank % 3 % 2 if rank % 3 < 2 else rank]
        ],
    ),
}


def run_cases(rank: int, counts: Sequence[int]) -> dict[str, Any]:
    """Each collective, with first and second derivatives, in the replicas of one process."""
    results, size, layer = {}, sum(counts), Copy()
    for name, case in ALL_CASES.items():
        own = leaves(case, size)[own_ranks(rank, counts)]
        outputs = in_replicas(layer, case.call, own)
        gradients = upstream(case.oracle(leaves(case, size)))[own_ranks(rank, counts)]
        loss = sum(
            (g * y.square()).sum()
            for gs, ys in zip(gradients, outputs, strict=True)
            for g, y in zip(gs, ys, strict=True)
        )
        inputs = [x for xs in own for x in xs]
        first = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, inputs, materialize_grads=True)
        ys = [[y.detach() for y in ys] for ys in outputs]
        results[name] = ys, [g.detach() for g in first], list(second)
    return results


@pytest.fixture(scope="module", params=COUNTS, ids=str)
def all_cases(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return sum(request.param), run_ranks(len(request.param), run_cases, request.param)


@pytest.mark.parametrize("name", ALL_CASES)
def test_results_and_derivatives_equal_the_oracle(all_cases, name):
    size, found = all_cases
    inputs = leaves(ALL_CASES[name], size)
    outputs = ALL_CASES[name].oracle(inputs)
    first, second = derivatives(outputs, inputs)
    ys, dxs, ddxs = ([entry for process in found for entry in process[name][i]] for i in range(3))
    torch.testing.assert_close(ys, [[t.detach() for t in expected] for expected in outputs])
    torch.testing.assert_close(dxs, first)
    torch.testing.assert_close(ddxs, second)


# -- everything else, in one run of two processes of two replicas ------------------------------


def on_both(function: Callable[..., Any], *arguments: Any, layer: Copy | None = None) -> list[Any]:
    """``function(group, *arguments)`` in both replicas of this process; what each returned."""
    return in_replicas(layer or Copy(), function, [arguments] * 2)


def ranks(rank: int) -> Any:
    def see(group: Group) -> Any:
        return type(group), group.rank, group.size, repr(group), group.recomputes

    return on_both(see)


def sizes_change(rank: int) -> Any:
    """From forward to forward of one layer."""
    layer = Copy()
    found = []
    for counts in ((2, 2), (1, 3), (2, 1), (1, 1)):
        inputs = [(torch.ones(1),)] * counts[rank]
        found += [t.item() for t in in_replicas(layer, lambda g, x: g.all_reduce(x), inputs)]
        found += in_replicas(layer, lambda g, x: g.size, inputs)
        found += [
            t.item() for t in in_replicas(layer, lambda g, x: g.all_reduce(x, "mean"), inputs)
        ]
    return found


def dtypes(rank: int) -> Any:
    def see(group: Group) -> Any:
        found = []
        for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            x = torch.ones(2, dtype=dtype)
            op = "max" if dtype is torch.bool else "sum"
            results = [
                group.all_reduce(x, op),
                group.broadcast(x, 1),
                group.reduce_scatter([x] * 4, op),
                *group.all_gather(x),
            ]
            found.append({y.dtype for y in results} == {dtype})
        large = torch.tensor([60000.0], dtype=torch.float16)
        mean = group.all_reduce(large, "mean"), group.reduce_scatter([large] * 4, "mean")
        empty = group.all_gather(torch.zeros(group.rank, 0)), group.all_gather(torch.zeros(0, 3))
        return found, mean, [[tuple(x.shape) for x in tensors] for tensors in empty]

    return on_both(see)


def changed_in_place(rank: int) -> Any:
    """Results are modified; what the other members and the arguments have after that."""

    def see(group: Group) -> Any:
        x = torch.ones(2, requires_grad=True)
        results = [
            group.all_reduce(x * 1),
            *group.all_gather(x * 1),
            group.broadcast(x * 1),
            group.reduce_scatter([x * 1] * 4),
        ]
        group.barrier()
        if group.rank == 0:
            for result in results:
                result.zero_()
        group.barrier()
        return x.detach(), [result.detach() for result in results]

    return on_both(see)


def without_grad(rank: int) -> Any:
    def see(group: Group) -> Any:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            results = [group.all_reduce(x), group.broadcast(x), *group.all_gather(x)]
        with torch.inference_mode():
            results.append(group.all_reduce(x))
        return [result.requires_grad for result in results]

    return on_both(see)


def objects(rank: int) -> Any:
    return on_both(lambda group: group.all_gather_object((rank, group.rank)))


def bad_input(rank: int) -> Any:
    """Every replica is refused before it waits. Then a collective meets the others'."""

    def see(group: Group) -> Any:
        x = torch.ones(2)
        calls: list[Callable[[], Any]] = [
            lambda: group.all_reduce("x"),
            lambda: group.all_reduce(x, "median"),
            lambda: group.broadcast(x, 4),
            lambda: group.reduce_scatter([x] * 3),
            lambda: group.split(0),
            lambda: pickle.dumps(group),
            lambda: copy.deepcopy(group),
        ]
        return [str(outcome_of(call).error) for call in calls], group.all_reduce(x)

    return on_both(see)


def mismatch_in_a_process(rank: int) -> Any:
    """Of its replicas, which the process sees before it calls another one."""

    def see(group: Group, x: Tensor) -> Any:
        return group.all_reduce(x)

    wrong = in_replicas(Copy(), see, [(torch.ones(2),)] * 2)[0]
    inputs = [(torch.ones(2),), (torch.ones(3),)]
    return wrong, str(outcome_of(lambda: in_replicas(Copy(), see, inputs)).error)


def mismatch_of_processes(rank: int) -> Any:
    def see(group: Group) -> Any:
        return group.all_gather(torch.ones(1, 2 + rank))

    return str(outcome_of(lambda: on_both(see)).error)


def nested(rank: int) -> Any:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = DataParallel(Sum(), ["cpu"] * 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    x = torch.ones(4, 1)
    error = outcome_of(lambda: DataParallel(Outer(), ["cpu"] * 2)(x)).error
    return str(error), DataParallel(Outer(), ["cpu"])(x).flatten().tolist()


class Sum(ReplicaAware, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x.sum(0, keepdim=True))


def traffic(rank: int) -> Any:
    """A sum is one collective each way, for any number of replicas."""
    layer = Copy()
    on_both(lambda group: group.barrier(), layer=layer)  # makes the group of torch.distributed
    x = torch.ones(10, requires_grad=True)
    with recorded_collectives() as calls:
        y, z = on_both(lambda group: group.all_reduce(x), layer=layer)
        (y + z).sum().backward()
    return calls


def limited(rank: int) -> Any:
    """To this process, and to both in a group of their own."""
    layer = Copy()
    own = [distributed.new_group([member]) for member in range(2)]
    layer.process_group = own[rank]
    found = on_both(lambda group: (type(group), group.size), layer=layer)
    layer.process_group = distributed.new_group([1, 0])
    layer.group_size = 3
    sums = on_both(
        lambda group: (group.rank, group.size, group.all_reduce(torch.ones(1)).item()), layer=layer
    )
    return found, sums


def numbering(rank: int) -> Any:
    """Of the nodes of later forwards, which begins after those that await a backward."""
    x, kept, found = torch.ones(2, 1, requires_grad=True), [], []
    for _ in range(3):
        kept.append(DataParallel(Sum(), ["cpu"] * 2)(x).sum())
        awaiting = Forward().first_node
        kept[-1].backward()  # the loss lives on, but not its graph
        found.append((awaiting > 0, Forward().first_node))
    return found


CHECKS = [
    ranks, sizes_change, dtypes, changed_in_place, without_grad, objects, bad_input,
    mismatch_in_a_process, nested, numbering, traffic, limited, mismatch_of_processes,
]  # fmt: skip


def all_checks(rank: int) -> dict[str, Any]:
    return {check.__name__: check(rank) for check in CHECKS}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(2, all_checks)


def test_ranks_are_ordered_by_process(two):
    found = two[0]["ranks"] + two[1]["ranks"]
    assert [entry[:3] for entry in found] == [(HybridGroup, rank, 4) for rank in range(4)]
    assert found[3][3] == "HybridGroup(process=1, replica=1)"
    assert not any(entry[4] for entry in found)


def test_number_of_replicas_may_change(two):
    for process, counts in ((0, (2, 1, 2, 1)), (1, (2, 3, 1, 1))):
        totals = (4, 4, 3, 2)
        expected = []
        for count, total in zip(counts, totals, strict=True):
            expected += [total] * (2 * count) + [1] * count
        assert two[process]["sizes_change"] == expected


def test_dtypes_and_empty_tensors(two):
    for found in two:
        for same, mean, (lengths, none) in found["dtypes"]:
            assert all(same)
            assert [m.item() for m in mean] == [60000, 60000]
            assert lengths == [(rank, 0) for rank in range(4)]
            assert none == [(0, 3)] * 4


def test_change_in_place_affects_no_other_member(two):
    members = [member for found in two for member in found["changed_in_place"]]
    ones = torch.ones(2)
    for rank, (x, results) in enumerate(members):
        torch.testing.assert_close(x, ones)
        expected = [4 * ones, *[ones] * 5, 4 * ones]
        torch.testing.assert_close(results, [0 * e for e in expected] if rank == 0 else expected)


def test_results_under_no_grad_are_constants(two):
    assert not any(any(member) for found in two for member in found["without_grad"])


def test_objects_come_in_the_order_of_ranks(two):
    expected = ((0, 0), (0, 1), (1, 2), (1, 3))
    assert [found["objects"] for found in two] == [[expected] * 2] * 2


def test_bad_input_is_refused_before_any_waiting(two):
    for process, found in enumerate(two):
        for replica, (errors, total) in enumerate(found["bad_input"]):
            where = f"`(root)`, process {process}, replica {replica}: "
            assert all(error.startswith(where) for error in errors[:5]), errors
            assert "reduce_scatter takes one tensor for each of 4 members (got 3)" in errors[3]
            assert all("cannot be copied" in error for error in errors[5:])
            torch.testing.assert_close(total, torch.full((2,), 4.0))


def test_mismatch_in_a_process_is_named_before_other_processes_are_called(two):
    for found in two:
        total, error = found["mismatch_in_a_process"]
        torch.testing.assert_close(total, torch.full((2,), 4.0))
        assert "replica 1: all_reduce(op='sum') of float32 [3]" in error


def test_mismatch_of_processes_is_named_as_without_replicas(two):
    for found in two:
        assert "rank 0: all_gather() of float32 [2, 2]" in found["mismatch_of_processes"]


def test_replicas_inside_replicas_are_refused(two):
    for found in two:
        assert "replicate once, on the outside" in found["nested"][0]


def test_replicas_inside_a_single_replica_communicate(two):
    for found in two:
        assert found["nested"][1] == [8.0, 8.0]


def test_numbers_of_nodes_do_not_grow_from_step_to_step(two):
    for found in two:
        assert found["numbering"] == [(True, 0)] * 3


def test_sum_is_one_collective_each_way(two):
    for found in two:
        assert found["traffic"] == [("all_gather", 40)] * 2


def test_process_group_limits_the_processes(two):
    for process, found in enumerate(two):
        own, parts = found["limited"]
        assert own == [(ReplicaGroup, 2)] * 2
        assert parts == ([[(0, 3, 3.0), (1, 3, 3.0)], [(2, 3, 3.0), (0, 1, 1.0)]][process])


# -- faults ------------------------------------------------------------------------------------


class Fails(ReplicaAware, nn.Module):
    def forward(self, x: Tensor, rank: int) -> Tensor:
        if rank == 0 and self.group.all_reduce(torch.ones(1)) and x.item() == 1:
            raise ValueError("replica 1 of process 0")
        if rank == 1:
            self.group.all_reduce(torch.ones(1))
        return self.group.all_reduce(x)


def fault(rank: int) -> Any:
    model = DataParallel(Fails(), ["cpu"] * 2)
    error = outcome_of(lambda: model(torch.arange(2.0), rank)).error
    distributed.destroy_process_group()  # as when the process ends
    return type(error), str(error)


def test_failure_of_a_replica_surfaces_at_once_and_reaches_the_other_process():
    (kind, text), (other, _) = run_ranks(2, fault)
    assert (kind, text) == (ValueError, "replica 1 of process 0")
    assert issubclass(other, RuntimeError)
    assert not issubclass(other, ReplicationError)


def blocked(rank: int) -> Any:
    """The other process does not come to the second forward until this one has timed out."""
    model = DataParallel(SynchronizedBatchNorm1d(3), ["cpu"] * 2)
    x = torch.randn(4, 3)
    model(x)
    state = copy.deepcopy(model.module.state_dict())
    error = None
    if rank == 0:
        model.timeout = 0.5
        error = outcome_of(lambda: model(x)).error
        distributed.send(torch.ones(1), 1)
    else:
        distributed.recv(torch.ones(1), 0)
    distributed.destroy_process_group()
    ended = soon(lambda: not any(t.name.startswith("replica-") for t in threading.enumerate()))
    same = all(torch.equal(state[k], v) for k, v in model.module.state_dict().items())
    return type(error), ended, same


def test_timeout_surfaces_while_a_replica_waits_for_another_process():
    (kind, ended, same), _ = run_ranks(2, blocked)
    assert kind is ReplicasTimedOut
    assert ended
    assert same  # the abandoned replica has not written its running statistics


# -- the order of backward ---------------------------------------------------------------------


class Branches(ReplicaAware, nn.Module):
    """Parallel branches, whose collectives become ready in backward in another order."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shallow = self.group.all_reduce(x.sum(0), "sum")
        deep = x
        for step in range(4):
            deep = deep - self.group.all_reduce((step + 2) * deep.sin().mean(0), "mean")
            deep = deep * deep.cos()
        again = self.group.all_reduce(3 * x.sum(0), "sum")
        return again * x + deep, shallow * x.exp()


def backward_order(rank: int, counts: Sequence[int]) -> Any:
    size = sum(counts)
    torch.manual_seed(0)
    full = torch.randn(2, 2 * size, 3, dtype=torch.float64)
    own = own_ranks(rank, counts)
    x, z = (part[2 * own.start : 2 * own.stop].clone().requires_grad_() for part in full)
    if rank == 0:  # the caller's own numbers of nodes differ between processes
        for _ in range(5000):
            x * 1
    model = DataParallel(Branches(), ["cpu"] * counts[rank])
    one, two = model(x), model(z)
    loss = sum((i + 1) * y.square().sum() for i, y in enumerate((one[0], two[1], two[0], one[1])))
    return torch.autograd.grad(loss, (x, z))


@pytest.mark.parametrize("counts", [(2, 3), (1, 2), (3, 1)], ids=str)
def test_processes_with_different_numbers_of_replicas_call_in_one_order_in_backward(counts):
    found = run_ranks(2, backward_order, counts)
    (expected,) = run_ranks(1, backward_order, [sum(counts)])
    for got, want in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(got), want)


class Scaled(ReplicaAware, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.group.all_reduce(x.sin().sum(0), "mean")
        return x * mean.tanh() + self.group.all_reduce(x.square().sum(0))


def kept_graph(rank: int, counts: Sequence[int], create_graph: bool) -> Any:
    """Goes through a graph, and again after another forward. A gradient penalty does the like."""
    size = sum(counts)
    torch.manual_seed(0)
    full = torch.randn(2, 2 * size, 3, dtype=torch.float64)
    own = own_ranks(rank, counts)
    x, z = (part[2 * own.start : 2 * own.stop].clone().requires_grad_() for part in full)
    model = DataParallel(Scaled(), ["cpu"] * counts[rank])
    one = model(x)
    (grad,) = torch.autograd.grad(one.sin().sum(), x, retain_graph=True, create_graph=create_graph)
    two = model(z)
    loss = one.cos().sum() + two.square().sum() + grad.square().sum()
    return torch.autograd.grad(loss, (x, z))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("counts", [(2, 3), (1, 2)], ids=str)
def test_graph_that_is_kept_for_a_backward_with_a_later_forward(counts, create_graph):
    found = run_ranks(2, kept_graph, counts, create_graph)
    (expected,) = run_ranks(1, kept_graph, [sum(counts)], create_graph)
    for got, want in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(got), want)


def test_solo_part_needs_no_other_process():
    def see(group: Group) -> type:
        return type(group)

    layer = Copy()
    layer.group_size = 1
    assert in_replicas(layer, see, [()] * 2) == [SoloGroup] * 2


def overlapping_parts(rank: int) -> list[Any]:
    """Of a group that is not all processes. The second process is in two of its parts."""
    layer = Copy()
    layer.process_group = distributed.new_group([0, 1, 2])
    layer.group_size = 2
    if rank == 3:
        return []
    found = on_replicas([1, 2, 1][rank], lambda g: g.all_reduce(torch.ones(1)).item(), layer)
    layer.group_size = 3
    return found + on_replicas([1, 2, 1][rank], lambda g: g.all_gather_object(rank), layer)


def on_replicas(count: int, function: Callable[[Group], Any], layer: Copy) -> list[Any]:
    return in_replicas(layer, function, [()] * count)


def test_parts_of_some_processes_may_overlap_in_a_process():
    found = run_ranks(4, overlapping_parts)
    assert found == [[2.0, (0, 1, 1)], [2.0, 2.0, (0, 1, 1), (0, 1, 1)], [2.0, (2,)], []]
