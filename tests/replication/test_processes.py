"""Groups of processes, on gloo over loopback, give the results of groups of replicas."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh

from replication import (
    DataParallel,
    ProcessGroup,
    ReplicaAware,
    ReplicasDiverged,
    ReplicationError,
    SoloGroup,
)
from replication._torch import timeout_of
from replication.devices import memory_of
from replication.groups.base import Call, check_same_call
from replication.groups.processes import Header, check_lengths, packed_header
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.collective_cases import CASES, OPS, derivatives, leaves, upstream
from tests.layers import outcome_of
from tests.processes import run_python
from tests.ranks import TIMEOUT, needs_gloo, recorded_collectives, run_ranks

pytestmark = [needs_gloo, pytest.mark.slow]


def run_cases(rank: int, size: int) -> dict[str, Any]:
    """Each collective, with its first and second derivatives, in one rank."""
    results = {}
    for name, case in CASES.items():
        own = leaves(case, size)[rank]
        outputs = case.call(ProcessGroup(), *own)
        gradients = upstream(case.oracle(leaves(case, size)))[rank]
        loss = sum((g * y.square()).sum() for g, y in zip(gradients, outputs, strict=True))
        first = torch.autograd.grad(loss, own, create_graph=True, materialize_grads=True)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, own, materialize_grads=True)
        results[name] = [[t.detach() for t in ts] for ts in (outputs, first, second)]
    return results


@pytest.fixture(scope="module", params=[2, 3])
def all_cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, run_cases, request.param)


@pytest.mark.parametrize("name", CASES)
def test_results_and_derivatives_equal_the_oracle(all_cases, name):
    case = CASES[name]
    inputs = leaves(case, len(all_cases))
    outputs = case.oracle(inputs)
    first, second = (iter(grads) for grads in derivatives(outputs, inputs))
    for got, own, expected in zip(all_cases, inputs, outputs, strict=True):
        y, dx, ddx = got[name]
        torch.testing.assert_close(y, [t.detach() for t in expected])
        torch.testing.assert_close(dx, [next(first) for _ in own])
        torch.testing.assert_close(ddx, [next(second) for _ in own])


# -- everything else, in one run of two ranks --------------------------------------------------


def dtypes(rank: int) -> Any:
    group, found = ProcessGroup(), []
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = torch.ones(2, dtype=dtype)
        op = "max" if dtype is torch.bool else "sum"
        results = [
            group.all_reduce(x, op),
            group.broadcast(x, 1),
            group.reduce_scatter([x, x], op),
            *group.all_gather(x),
        ]
        found.append({y.dtype for y in results} == {dtype})
    return found


def empty(rank: int) -> Any:
    gathered = (
        ProcessGroup().all_gather(torch.zeros(rank, 0)),
        ProcessGroup().all_gather(torch.zeros(0, 3)),
    )
    # Rank 0 receives nothing, and sends.
    scattered = ProcessGroup().reduce_scatter([torch.zeros(0), torch.ones(2)])
    return [[tuple(x.shape) for x in tensors] for tensors in gathered], scattered.tolist()


def long(rank: int) -> Any:
    return [len(x) for x in ProcessGroup().all_gather(torch.zeros(2**19 + rank))]


def strided(rank: int) -> Any:
    x = torch.arange(6.0).view(2, 3).t()
    group = ProcessGroup()
    return [
        group.all_reduce(x),
        torch.cat(group.all_gather(x)),
        group.broadcast(x[:, :1].expand(3, 2)),
    ]


def odd_numbers(rank: int) -> Any:
    group, z = ProcessGroup(), torch.tensor([1 + 2j, 3 - 1j]).conj()
    large = torch.tensor([60000.0], dtype=torch.float16)
    negative = z[:1].imag  # a view, in whose memory is the number without its sign
    assert negative.is_neg()
    return [
        group.all_reduce(z),
        torch.cat(group.all_gather(z)),
        group.broadcast(z, 1),
        group.all_reduce(large, "mean"),
        group.broadcast(torch.tensor(-0.0)).signbit(),
        group.broadcast(torch.tensor(float("nan") if rank else 1.0)),
        torch.cat(
            [
                group.all_reduce(negative),
                *group.all_gather(negative),
                group.broadcast(negative, 1),
                group.reduce_scatter([negative, negative]),
            ]
        ),
        group.reduce_scatter([z, z]),
        group.all_reduce(z[:1].expand(8193)),  # too long to be gathered
    ]


def changed_in_place(rank: int) -> Any:
    group, x = ProcessGroup(), torch.tensor([2.0, 5.0 + rank], requires_grad=True)
    for op in OPS:
        total = group.all_reduce(x * 1, op).mul_(2) + group.reduce_scatter([x * 1] * 2, op).mul_(3)
        total.backward(torch.ones(2))
    scalar = torch.tensor(1.0 + rank, requires_grad=True)
    sum(y.mul_(3) for y in group.all_gather(scalar * 1)).backward()
    assert scalar.grad == 6
    gathered = group.all_gather(x * 1)
    x.grad = None
    sum(y.mul_(10.0 ** (i + 2 * rank)).sum() for i, y in enumerate(gathered)).backward()
    return x.grad


def traffic(rank: int) -> Any:
    """The collectives of torch that each call makes."""
    group, x, found = ProcessGroup(), torch.ones(2), {}
    long = torch.ones(8192).double()
    calls = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce of at most 64 KiB": lambda: group.all_reduce(long),
        "all_reduce of more": lambda: group.all_reduce(torch.cat([long, long[:1]])),
        "broadcast": lambda: group.broadcast(x),
        "reduce_scatter": lambda: group.reduce_scatter([x, x]),
        "barrier": group.barrier,
        "all_gather": lambda: group.all_gather(x),
        "all_gather of nothing": lambda: group.all_gather(x[:0]),
        "reduce_scatter of nothing": lambda: group.reduce_scatter([x[:0], x[:0]]),
    }
    for name, call in calls.items():
        with recorded_collectives() as made:
            call()
        found[name] = [collective for collective, _ in made]
    return found


def batched(rank: int) -> Any:
    """Gradients of which there are several at once."""
    x, group = torch.ones(2, requires_grad=True), ProcessGroup()
    errors = []
    for y in (group.all_reduce(x), group.all_gather(x)[0], 2 * group.broadcast(x)):
        call = partial(torch.autograd.grad, y, x, torch.eye(2), is_grads_batched=True)
        error = outcome_of(call).error
        assert not hasattr(error, "__notes__")  # no other rank is to blame
        errors.append(str(error))
    return errors


def own_results(rank: int) -> Any:
    group, x, long = ProcessGroup(), torch.ones(2), torch.ones(20_000)
    for y in (
        group.all_reduce(x),
        group.all_reduce(long),
        *group.all_gather(x),
        group.broadcast(x),
        group.reduce_scatter([x, x]),
    ):
        y.fill_(rank + 5.0)
        group.barrier()
        assert (y == rank + 5.0).all()
    assert long.eq(1).all()
    return x


def objects(rank: int) -> Any:
    return ProcessGroup().all_gather_object({"rank": rank})


def bad_input(rank: int) -> Any:
    return str(outcome_of(lambda: ProcessGroup().all_reduce(3)).error)


def mismatch_in_all_gather(rank: int) -> Any:
    group = ProcessGroup(name="head")
    group.barrier()
    error = outcome_of(lambda: group.all_gather(torch.ones(2, 3 + rank))).error
    assert isinstance(error, ReplicasDiverged)
    return str(error)


def mismatch_of_layers(rank: int) -> Any:
    group = ProcessGroup(name="neck" if rank else "stem")
    return str(outcome_of(lambda: group.all_gather(torch.ones(2))).error)


def under_debug(calls: Sequence[Callable[[], Any]]) -> list[str]:
    """The errors of calls with ``TORCH_DISTRIBUTED_DEBUG=INFO``."""
    level = distributed.get_debug_level()
    distributed.set_debug_level(distributed.DebugLevel.INFO)
    try:
        return [str(outcome_of(call).error) for call in calls]
    finally:
        distributed.set_debug_level(level)


def mismatch_of_widths(rank: int) -> Any:
    layer = SynchronizedBatchNorm1d(3 + rank)
    return under_debug([lambda: layer(torch.randn(2, 3 + rank))])[0]


def mismatch_in_requires_grad(rank: int) -> Any:
    group, x, y = ProcessGroup(), torch.ones(2, requires_grad=rank == 0), torch.ones(2)
    with torch.no_grad():
        assert torch.cat(group.all_gather(x)).eq(1).all()
    return [
        str(outcome_of(lambda: group.all_gather(x)).error),
        *under_debug([lambda: group.reduce_scatter([y, x])]),
    ]


def mismatch_of_order(rank: int) -> Any:
    """Two layers of one class and width, in another order on each rank."""
    net = convert_model(nn.Sequential(nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)))
    first, second = (net[0][0], net[1]) if rank else (net[1], net[0][0])
    return under_debug([lambda: second(first(torch.randn(2, 3)))])[0]


def mismatch_under_debug(rank: int) -> Any:
    group, x = ProcessGroup(name="tail"), torch.ones(2)
    return under_debug(
        [
            lambda: group.all_reduce(x, "max" if rank else "sum"),
            lambda: group.barrier() if rank else group.broadcast(x),
            lambda: group.all_gather_object(x) if rank else group.reduce_scatter([x, x]),
        ]
    )


def mismatch_in_backward(rank: int) -> list[str]:
    """Errors of backwards beside a rank that calls something else."""
    group, x = ProcessGroup(name="spine"), torch.ones(2, requires_grad=True)
    results = [
        group.all_reduce(x),
        group.all_reduce(x, "max"),
        group.all_gather(x)[1],
        group.reduce_scatter([x, x]),
        group.broadcast(x),
    ]
    # Gradients of a scattered result differ in length, which is no mismatch.
    tensors = [torch.ones(2 + i, requires_grad=True) for i in range(2)]
    assert under_debug([lambda: group.reduce_scatter(tensors).sum().backward()]) == ["None"]
    return under_debug(
        [group.barrier if rank else partial(y.backward, torch.ones(2)) for y in results]
    )


def beyond_memory() -> int:
    """The smallest number of items of one byte that two ranks cannot gather on this machine."""
    return memory_of(torch.device("cpu")) // 2 + 1


#: What a forger sends instead, given the bytes that it should send.
FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda packed: bytes(len(packed)),
    "ones": lambda packed: b"\xff" * len(packed),
    "no UTF-8": lambda packed: packed[:8] + b"\x80\xfe" * (len(packed) // 2 - 4),
    "escape sequences": lambda packed: packed[:8] + b"\x1b[2J\r\n" * 80 + packed[488:],
    "a pickle": lambda packed: pickle.dumps(print).ljust(len(packed), b"."),
    "negative": lambda packed: (-1).to_bytes(8, "little", signed=True) + packed[8:],
    "most negative": lambda packed: (-(2**63)).to_bytes(8, "little", signed=True) + packed[8:],
    "huge": lambda packed: (2**63 - 1).to_bytes(8, "little") + packed[8:],
    "many bytes": lambda packed: (2**38).to_bytes(8, "little") + packed[8:],
    "more than memory": lambda packed: beyond_memory().to_bytes(8, "little") + packed[8:],
}


@contextmanager
def forging(rank: int, forge: Callable[[bytes], bytes]) -> Iterator[None]:
    """Lets rank 1 change the first tensor that it sends in the block."""
    all_gather, calls = distributed.all_gather, []

    def forged(gathered: list[Tensor], tensor: Tensor, group: Any) -> None:
        calls.append(tensor)
        if rank == 1 and len(calls) == 1:
            flat = tensor.view(torch.uint8).flatten().tolist()
            tensor = torch.tensor(list(forge(bytes(flat))), dtype=torch.uint8).view(tensor.dtype)
        all_gather(gathered, tensor.view(gathered[0].shape), group)

    with mock.patch.object(distributed, "all_gather", forged):
        yield


def beside_a_forger(rank: int) -> dict[tuple[str, str], str]:
    """The errors of calls, in which nothing is unpickled."""
    group, found = ProcessGroup(name="head"), {}
    calls = {
        "numbers": lambda: group.all_gather(torch.ones(2, 3)),
        "vector": lambda: group.all_gather(torch.ones(2)),
        "no numbers": lambda: group.all_gather(torch.ones(2, 0)),
        "object": lambda: group.all_gather_object(2),
    }
    with mock.patch("pickle.loads", side_effect=AssertionError("unpickled")):
        for (call, function), (name, forge) in itertools.product(calls.items(), FORGERIES.items()):
            if (call == "object" and name not in LENGTHS) or (
                call != "numbers" and name == "many bytes"  # not so many for other calls
            ):
                continue
            with forging(rank, forge):
                found[call, name] = repr(outcome_of(function).error)
    assert torch.equal(torch.cat(group.all_gather(torch.ones(2))), torch.ones(4))
    return found


LENGTHS = ("negative", "most negative", "huge", "more than memory")


def outside_with_replicas(rank: int) -> str:
    layer = Aware()
    layer.process_group = distributed.new_group([0])
    model = DataParallel(layer, ["cpu"] * 2)
    return str(outcome_of(lambda: model(torch.ones(2))).error)


def parts(rank: int) -> Any:
    group = ProcessGroup(distributed.new_group([0, 1]))
    assert group.split(2) is group
    return group.rank, group.size, type(group.split(1))


def copies(rank: int) -> Any:
    """A layer that one rank has copied, to keep the best one, say, goes on with the others."""
    layer = SynchronizedBatchNorm1d(2)
    layer(torch.ones(3, 2))
    if rank == 0:
        layer = copy.deepcopy(layer)
    layer(torch.ones(3, 2))
    group = copy.deepcopy({"group": ProcessGroup()})["group"]
    return group.all_gather_object(rank), str(outcome_of(lambda: pickle.dumps(group)).error)


class Aware(ReplicaAware, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)


def aware(rank: int) -> Any:
    layer = Aware()
    first = layer.group
    layer.group_size = 1
    assert isinstance(layer.group, SoloGroup)
    layer.group_size = None
    single = DataParallel(layer, ["cpu"] * 2)(torch.ones(1))  # one replica: the processes
    several = str(outcome_of(lambda: DataParallel(layer, ["cpu"] * 2)(torch.ones(2))).error)
    only_own = [distributed.new_group([member]) for member in range(2)]
    layer.process_group = only_own[rank]
    replicas = DataParallel(layer, ["cpu"] * 2)(torch.ones(2)).tolist()
    layer.process_group = None
    return type(first), layer(torch.ones(1)).item(), single.item(), replicas, several


def alone_on_one_rank(rank: int) -> Any:
    """A layer that only one rank runs, and groups that all make after that."""
    if rank == 0:
        SynchronizedBatchNorm1d(3, group_size=1)(torch.randn(4, 3))
    everyone = ProcessGroup(distributed.new_group([0, 1]))
    return everyone.all_gather_object(rank)


def not_a_member(rank: int) -> Any:
    alone = distributed.new_group([0])
    return str(outcome_of(lambda: ProcessGroup(alone)).error)


def with_warnings(rank: int) -> Any:
    """The checks above, and what they warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {check.__name__: check(rank) for check in CHECKS}
    return found, [str(warning.message) for warning in caught]


