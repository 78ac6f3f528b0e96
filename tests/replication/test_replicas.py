"""Groups alone and of replicas: values, derivatives, freshness, and calls that do not match."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

from replication import DataParallel, Group, ReplicaAware, ReplicationError, SyncMaster
from syncbn import SynchronizedBatchNorm1d
from tests.kit.collectives import (
    CASES,
    EACH,
    OPS,
    Member,
    Tensors,
    in_replicas,
    leaves,
    reduced,
    upstream,
)
from tests.kit.devices import several
from tests.kit.junk import COLLECTIVES
from tests.kit.threads import outcome_of, together, until_others_wait, values

cases = pytest.mark.parametrize("name", CASES)
sizes = pytest.mark.parametrize("size", [1, 3])


# -- values and derivatives --------------------------------------------------------------------


@cases
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_equal_the_oracle(name, size):
    case = CASES[name]
    inputs = leaves(case, size)
    outputs = in_replicas(case.call, inputs)
    expected = case.oracle(inputs)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-15)


def as_function(name: str, size: int) -> tuple[Any, Tensors]:
    """The collective in replicas as a function of all members' tensors, and such tensors."""
    case = CASES[name]
    inputs = leaves(case, size)
    counts = [len(own) for own in inputs]

    def function(*flat: Tensor) -> Tensors:
        rest = list(flat)
        # The sine, because of a linear function the second derivative is zero, and any is right.
        members = [tuple(rest.pop(0).sin() for _ in range(count)) for count in counts]
        return tuple(y.square() for own in in_replicas(case.call, members) for y in own)

    return function, tuple(x for own in inputs for x in own)


@cases
@sizes
def test_derivatives_are_those_of_finite_differences(name, size):
    function, inputs = as_function(name, size)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@cases
@pytest.mark.parametrize("used", [[1], [0, 2]], ids=str)
def test_only_some_members_outputs_enter_the_loss(name, used):
    case = CASES[name]
    inputs = leaves(case, 3)
    flat = [x for own in inputs for x in own]
    grads = upstream(case.oracle(inputs))

    def by(outputs: list[Tensors]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            [y for i in used for y in outputs[i]],
            flat,
            [g for i in used for g in grads[i]],
            materialize_grads=True,
        )

    torch.testing.assert_close(by(in_replicas(case.call, inputs)), by(case.oracle(inputs)))


@pytest.mark.parametrize("op", ["max", "min"])
def test_gradient_of_an_extreme_is_shared_evenly_by_those_who_have_it(op):
    inputs = [(torch.ones(1, requires_grad=True),) for _ in range(3)]
    outputs = in_replicas(lambda group, x: group.all_reduce(x, op), inputs)
    torch.autograd.backward(outputs, [torch.tensor([g]) for g in (0.5, 1.0, 1.5)])
    for (x,) in inputs:
        torch.testing.assert_close(x.grad, torch.ones(1))


def test_gradient_of_a_product_with_zeros():
    inputs = [(torch.tensor(v, requires_grad=True),) for v in (0.0, 2.0, 3.0)]
    (y,), *_ = in_replicas(lambda group, x: (group.all_reduce(x, "product"),), inputs)
    y.backward()
    assert [x.grad.item() for (x,) in inputs] == [6.0, 0.0, 0.0]


def test_every_collective_is_in_the_tables_of_tests():
    methods = {name for name, value in vars(Group).items() if name[0] != "_" and callable(value)}
    assert {*EACH, "barrier", "all_gather_object", "split"} == methods
    assert {name.partition("-")[0] for name in CASES} == {*EACH, "two", "split"}
    assert {*EACH} <= {*COLLECTIVES}


# -- dtypes, modes -----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_dtype_stays(dtype, groups):
    x = torch.ones(2, dtype=dtype)
    op = "max" if dtype is torch.bool else "sum"

    def member(group: Group, x: Tensor) -> list[Tensor]:
        return [y for call in EACH.values() for y in call(group, x, op)]

    for results in in_replicas(member, [(x,)] * groups):
        assert {y.dtype for y in results} == {dtype}


