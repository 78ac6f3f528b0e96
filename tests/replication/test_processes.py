"""Groups of processes, on gloo over loopback, give the results of groups of replicas."""

from __future__ import annotations

import copy
import pickle
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn

from replication import (
    DataParallel,
    ProcessGroup,
    ReplicaAware,
    ReplicasDiverged,
    ReplicationError,
    SoloGroup,
)
from replication._torch import gathered, timeout_of
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.kit.collectives import CASES, EACH, OPS, derivatives, leaves, upstream
from tests.kit.programs import program, run_python
from tests.kit.ranks import TIMEOUT, needs_gloo, recorded_collectives, run_ranks
from tests.kit.threads import outcome_of

pytestmark = needs_gloo


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


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
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


def dtype_stays(rank: int) -> None:
    group = ProcessGroup()
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = torch.ones(2, dtype=dtype)
        op = "max" if dtype is torch.bool else "sum"
        assert {y.dtype for call in EACH.values() for y in call(group, x, op)} == {dtype}


def empty_tensors_are_gathered_and_scattered(rank: int) -> None:
    group = ProcessGroup()
    assert [x.shape for x in group.all_gather(torch.zeros(rank, 0))] == [(0, 0), (1, 0)]
    assert [x.shape for x in group.all_gather(torch.zeros(0, 3))] == [(0, 3), (0, 3)]
    # Rank 0 receives nothing, and sends.
    assert group.reduce_scatter([torch.zeros(0), torch.ones(2)]).tolist() == [2.0, 2.0] * rank


def long_tensors_are_gathered(rank: int) -> None:
    gathered = ProcessGroup().all_gather(torch.zeros(2**19 + rank))
    assert [len(x) for x in gathered] == [2**19, 2**19 + 1]


def strides_do_not_matter(rank: int) -> None:
    group, x = ProcessGroup(), torch.arange(6.0).view(2, 3).t()
    torch.testing.assert_close(group.all_reduce(x), 2 * x)
    torch.testing.assert_close(group.all_gather(x), (x, x))
    column = x[:, :1].expand(3, 2)
    torch.testing.assert_close(group.broadcast(column), column)


def numbers_of_odd_kinds(rank: int) -> None:
    group, z = ProcessGroup(), torch.tensor([1 + 2j, 3 - 1j]).conj()
    value = z.clone()
    for y in (*group.all_gather(z), group.broadcast(z, 1)):
        torch.testing.assert_close(y, value)
    for y in (group.all_reduce(z), group.reduce_scatter([z, z])):
        torch.testing.assert_close(y, 2 * value)
    torch.testing.assert_close(group.all_reduce(z[:1].expand(3)), 2 * value[:1].expand(3))
    large = torch.tensor([60000.0], dtype=torch.float16)
    assert group.all_reduce(large, "mean") == 60000
    assert group.broadcast(torch.tensor(-0.0)).signbit()
    assert group.broadcast(torch.tensor(float("nan") if rank else 1.0)) == 1
    negative = z[:1].imag  # a view, in whose memory is the number without its sign
    assert negative.is_neg()
    assert group.all_reduce(negative) == group.reduce_scatter([negative, negative]) == -4
    assert torch.cat([*group.all_gather(negative), group.broadcast(negative, 1)]).eq(-2).all()


def results_may_be_changed_in_place_before_the_backward(rank: int) -> None:
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
    assert x.grad.tolist() == [[101] * 2, [1010] * 2][rank]


def each_call_is_one_collective_but_all_gather_which_exchanges_shapes(rank: int) -> None:
    group, x = ProcessGroup(), torch.ones(2)
    for call, expected in [
        (lambda: group.all_reduce(x), ["all_reduce"]),
        (lambda: group.all_reduce(x, "max"), ["all_gather"]),
        (lambda: group.broadcast(x), ["broadcast"]),
        (lambda: group.reduce_scatter([x, x]), ["all_to_all_single"]),
        (group.barrier, ["all_reduce"]),
        (lambda: group.all_gather(x), ["all_gather", "all_gather"]),
        (lambda: group.all_gather(x[:0]), ["all_gather", "all_gather"]),  # the second of nothing
        (lambda: group.reduce_scatter([x[:0], x[:0]]), []),
    ]:
        with recorded_collectives() as made:
            call()
        assert [name for name, _ in made] == expected