CHECKS = [
    dtypes, empty, long, strided, odd_numbers, changed_in_place, traffic, batched, own_results,
    objects,
    bad_input, mismatch_in_all_gather, mismatch_of_layers, mismatch_of_widths,
    mismatch_in_requires_grad, mismatch_of_order, mismatch_under_debug, parts, copies,
    alone_on_one_rank, aware, not_a_member, mismatch_in_backward, beside_a_forger,
    outside_with_replicas,
]  # fmt: skip


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return run_ranks(2, with_warnings)


def test_nothing_warns(two):
    assert [caught for _, caught in two] == [[], []]


def test_dtype_stays(two):
    assert [found["dtypes"] for found, _ in two] == [[True] * 5] * 2


def test_empty_tensors_are_gathered_and_scattered(two):
    shapes = [[(0, 0), (1, 0)], [(0, 3), (0, 3)]]
    assert [found["empty"] for found, _ in two] == [(shapes, []), (shapes, [2.0, 2.0])]


def test_long_tensors_are_gathered(two):
    assert [found["long"] for found, _ in two] == [[2**19, 2**19 + 1]] * 2


def test_strides_do_not_matter(two):
    x = torch.arange(6.0).view(2, 3).t()
    expected = [2 * x, torch.cat([x, x]), x[:, :1].expand(3, 2)]
    for found, _ in two:
        torch.testing.assert_close(found["strided"], expected)