@pytest.mark.parametrize("op", ["sum", "mean", "max", "product"])
def test_autocast_does_not_change_the_dtype(op):
    def member(group: Group, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return group.all_reduce(x, op)

    for dtype in (torch.float32, torch.bfloat16):
        outputs = in_replicas(member, [(torch.ones(2, dtype=dtype),)] * 2)
        assert {y.dtype for y in outputs} == {dtype}


@pytest.mark.parametrize("without", [0, 1])
def test_member_without_grad_gets_and_gives_constants(without):
    def member(group: Group, x: Tensor, replica: int) -> Tensor:
        with torch.set_grad_enabled(replica != without):
            return group.all_reduce(x)

    inputs = [(torch.ones(2, requires_grad=True), i) for i in range(3)]
    outputs = in_replicas(member, inputs)
    assert [y.requires_grad for y in outputs] == [i != without for i in range(3)]
    torch.autograd.backward(
        [y for y in outputs if y.requires_grad], [torch.ones(2), torch.full((2,), 10.0)]
    )
    for i, (x, _) in enumerate(inputs):
        assert x.grad is None if i == without else x.grad.tolist() == [11, 11]


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("without", [0, 1])
def test_member_in_inference_mode_leaves_the_others_their_graph(without, op):
    def member(group: Group, x: Tensor, replica: int) -> Tensor:
        with torch.inference_mode(replica == without):
            return group.all_reduce(x * x, op)

    inputs = [(torch.full((2,), 3.0, requires_grad=True), i) for i in range(2)]
    outputs = in_replicas(member, inputs)
    assert [y.requires_grad for y in outputs] == [i != without for i in range(2)]
    outputs[1 - without].backward(torch.ones(2))
    expected = {"sum": 6.0, "max": 3.0}[op]
    assert torch.equal(inputs[1 - without][0].grad, torch.full((2,), expected))


def test_constants_of_members_in_inference_mode_can_be_used_by_the_others():
    def member(group: Group, x: Tensor) -> Tensor:
        with torch.inference_mode(group.rank == 0):
            y = group.all_reduce(x.detach())
        return torch.ones(1, requires_grad=True) * y if group.rank else y

    outputs = in_replicas(member, [(torch.ones(1),)] * 2)
    outputs[1].backward()
    assert [y.item() for y in outputs] == [2, 2]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mean_of_float16_does_not_overflow(size):
    def member(group: Group, x: Tensor) -> tuple[Tensor, Tensor]:
        return group.all_reduce(x, "mean"), group.reduce_scatter([x] * group.size, "mean")

    x = torch.tensor([60000.0], dtype=torch.float16)
    for results in in_replicas(member, [(x,)] * size):
        assert all(torch.equal(y, x) for y in results)


def test_hooks_on_saved_tensors_of_one_member_see_nothing_of_the_others():
    packed = []

    def member(group: Group, x: Tensor) -> Tensor:
        with saved_tensors_hooks(packed.append, lambda x: x):
            return group.all_reduce(x, "product")

    in_replicas(member, [(torch.ones(2, requires_grad=True),)] * 3)
    assert packed == []


# -- results are one's own ---------------------------------------------------------------------


@cases
def test_results_may_be_changed_in_place(name):
    case = CASES[name]
    inputs = [tuple(x.detach() for x in own) for own in leaves(case, 3)]
    before = copy.deepcopy(inputs)

    def member(group: Group, *xs: Tensor) -> Tensors:
        results = case.call(group, *xs)
        kept = [y.clone() for y in results]
        group.barrier()
        for y in results:
            y.fill_(100.0 + group.rank)
        group.barrier()
        assert all((y == 100.0 + group.rank).all() for y in results)
        return tuple(kept)

    torch.testing.assert_close(in_replicas(member, inputs), case.oracle(before))
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [1, 3])
def test_results_may_be_changed_in_place_before_the_backward(op, size):
    def member(group: Group, x: Tensor) -> Tensor:
        total = group.all_reduce(x * 1, op).mul_(2)
        return total + group.reduce_scatter([x * 1] * group.size, op).mul_(3)

    x = torch.tensor([2.0, 5.0], requires_grad=True)
    outputs = in_replicas(member, [(x,)] * size)
    expected = 5 * reduced(op, [x] * size)
    torch.testing.assert_close(outputs, [expected] * size)
    upstream = [torch.randn(2) for _ in outputs]
    (got,) = torch.autograd.grad(outputs, x, upstream)
    (want,) = torch.autograd.grad(expected, x, sum(upstream))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("hooks", [False, True])