def argument_is_left_alone(rank: int) -> None:
    group, x, long = ProcessGroup(), torch.ones(2), torch.ones(20_000)
    calls = [*EACH.values(), lambda group, x: (group.all_reduce(long),)]
    for y in [y for call in calls for y in call(group, x)]:
        y.fill_(rank + 5.0)
        group.barrier()
        assert (y == rank + 5.0).all()
    assert long.eq(1).all()
    assert x.eq(1).all()


def objects_are_gathered_in_the_order_of_ranks(rank: int) -> None:
    assert ProcessGroup().all_gather_object({"rank": rank}) == ({"rank": 0}, {"rank": 1})


def bad_input_is_refused_by_the_rank_that_has_it(rank: int) -> None:
    with pytest.raises(TypeError, match=f"^`ProcessGroup`, rank {rank}: all_reduce takes dense, "):
        ProcessGroup().all_reduce(3)


def diverges(call: Callable[[], Any], *texts: str) -> None:
    """Asserts that a call raises an error that names both ranks and has some texts."""
    with pytest.raises(ReplicasDiverged, match=r"rank 0: .*; rank 1: ") as error:
        call()
    for text in texts:
        assert text in str(error.value)


def calls_of_all_gather_that_do_not_match_are_named_in_every_rank(rank: int) -> None:
    group = ProcessGroup(distributed.new_group([0, 1]), "head")
    group.barrier()
    diverges(
        lambda: group.all_gather(torch.ones(2, 3 + rank)),
        "`head`: the calls do not match: rank 0: `head`, call 2: all_gather of float32 [*, 3] "
        "that does not require gradients; rank 1: `head`, call 2: all_gather of float32 [*, 4] ",
    )
    gathers = group.all_gather if rank else group.all_gather_object
    diverges(lambda: gathers(torch.ones(2)), "rank 0: `head`, call 3: all_gather_object")


@contextmanager
def debugging() -> Iterator[None]:
    """As with ``TORCH_DISTRIBUTED_DEBUG=INFO``."""
    level = distributed.get_debug_level()
    distributed.set_debug_level(distributed.DebugLevel.INFO)
    try:
        yield
    finally:
        distributed.set_debug_level(level)


def tensors_that_require_gradients_on_some_ranks_only_are_named(rank: int) -> None:
    group, x, y = ProcessGroup(), torch.ones(2, requires_grad=rank == 0), torch.ones(2)
    with torch.no_grad():
        assert torch.cat(group.all_gather(x)).eq(1).all()
    required = "that requires gradients; rank 1"
    diverges(lambda: group.all_gather(x), required, "does not require gradients. All")
    with debugging():
        diverges(lambda: group.reduce_scatter([y, x]), f"float32 [2], float32 [2] {required}")


def layers_that_are_called_in_another_order_are_named_by_their_paths(rank: int) -> None:
    """Two layers of one class and width."""
    net = nn.Sequential(nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3))
    net = convert_model(net, process_group=distributed.new_group([0, 1]))
    first, second = (net[0][0], net[1]) if rank else (net[1], net[0][0])
    texts = [f"`{path}`, call 1: batch_norm(eps=1e-05) of float32 [3]" for path in ("1", "0.0")]
    diverges(lambda: second(first(torch.randn(2, 3))), *texts)


def ranks_that_have_caught_an_error_go_on_together(rank: int) -> None:
    """One of them has begun a call more than the other."""
    layers = [ProcessGroup(name=name) for name in ("head", "tail")]
    if rank == 0:
        with mock.patch("replication.groups.collective.gathered", side_effect=MemoryError):
            error = outcome_of(lambda: layers[0].all_gather(torch.ones(2))).error
        assert isinstance(error, MemoryError)
    diverges(lambda: layers[rank].all_gather(torch.ones(2)), "rank 0: `head`, ", "rank 1: `tail`")
    norm, x = SynchronizedBatchNorm1d(3), torch.randn(4, 3)
    assert norm(x).shape == x.shape
    assert len(layers[1].all_gather(x)) == 2