def test_numbers_of_odd_kinds(two):
    z = torch.tensor([1 - 2j, 3 + 1j])
    for found, _ in two:
        total, gathered, sent, mean, is_negative, one, negatives, *own = found["odd_numbers"]
        torch.testing.assert_close([total, gathered, sent], [2 * z, torch.cat([z, z]), z])
        assert mean == 60000
        assert is_negative
        assert one == 1
        assert negatives.tolist() == [-4, -2, -2, -2, -4]
        torch.testing.assert_close(own, [2 * z, 2 * z[:1].expand(8193)])


def test_results_may_be_changed_in_place_before_the_backward(two):
    assert [found["changed_in_place"].tolist() for found, _ in two] == [[101] * 2, [1010] * 2]


def test_each_call_is_one_collective_but_all_gather_which_exchanges_shapes(two):
    expected = {
        "all_reduce": ["all_gather"],
        "all_reduce of at most 64 KiB": ["all_gather"],
        "all_reduce of more": ["all_reduce"],
        "broadcast": ["broadcast"],
        "reduce_scatter": ["all_to_all_single"],
        "barrier": ["barrier"],
        "all_gather": ["all_gather", "all_gather"],
        "all_gather of nothing": ["all_gather"],  # the shapes
        "reduce_scatter of nothing": [],
    }
    assert [found["traffic"] for found, _ in two] == [expected] * 2