def test_argument_changed_in_place_before_the_backward_is_an_error(hooks):
    """Also behind hooks on saved tensors, where torch's own check sees nothing."""

    def member(group: Group, x: Tensor) -> Tensor:
        x = x * 1
        with saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else nullcontext():
            total = group.all_reduce(x, "product")
        x.add_(100)
        return total

    outputs = in_replicas(member, [(torch.ones(2, requires_grad=True),)] * 2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 0"):
        torch.autograd.backward(outputs, [torch.ones(2)] * 2)


def test_objects_are_gathered_as_they_are():
    objects = [object() for _ in range(3)]
    for gathered in in_replicas(
        lambda group, o: group.all_gather_object(o), [(o,) for o in objects]
    ):
        assert all(a is b for a, b in zip(gathered, objects, strict=True))


def test_barrier_holds_every_member_until_the_last_arrives():
    here = []

    def member(group: Group) -> int:
        if group.rank == 2:
            until_others_wait(2)
        here.append(group.rank)
        group.barrier()
        return len(here)

    assert in_replicas(member, [()] * 3) == [3, 3, 3]


# -- groups of some ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "size", "expected"),
    [
        (4, 2, [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (5, 4, [(0, 4), (1, 4), (2, 4), (3, 4), (0, 1)]),
        (3, 1, [(0, 1)] * 3),
        (2, 4, [(0, 2), (1, 2)]),
        (1, 4, [(0, 1)]),
    ],
)
def test_split(replicas, size, expected):
    def member(group: Group) -> tuple[int, int, float]:
        part = group.split(size)
        total = part.all_reduce(torch.tensor(float(group.rank))).item()
        return part.rank, part.size, total

    got = in_replicas(member, [()] * replicas)
    assert [(rank, size) for rank, size, _ in got] == expected
    assert [t for *_, t in got] == [
        sum(range(i // size * size, min(i // size * size + size, replicas)))
        for i in range(replicas)
    ]


def test_part_that_is_the_whole_is_the_group_itself():
    assert all(in_replicas(lambda group: group.split(group.size) is group, [()] * 2))
    assert in_replicas(repr, [()] * 2)[1] == "ReplicaGroup(rank=1, size=2)"


def test_split_twice_is_the_same_part_and_parts_can_be_split():
    def member(group: Group) -> bool:
        quarter = group.split(4).split(2)
        assert quarter.all_gather_object(group.rank) == (
            group.rank // 2 * 2,
            group.rank // 2 * 2 + 1,
        )
        return group.split(4).all_gather_object(group.rank // 4) == (group.rank // 4,) * 4

    assert all(in_replicas(member, [()] * 8))


def test_parts_do_not_wait_for_each_other():
    def member(group: Group) -> None:
        part = group.split(2)
        if group.rank < 2:
            until_others_wait(2)
        for _ in range(3):
            part.barrier()
        group.barrier()

    in_replicas(member, [()] * 4)


# -- calls that do not match -------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_every_replica_gets_an_error_that_names_the_calls_and_the_part(size):
    errors = []

    def member(group: Group, x: Tensor) -> Any:
        part = group.split(size)
        if part.size == 3 or group.rank > 1:
            outcome = outcome_of(lambda: part.all_reduce(x, "sum" if part.rank else "max"))
            errors.append(outcome.error)
            raise outcome.error

    outcome_of(lambda: in_replicas(member, [(torch.zeros(2),)] * (3 if size == 3 else 4)))
    assert sorted(type(error).__name__ for error in errors) == [
        *["ReplicaFailed"] * (size - 1),
        "ReplicasDiverged",
    ]
    names = {
        2: r"`\(root\), replicas 2-3`, call 1.*replica 2: .*'max'.*replica 3: .*'sum'",
        3: r"`\(root\)`, call 1.*replica 0.*op='max'.*replicas 1, 2.*op='sum'",
    }
    for error in errors:
        assert re.search(names[size], str(error))


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda g: g.all_reduce(1.0), TypeError, r"tensors of .*\(got float\); torch.tensor"),
        (lambda g: g.all_reduce(torch.ones(1), "avg"), ValueError, "sum, mean, max.*'avg'"),
        (lambda g: g.all_reduce(torch.ones(1).int(), "mean"), TypeError, r"int32\); convert"),
        (lambda g: g.all_reduce(torch.ones(1) > 0), TypeError, "no sum of .*bool"),
        (lambda g: g.all_reduce(torch.ones(1) + 0j, "min"), TypeError, "no min of .*complex"),
        (lambda g: g.all_reduce(torch.eye(2).to_sparse()), TypeError, "dense.*sparse"),
        (lambda g: g.all_gather(torch.ones(1).short()), TypeError, r"int64 \(got .*int16"),
        (lambda g: g.all_gather(None), TypeError, "all_gather takes .* tensors.*NoneType"),
        (lambda g: g.reduce_scatter(torch.ones(2)), TypeError, r"list.*tensor.*\[2\].*chunk"),
        (lambda g: g.reduce_scatter(7), TypeError, "list.*int"),
        (lambda g: g.reduce_scatter([]), ValueError, "one for each.*got 0"),
        (lambda g: g.reduce_scatter([1] * g.size), TypeError, "takes .* tensors.*int"),
        (lambda g: g.reduce_scatter([torch.ones(1)] * g.size, "no"), ValueError, "'no'"),
        (lambda g: g.broadcast(3), TypeError, "broadcast takes .* tensors.*int"),
        (lambda g: g.broadcast(torch.ones(1), g.size), ValueError, "src from 0 to"),
        (lambda g: g.broadcast(torch.ones(1), -1), ValueError, "src from 0 to.*-1"),
        (lambda g: g.broadcast(torch.ones(1), 0.0), ValueError, "src from 0 to.*0.0"),
        (lambda g: g.broadcast(torch.ones(1), False), ValueError, "src from 0 to.*False"),
        (lambda g: g.split(0), ValueError, "at least 1.*0"),
        (lambda g: g.split(2.0), TypeError, r"int.*2\.0"),
        (lambda g: g.split(True), TypeError, "int.*True"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_same_error_before_waiting(call, error, text, size):
    raised = []

    def member(group: Group) -> None:
        outcome = outcome_of(lambda: call(group))
        raised.append(outcome.error)

    in_replicas(member, [()] * size)
    assert [type(e) for e in raised] == [error] * size
    for e in raised:
        assert re.search(text, str(e))
    if size > 1:
        assert {str(e).partition(":")[0] for e in raised} == {
            "`(root)`, replica 0",
            "`(root)`, replica 1",
        }


@pytest.mark.parametrize("names", [("float32", "float64"), ("float64", "float32")])
def test_lists_of_two_dtypes_are_refused(names):
    def scattered(group: Group) -> Tensor:
        return group.reduce_scatter([torch.ones(1, dtype=getattr(torch, name)) for name in names])

    with pytest.raises(ValueError, match=f"one dtype.*{names[0]}.*{names[1]}"):
        in_replicas(scattered, [()] * 2)


def forward_mode(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "forward mode": forward_mode,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it first loads a jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", EACH)
def test_derivatives_that_do_not_reach_the_others_are_refused(name, transform):
    def differentiated(group: Group, x: Tensor) -> Tensor | None:
        def call(x: Tensor) -> Tensor:
            return torch.cat(EACH[name](group, x))

        # In one replica only: torch has one level of forward-mode derivatives for all threads.
        return TRANSFORMS[transform](call, x) if group.rank == 0 else call(x)

    x = torch.ones(3)
    error = outcome_of(lambda: in_replicas(differentiated, [(x,)] * 2)).error
    assert type(error) is NotImplementedError
    assert f"replica 0: {name}: torch.func transforms and forward-mode" in str(error)
    (alone,) = in_replicas(differentiated, [(x,)])
    torch.testing.assert_close(alone, x)


def test_collective_after_the_forward_is_refused_at_once():
    groups = in_replicas(lambda group: group, [()] * 2)
    for outcome in together(*(group.barrier for group in groups)):
        assert isinstance(outcome.error, ReplicationError)
        assert "barrier of a group whose forward has ended" in str(outcome.error)
        assert "read self.group in each forward" in str(outcome.error)


def test_group_of_another_copy_is_refused_at_once():
    class Confused(Member):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            self.group = ctx.group(0)

    model = DataParallel(Confused(), several(2))
    with pytest.raises(ReplicationError, match="replica 1 calls barrier of the group of copy 0"):
        model(lambda group, x: group.barrier(), torch.ones(2))


@pytest.mark.parametrize("call", ["collective", "pipe", "layer"])
def test_a_replica_calls_in_its_own_thread(call):
    """The others are told at once, with the error that names the remedy as its cause."""

    class Calls(ReplicaAware, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.master = SynchronizedBatchNorm1d(2), SyncMaster(list)

        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            super().__data_parallel_replicate__(ctx, copy_id)
            if copy_id == 0:
                ctx.master, self.run = self.master, self.master.run_master
            else:
                self.run = ctx.master.register_slave(copy_id).run_slave

        def forward(self, x: Tensor) -> Tensor:
            calls = {"collective": lambda: self.group.all_reduce(x), "pipe": lambda: self.run(x)}
            work = calls.get(call, lambda: self.norm(x))
            return values(together(work))[0] if self.group.rank == 1 else work()

    with pytest.raises(ReplicationError, match="call it in the replica's own thread") as caught:
        DataParallel(Calls(), several(3))(torch.randn(6, 2))
    assert type(caught.value) is ReplicationError


def test_collectives_in_a_backward_inside_the_forward_are_refused():
    """On a GPU its hooks run in a thread of torch, which would wait for ever."""

    def member(group: Group, x: Tensor) -> Tensor:
        assert not group.recomputes
        leaf = x.detach().requires_grad_()
        leaf.register_hook(lambda grad: group.all_reduce(grad))
        return torch.autograd.grad(leaf.square().sum(), leaf)[0]

    text = "in a backward inside that forward; call it in the replica's own thread"
    with pytest.raises(ReplicationError, match=text):
        in_replicas(member, [(torch.ones(2),)] * 3)