@debugging()
def all_calls_are_compared(rank: int) -> None:
    group, x = ProcessGroup(distributed.new_group([0, 1]), "tail"), torch.ones(2)
    diverges(
        lambda: group.all_reduce(x, "max" if rank else "sum"),
        "rank 0: `tail`, call 1: all_reduce(op='sum') of float32 [2] ",
    )
    diverges(
        lambda: group.barrier() if rank else group.broadcast(x),
        "rank 0: `tail`, call 2: broadcast(src=0) of float32 [2] ",
        "rank 1: `tail`, call 2: barrier",
    )
    diverges(
        lambda: group.all_gather_object(x) if rank else group.reduce_scatter([x, x]),
        "rank 1: `tail`, call 3: all_gather_object",
    )


@debugging()
def backwards_are_compared_and_named_after_their_calls(rank: int) -> None:
    group, x = (
        ProcessGroup(distributed.new_group([0, 1]), "spine"),
        torch.ones(2, requires_grad=True),
    )
    calls = {
        "all_reduce_backward of float32 [*]": group.all_reduce(x),
        "all_reduce_backward of float32 [*, 2]": group.all_reduce(x, "max"),
        "all_gather_backward of float32 [*, 2]": group.all_gather(x)[1],
        "reduce_scatter_backward of float32 [*]": group.reduce_scatter([x, x]),
        "broadcast_backward of float32 [*]": group.broadcast(x),
    }
    # Gradients of a scattered result differ in length, which is no mismatch.
    tensors = [torch.ones(2 + i, requires_grad=True) for i in range(2)]
    group.reduce_scatter(tensors).sum().backward()
    for index, (call, y) in enumerate(calls.items(), 8):
        diverges(
            group.barrier if rank else partial(y.backward, torch.ones(2)),
            f"rank 0: `spine`, call {index}: {call}; rank 1: `spine`, call ",
        )


def groups_of_some_processes(rank: int) -> None:
    group = ProcessGroup(distributed.new_group([0, 1]))
    assert group.split(2) is group
    assert (group.rank, group.size, type(group.split(1))) == (rank, 2, SoloGroup)
    alone = ProcessGroup([distributed.new_group([each]) for each in (0, 1)][rank])
    assert alone.all_reduce(torch.ones(3)).tolist() == [1] * 3


def copies_go_on_with_the_others(rank: int) -> None:
    """A layer that one rank has copied, to keep the best one, say."""
    layer = SynchronizedBatchNorm1d(2)
    layer(torch.ones(3, 2))
    if rank == 0:
        layer = copy.deepcopy(layer)
    layer(torch.ones(3, 2))
    group = copy.deepcopy({"group": ProcessGroup()})["group"]
    assert group.all_gather_object(rank) == (0, 1)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(group)


class Aware(ReplicaAware, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x)


def aware_layer_finds_the_processes(rank: int) -> None:
    layer = Aware()
    assert type(layer.group) is ProcessGroup
    layer.group_size = 1
    assert isinstance(layer.group, SoloGroup)
    layer.group_size = None
    model = DataParallel(layer, ["cpu"] * 2)
    assert layer(torch.ones(1)) == model(torch.ones(1)) == 2  # in one replica: the processes
    with pytest.raises(ReplicationError, match="either in several replicas or in several"):
        model(torch.ones(2))
    only_own = [distributed.new_group([member]) for member in range(2)]
    layer.process_group = only_own[rank]
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]  # of this process
    if rank == 1:
        for shape in (1, 2):
            layer.process_group = only_own[0]
            with pytest.raises(ValueError, match="`Aware`: process_group must contain"):
                model(torch.ones(shape))


def layer_that_one_rank_runs_alone_leaves_the_others_in_peace(rank: int) -> None:
    if rank == 0:
        SynchronizedBatchNorm1d(3, group_size=1)(torch.randn(4, 3))
    everyone = ProcessGroup(distributed.new_group([0, 1]))
    assert everyone.all_gather_object(rank) == (0, 1)