def test_batched_gradients_are_refused(two):
    for found, _ in two:
        for error in found["batched"]:
            assert error.startswith("collectives between processes take no batched gradients")


def test_argument_is_left_alone(two):
    assert all(torch.equal(found["own_results"], torch.ones(2)) for found, _ in two)


def test_objects_are_gathered_in_the_order_of_ranks(two):
    assert two[0][0]["objects"] == ({"rank": 0}, {"rank": 1})


def test_bad_input_is_refused_by_the_rank_that_has_it(two):
    assert "`ProcessGroup`, rank 1: all_reduce takes tensors (got int); " in two[1][0]["bad_input"]


def test_calls_of_all_gather_that_do_not_match_are_named_in_every_rank(two):
    for found, _ in two:
        assert found["mismatch_in_all_gather"].startswith(
            "`head`: the calls do not match: rank 0: `head`, call 2: all_gather() of float32 "
            "[2, 3] that does not require gradients; rank 1: `head`, call 2: all_gather() of "
            "float32 [2, 4] that does not"
        )


def test_tensors_that_require_gradients_on_some_ranks_only_are_named(two):
    for found, _ in two:
        gathered, scattered = found["mismatch_in_requires_grad"]
        assert re.search("rank 0: .*all_gather.. of float32 .2. that requires", gathered)
        assert re.search("rank 1: .*all_gather.. of float32 .2. that does not", gathered)
        assert "float32 [2], float32 [2] that requires gradients; rank 1: `Pro" in scattered


def test_calls_of_other_layers_are_named(two):
    for found, _ in two:
        error = found["mismatch_of_layers"]
        assert "rank 0: `stem`, call 1: all_gather() of float32 [2] that does not" in error
        assert "rank 1: `neck`, call 1: all_gather() of" in error


def test_synchronized_layers_of_different_widths_are_named(two):
    for found, _ in two:
        assert found["mismatch_of_widths"].startswith(
            "`SynchronizedBatchNorm1d`: the calls do not match: rank 0: "
        )


def test_under_debug_layers_that_are_called_in_another_order_are_named_by_their_paths(two):
    for found, _ in two:
        for path in ("1", "0.0"):
            assert f"`{path}`, call 1: batch_norm() of float32 [3]" in found["mismatch_of_order"]


def test_under_debug_all_calls_are_compared(two):
    for found, _ in two:
        first, second, third = found["mismatch_under_debug"]
        assert "the calls do not match: rank 0: `tail`, call 1: all_reduce(op='s" in first
        assert "rank 0: `tail`, call 2: broadcast(src=0) of float32 [2]" in second
        assert "rank 1: `tail`, call 2: barrier()" in second
        assert "rank 1: `tail`, call 3: all_gather_object()" in third


def test_groups_of_some_processes(two):
    assert [found["parts"] for found, _ in two] == [(0, 2, SoloGroup), (1, 2, SoloGroup)]


def test_copies_go_on_with_the_others(two):
    for found, _ in two:
        gathered, error = found["copies"]
        assert gathered == (0, 1)
        assert "cannot be pickled: it connects the processes of this run" in error


def test_aware_layer_finds_the_processes(two):
    for found, _ in two:
        kind, alone, single, replicas, several = found["aware"]
        assert (kind, alone, single) == (ProcessGroup, 2.0, 2.0)
        assert replicas == [2.0, 2.0]  # of this process
        assert "several replicas in each of several processes" in several
        assert "DistributedDataParallel" in several and "process_group" in several


def test_layer_that_one_rank_runs_alone_leaves_the_others_in_peace(two):
    assert [found["alone_on_one_rank"] for found, _ in two] == [(0, 1)] * 2


def test_process_outside_the_group_is_refused(two):
    assert two[0][0]["not_a_member"] == "None"
    assert "`ProcessGroup`: this process is not in the process_group" in two[1][0]["not_a_member"]


def test_replicas_in_a_process_outside_the_group_are_refused(two):
    assert two[0][0]["outside_with_replicas"] == "None"
    assert (
        "`Aware`: this process is not in the process_group" in (two[1][0]["outside_with_replicas"])
    )


def test_under_debug_backwards_are_compared_and_named_after_their_calls(two):
    calls = [
        "all_reduce_backward() of float32 [2]",
        "all_reduce_backward() of float32 [2, 2]",
        "all_gather_backward() of float32 [2, 2]",
        "reduce_scatter_backward() of float32 [4]",
        "broadcast_backward() of float32 [2]",
    ]
    for found, _ in two:
        for index, (call, error) in enumerate(
            zip(calls, found["mismatch_in_backward"], strict=True), 2
        ):
            assert f"rank 0: `spine`, call {index}: {call}; rank 1: `spine`, call " in error