class OverGloo:
    """A group of one rank whose tensors are not on the CPU: gloo gets others of their shapes."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def size(self) -> int:
        return 1

    def _allgather_base(self, rows: Tensor, tensor: Tensor, options: Any) -> Any:
        there = [torch.zeros(t.shape, dtype=t.dtype) for t in (rows, tensor)]
        return self.process_group._allgather_base(*there, options)


def gloo_takes_tensors_of_gpus_of_any_shape(rank: int) -> None:
    group = OverGloo(distributed.new_group([rank], use_local_synchronization=True))
    for shape in ((33,), (), (2, 3), (0, 3)):
        for dtype in (torch.float32, torch.complex64):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            assert gathered(tensor, group).shape == (1, *shape)


def a_barrier_does_not_guess_the_device_of_the_rank(rank: int) -> None:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> None:
        raise RuntimeError(f"barrier guesses GPU {rank}")  # of which NCCL warns

    with mock.patch.object(distributed, "barrier", barrier):
        start = time.monotonic()
        if rank:
            time.sleep(0.3)
        ProcessGroup().barrier()
        assert time.monotonic() - start > 0.2


CHECKS = [
    dtype_stays, empty_tensors_are_gathered_and_scattered, long_tensors_are_gathered,
    strides_do_not_matter, numbers_of_odd_kinds,
    results_may_be_changed_in_place_before_the_backward,
    each_call_is_one_collective_but_all_gather_which_exchanges_shapes,
    argument_is_left_alone,
    objects_are_gathered_in_the_order_of_ranks, bad_input_is_refused_by_the_rank_that_has_it,
    calls_of_all_gather_that_do_not_match_are_named_in_every_rank,
    tensors_that_require_gradients_on_some_ranks_only_are_named,
    layers_that_are_called_in_another_order_are_named_by_their_paths,
    ranks_that_have_caught_an_error_go_on_together, all_calls_are_compared,
    backwards_are_compared_and_named_after_their_calls, groups_of_some_processes,
    copies_go_on_with_the_others, layer_that_one_rank_runs_alone_leaves_the_others_in_peace,
    aware_layer_finds_the_processes, gloo_takes_tensors_of_gpus_of_any_shape,
    a_barrier_does_not_guess_the_device_of_the_rank,
]  # fmt: skip


def failures(rank: int) -> dict[str, str]:
    """What is wrong, by the name of the check."""
    found = {}
    for check in CHECKS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check(rank)
            except BaseException:
                found[check.__name__] = traceback.format_exc()
        if caught:
            found[check.__name__] = str([str(warning.message) for warning in caught])
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, str]]:
    return run_ranks(2, failures)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(two, check):
    for rank, found in enumerate(two):
        assert check.__name__ not in found, f"rank {rank}: {found[check.__name__]}"


# -- other groups, and the end of groups -------------------------------------------------------


def some_of_three_ranks(rank: int, _: str) -> None:
    last_two = distributed.new_group([1, 2])
    if rank:
        group = ProcessGroup(last_two)
        assert group.broadcast(torch.tensor(rank), src=1) == 2
        assert group.split(1).all_gather_object(rank) == (rank,)
    whole, again = ProcessGroup(), ProcessGroup()
    part = whole.split(2)
    assert part.all_gather_object(rank) == ((2,) if rank == 2 else (0, 1))
    if rank != 2:
        assert part.process_group is again.split(2).process_group
        assert timeout_of(part.process_group).total_seconds() == TIMEOUT


def group_of_some_of_four_ranks_is_split_without_the_others(rank: int, _: str) -> None:
    group = distributed.new_group([1, 2, 3])
    if rank:
        gathered = ProcessGroup(group).split(2).all_gather_object(rank)
        assert gathered == ((3,) if rank == 3 else (1, 2))


def backward_after_destroy_is_an_error_while_the_group_is_referenced(rank: int, _: str) -> None:
    for kept in (distributed.new_group([0, 1]), distributed.group.WORLD):
        y = ProcessGroup(kept).all_reduce(torch.ones(2, requires_grad=True))
        distributed.barrier()
        distributed.destroy_process_group(kept)
        with pytest.raises(ReplicationError, match="the process group has been destroyed"):
            y.backward(torch.ones(2))


def destroyed_process_group_is_named_with_its_layer(rank: int, store: str) -> None:
    pair, whole = distributed.new_group([0, 1]), distributed.group.WORLD
    own = [distributed.new_group([member]) for member in range(2)][rank]
    of_pair = SynchronizedBatchNorm1d(2, process_group=pair)
    of_world = SynchronizedBatchNorm1d(2, process_group=whole)
    aware = Aware()
    aware.process_group = pair
    x = torch.randn(4, 2, requires_grad=True)

    def calls_of(layer: nn.Module, name: str) -> list[tuple[str, Callable[[], Any]]]:
        backward = partial(layer(x).sum().backward, retain_graph=True)
        return [(f"`{name}`", partial(layer, x)), (f"`{name}`", backward)]

    replicas = DataParallel(copy.deepcopy(aware), ["cpu"] * 2)
    converted = convert_model(nn.Sequential(nn.BatchNorm1d(2)), process_group=pair)
    calls = [
        *calls_of(of_pair, "SynchronizedBatchNorm1d"),
        *calls_of(aware, "Aware"),
        ("`0`", partial(converted, x)),
        ("`kept`", partial(ProcessGroup(pair, "kept").all_reduce, x)),
        ("`made`", lambda: ProcessGroup(pair, "made")),
        ("", partial(copy.deepcopy(of_pair), x)),
        ("", partial(SynchronizedBatchNorm1d(2, process_group=own), x)),
        ("", partial(replicas, x)),
    ]
    calls_of_world = [
        *calls_of(of_world, "SynchronizedBatchNorm1d"),
        ("`whole`", partial(ProcessGroup(whole, "whole").all_reduce, x)),
    ]

    def all_are_refused() -> None:
        for where, call in calls:
            with pytest.raises(ReplicationError, match=f"^{where}.*: the process group has been"):
                call()

    distributed.barrier()
    distributed.destroy_process_group(pair)
    distributed.destroy_process_group(own)
    all_are_refused()
    distributed.barrier()
    distributed.destroy_process_group()
    calls += calls_of_world
    all_are_refused()
    for layer in (of_pair, of_world):
        layer.eval()(x)  # needs no group
        layer.train()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    distributed.new_group([0, 1])
    all_are_refused()
    of_pair.process_group = None
    of_pair(x)


def part_of_a_group_is_not_used_by_three_ranks_after_either_is_destroyed(
    rank: int, store: str
) -> None:
    part = ProcessGroup(name="stem").split(2)
    distributed.barrier()
    if rank != 2:
        distributed.destroy_process_group(part.process_group)
        with pytest.raises(ReplicationError, match="`stem, ranks 0-1`: the process group has bee"):
            ProcessGroup(name="stem").split(2)
    kept = distributed.group.WORLD  # as if another object had kept it
    distributed.barrier()
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    assert kept is not distributed.group.WORLD
    gathered = ProcessGroup().split(2).all_gather_object(rank)
    assert gathered == ((2,) if rank == 2 else (0, 1))


def graph_does_not_keep_the_process_group(rank: int, _: str) -> None:
    """Whose threads would run on while Python shuts down, which then aborts at times."""
    layer, x = SynchronizedBatchNorm1d(2), torch.randn(4, 2, requires_grad=True)
    y = layer(x)
    loss = (y * torch.randn(4, 2)).sum() + layer.group.all_reduce(x).sum()
    loss.backward(retain_graph=True)
    world = weakref.ref(distributed.group.WORLD)
    distributed.barrier()
    distributed.destroy_process_group()
    with pytest.raises(ReplicationError, match="the process group has been destroyed"):
        loss.backward()
    assert world() is None


def layer_outlives_the_processes_it_was_used_with(rank: int, store: str) -> None:
    layer = Aware()
    assert layer(torch.ones(1)) == 2
    distributed.barrier()
    distributed.destroy_process_group()
    assert layer(torch.ones(1)) == 1
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert layer(torch.ones(1)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "check"),
    [
        (3, some_of_three_ranks),
        (4, group_of_some_of_four_ranks_is_split_without_the_others),
        (2, backward_after_destroy_is_an_error_while_the_group_is_referenced),
        (2, destroyed_process_group_is_named_with_its_layer),
        (3, part_of_a_group_is_not_used_by_three_ranks_after_either_is_destroyed),
        (2, graph_does_not_keep_the_process_group),
        (2, layer_outlives_the_processes_it_was_used_with),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_ranks(size, check, tmp_path):
    run_ranks(size, check, str(tmp_path / "store"))


@pytest.mark.slow
def test_the_first_call_does_not_import_the_compiler(tmp_path):
    done = run_python(program("calls_collectives"), f"file://{tmp_path}/store")
    assert done.stdout == "None []\n", done.stderr


def test_without_torch_distributed_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"init_process_group.*SoloGroup"):
        ProcessGroup()