def test_forged_headers_are_refused_and_their_sender_named(two):
    first, second = (found["beside_a_forger"] for found, _ in two)
    for (call, name), error in first.items():
        if name in LENGTHS or name == "many bytes":
            assert re.match(
                r"ReplicationError\('`head`, call \d+, all_gather(_object)?: a length must be a "
                r"whole number from 0 to \d+ here, and rank 1 announces -?\d+; ",
                error,
            ), (call, name, error)
        else:
            assert error.startswith("ReplicasDiverged(")
            assert "rank 1: " in error
            assert "\\x1b" not in error
            assert "\\n" not in error
        assert error == second[call, name].replace("rank 1: a", "rank 0: a")


# -- headers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length",
    [-1, 2**62, 0.5, float("nan"), float("inf"), -float("inf")],
    ids=str,
)
def test_lengths_that_cannot_be_are_refused_with_their_rank(length):
    check_lengths([0, 3], 8, "`a`, call 1")
    with pytest.raises(ReplicationError, match=f"^`a`, call 1: .* rank 1 announces {length};"):
        check_lengths([1, length], 8, "`a`, call 1")


def test_lengths_up_to_the_memory_are_accepted():
    most = memory_of(torch.device("cpu")) // 16
    assert 2**20 < most < 2**40
    check_lengths([most, 0], 8, "`a`, call 1")
    with pytest.raises(ReplicationError, match=f"from 0 to {most} here, and rank 0 announces"):
        check_lengths([most + 1, 0], 8, "`a`, call 1")


def test_a_header_has_one_size_and_survives_packing():
    shapes = [(), (2,), (3, 0), tuple(range(40))]
    calls = [
        Call("all_gather", layouts=((torch.float32, shape),), any_length=True, where="`a`, call 1")
        for shape in shapes
    ]
    calls += [
        calls[1]._replace(where="`" + "\N{BLACK STAR}" * 200),
        calls[1]._replace(option="x" * 1000),
    ]
    packed = [packed_header(call) for call in calls]
    assert len(set(map(len, packed))) == 1
    headers = [Header.unpack(data) for data in packed]
    assert [header.length for header in headers] == [0, 2, 3, 0, 2, 2]
    assert [header.text for header in headers[:4]] == list(map(str, calls[:4]))
    for header, call in zip(headers[4:], calls[4:], strict=True):
        assert str(call).startswith(header.text.rstrip("\N{REPLACEMENT CHARACTER}"))


def digest_of(call: Call) -> bytes:
    return Header.unpack(packed_header(call)).digest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "all_reduce"},
        {"option": "op='max'"},
        {"layouts": ((torch.float64, (2, 3)),)},
        {"layouts": ((torch.float32, (2, 4)),)},
        {"layouts": ((torch.float32, (2, 3, 1)),)},
        {"any_length": False},
        {"requires_grad": True},
        {"where": "`head`, call 2"},
    ],
    ids=str,
)
def test_headers_differ_where_calls_do(change):
    call = Call(
        "all_gather",
        layouts=((torch.float32, (2, 3)),),
        any_length=True,
        requires_grad=False,
        where="`head`, call 1",
    )
    assert digest_of(call._replace(**change)) != digest_of(call)
    longer = call._replace(layouts=((torch.float32, (5, 3)),))
    assert digest_of(longer) == digest_of(call)
    vector, scalar = (call._replace(layouts=((torch.float32, shape),)) for shape in [(2,), ()])
    assert digest_of(vector) != digest_of(scalar)


def test_calls_of_all_backwards_of_a_collective_have_one_name():
    first = Call("all_gather", where="`head`, call 1").backward(torch.ones(2))
    second = first.backward(torch.ones(2))
    assert [str(call) for call in (first, second)] == ["all_gather_backward() of float32 [2]"] * 2
    assert first.in_backward


def test_calls_whose_texts_are_cut_before_they_differ_are_named_one_by_one():
    calls = [Call("all_gather", option="x" * 1000 + end) for end in "ab"]
    headers = [Header.unpack(packed_header(call)) for call in calls]
    described = [(header.digest, header.text) for header in headers]
    with pytest.raises(ReplicasDiverged, match=r"rank 0: all_gather\(x+; rank 1: all_gather\(x+"):
        check_same_call(described, "`head`", range(2), "rank")


# -- some of three ranks, and a second life ----------------------------------------------------


def some_of_three(rank: int) -> Any:
    last_two = distributed.new_group([1, 2])
    found = {}
    if rank:
        group = ProcessGroup(last_two)
        found["broadcast"] = group.broadcast(torch.tensor(rank), src=1).item()
        found["of one"] = group.split(1).all_gather_object(rank)
    whole, again = ProcessGroup(), ProcessGroup()
    part = whole.split(2)
    found["part"] = part.all_gather_object(rank)
    found["shared"] = rank == 2 or part.process_group is again.split(2).process_group
    found["timeout"] = rank == 2 or timeout_of(part.process_group).total_seconds() == TIMEOUT
    return found


def part_of_some(rank: int) -> Any:
    """What the parts of a group gather without rank 0, which is not in the group."""
    group = distributed.new_group([1, 2, 3])
    return ProcessGroup(group).split(2).all_gather_object(rank) if rank else None


def forward_mode(rank: int) -> Any:
    """The errors of each collective."""
    group, found = ProcessGroup(), []
    warnings.simplefilter("ignore")  # of torch, about what it imports for this
    for call in (
        group.all_gather,
        partial(group.all_reduce, op="max"),
        lambda x: group.reduce_scatter([x, x]),
        group.all_reduce,
        group.broadcast,
    ):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
            found.append(repr(outcome_of(partial(call, x)).error))
    return found


def kept_by_others(rank: int) -> Any:
    errors = []
    for kept in (distributed.new_group([0, 1]), distributed.group.WORLD):
        x = torch.ones(2, requires_grad=True)
        y = ProcessGroup(kept).all_reduce(x)
        distributed.barrier()
        distributed.destroy_process_group(kept)
        errors.append(str(outcome_of(partial(y.backward, torch.ones(2))).error))
    return errors


def destroyed(rank: int, store: str) -> dict[str, str]:
    """The errors of layers and groups whose process group is gone."""
    pair, whole = distributed.new_group([0, 1]), distributed.group.WORLD
    own = [distributed.new_group([member]) for member in range(2)][rank]
    layers = {
        "of a group": SynchronizedBatchNorm1d(2, process_group=pair),
        "of the world": SynchronizedBatchNorm1d(2, process_group=whole),
        "converted": convert_model(nn.Sequential(nn.BatchNorm1d(2)), process_group=pair),
        "aware": Aware(),
        "alone": SynchronizedBatchNorm1d(2, process_group=own),
    }
    layers["aware"].process_group = pair
    layers["copied"] = copy.deepcopy(layers["of a group"])
    layers["replicas"] = DataParallel(copy.deepcopy(layers["aware"]), ["cpu"] * 2)
    x = torch.randn(4, 2, requires_grad=True)
    calls = {name: partial(layer, x) for name, layer in layers.items()}
    graphs = {name: layers[name](x) for name in ("of a group", "of the world", "aware")}
    groups = [ProcessGroup(pair, "kept"), ProcessGroup(whole, "whole")]
    found = {}

    def note(when: str) -> None:
        for name, call in calls.items():
            found[f"{name}, {when}"] = repr(outcome_of(call).error)
        for name, y in graphs.items():
            call = partial(y.sum().backward, retain_graph=True)
            found[f"backward {name}, {when}"] = repr(outcome_of(call).error)
        for group in groups:
            call = partial(group.all_reduce, torch.ones(2))
            found[f"{group._name}, {when}"] = repr(outcome_of(call).error)
        found[f"made, {when}"] = repr(outcome_of(lambda: ProcessGroup(pair, "made")).error)

    distributed.barrier()
    distributed.destroy_process_group(pair)
    distributed.destroy_process_group(own)
    of_world = {name: calls.pop(name) for name in ["of the world"]}
    graph_of_world, group_of_world = graphs.pop("of the world"), groups.pop()
    note("before the others")
    distributed.barrier()
    distributed.destroy_process_group()
    calls |= of_world
    graphs["of the world"] = graph_of_world
    groups.append(group_of_world)
    note("after all")
    for name in ("of a group", "of the world"):
        layers[name].eval()(x)  # needs no group
        layers[name].train()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    distributed.new_group([0, 1])
    note("in a new world")
    layers["of a group"].process_group = None
    found["mended"] = repr(outcome_of(partial(layers["of a group"], x)).error)
    return found


def parts_of_destroyed_groups(rank: int, store: str) -> Any:
    """Errors, and the objects that a part gathers in a new world."""
    part = ProcessGroup(name="stem").split(2)
    distributed.barrier()
    if rank != 2:
        distributed.destroy_process_group(part.process_group)
    error = outcome_of(lambda: ProcessGroup(name="stem").split(2)).error
    kept = distributed.group.WORLD  # as if another object had kept it
    distributed.barrier()
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    assert kept is not distributed.group.WORLD
    return repr(error), ProcessGroup().split(2).all_gather_object(rank)


def of_a_mesh(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns"))
    rows, columns = (Aware(), Aware())
    rows.process_group, columns.process_group = (mesh.get_group(i) for i in range(2))
    before = [layer(torch.ones(1)).item() for layer in (rows, columns)]
    distributed.barrier()
    distributed.destroy_process_group()
    return before, repr(outcome_of(lambda: rows(torch.ones(1))).error)


def let_go(rank: int) -> Any:
    layer, x = SynchronizedBatchNorm1d(2), torch.randn(4, 2, requires_grad=True)
    y = layer(x)
    loss = (y * torch.randn(4, 2)).sum() + layer.group.all_reduce(x).sum()
    loss.backward(retain_graph=True)
    world = weakref.ref(distributed.group.WORLD)
    distributed.barrier()
    distributed.destroy_process_group()
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return world(), str(error.value)


def second_life(rank: int, store: str) -> Any:
    layer = Aware()
    before = layer(torch.ones(1)).item()
    distributed.barrier()
    distributed.destroy_process_group()
    alone = layer(torch.ones(1)).item()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return before, alone, layer(torch.ones(1)).item()


def test_some_of_three_ranks():
    first, second, third = run_ranks(3, some_of_three)
    assert "broadcast" not in first
    assert [found["broadcast"] for found in (second, third)] == [2, 2]
    assert [found["of one"] for found in (second, third)] == [(1,), (2,)]
    assert [found["part"] for found in (first, second, third)] == [(0, 1), (0, 1), (2,)]
    assert all(found["shared"] and found["timeout"] for found in (first, second, third))


def test_group_of_some_processes_is_split_without_the_others():
    assert run_ranks(4, part_of_some) == [None, (1, 2), (1, 2), (3,)]


def test_derivatives_in_forward_mode_are_refused():
    for messages in run_ranks(2, forward_mode):
        text = "transforms and forward-mode derivatives do not reach the other members"
        assert all(text in message for message in messages), messages


def test_backward_after_destroy_is_an_error_while_the_group_is_referenced():
    for messages in run_ranks(2, kept_by_others):
        assert all("the process group has been destroyed" in message for message in messages)


def test_destroyed_process_group_is_named_with_its_layer(tmp_path):
    for found in run_ranks(2, destroyed, str(tmp_path / "store")):
        assert found.pop("mended") == "None"
        assert len(found) == 10 + 13 + 13
        for name, error in found.items():
            assert error.startswith("ReplicationError("), (name, error)
            assert "the process group has been destroyed; call torch.distributed" in error, name
        for when in ("before the others", "after all", "in a new world"):
            for name, where in {
                "of a group": "`SynchronizedBatchNorm1d`: ",
                "converted": "`0`: ",
                "aware": "`Aware`: ",
                "backward aware": "`Aware`, rank ",
                "kept": "`kept`, rank ",
                "made": "`made`: ",
            }.items():
                assert where in found[f"{name}, {when}"]


def test_part_of_a_group_is_not_used_after_either_is_destroyed(tmp_path):
    results = run_ranks(3, parts_of_destroyed_groups, str(tmp_path / "store"))
    for error, _ in results[:2]:
        assert "`stem, ranks 0-1`: the process group has been destroyed" in error
    assert [gathered for _, gathered in results] == [(0, 1), (0, 1), (2,)]


def test_groups_of_a_device_mesh():
    for before, error in run_ranks(2, of_a_mesh):
        assert before == [2, 1]
        assert "`Aware`: the process group has been destroyed" in error


def test_a_graph_does_not_keep_the_process_group():
    # Its threads would run on while Python shuts down, which then aborts at times.
    for world, message in run_ranks(2, let_go):
        assert world is None
        assert "the process group has been destroyed; call torch.distributed.destroy" in message


FIRST_CALL = """
import sys, weakref
import torch
from torch import distributed
from replication import ProcessGroup

distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
group, x = ProcessGroup(), torch.ones(2, requires_grad=True)
(group.all_reduce(x) + group.all_gather(x)[0] + group.reduce_scatter([x])).sum().backward()
world = weakref.ref(distributed.group.WORLD)
distributed.destroy_process_group()
print(world(), [name for name in ("torch._dynamo", "torch.distributed.nn") if name in sys.modules])
"""


def test_the_first_call_does_not_import_the_compiler(tmp_path):
    done = run_python("-c", FIRST_CALL, f"file://{tmp_path}/store")
    assert done.stdout == "None []\n", done.stderr


def test_layer_outlives_the_processes_it_was_used_with(tmp_path):
    assert run_ranks(2, second_life, str(tmp_path / "store")) == [(2, 1, 2)] * 2


def test_without_torch_distributed_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"init_process_group.*SoloGroup"):
        ProcessGroup()
