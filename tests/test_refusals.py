"""Bad input is refused where it is given, not later, nor in words of another matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor, nn

import replication
from replication import (
    CallbackContext,
    DataParallel,
    ProcessGroup,
    ReplicaAware,
    ReplicationError,
    Scattered,
    SoloGroup,
    SyncMaster,
    gather,
    parallel_apply,
    replicate,
    scatter_kwargs,
)
from syncbn import SynchronizedBatchNorm1d, convert_model, revert_model, set_sbn_eps_mode
from tests.collective_cases import in_replicas
from tests.junk import COLLECTIVES, CPUS, X, anything, fingerprint, quietly, refused, scalars
from tests.layers import outcome_of
from tests.properties import examples

DIFFERENT = [{"a": X, "b": torch.ones(2, 3)}, {"a": X, "b": torch.ones(2, 4)}]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: replicate([nn.ReLU()], CPUS), TypeError, r"torch\.nn\.Module"),
        (lambda: gather({"a": X, "b": X}, "cpu"), TypeError, "must be a list"),
        (lambda: parallel_apply([nn.ReLU()], {"x": X}), TypeError, "must be a list"),
        (lambda: parallel_apply([nn.ReLU()], [(X,)], {"x": X}), TypeError, "must be a list"),
        # torch splits it; here each row would become an argument, whole, for every replica.
        (lambda: scatter_kwargs(X, None, CPUS), TypeError, r"must be a tuple .*\(got Tensor"),
        (lambda: DataParallel(nn.ReLU(), CPUS, dim="0"), TypeError, "dim"),
        (lambda: DataParallel(nn.ReLU(), CPUS, dim=True), TypeError, "dim"),
        (lambda: DataParallel(nn.ReLU(), CPUS, dim=None), TypeError, "dim"),
        (lambda: DataParallel(lambda x: x, CPUS), TypeError, r"nn\.Module \(got function\)"),
        (lambda: DataParallel(nn.ReLU(), CPUS, "cuda:99"), ValueError, "has no device 'cuda:99'"),
        (lambda: gather([X, X], "cpu", dim=2), ValueError, "dimension 2"),
        (
            lambda: gather(DIFFERENT, "cpu"),
            ValueError,
            r"`b`, .*dimension 0 .*\(2, 3\), \(2, 4\)\)",
        ),
    ],
)
def test_bad_input_is_refused_where_it_is_given(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_what_is_as_good_as_a_list_is_one():
    outputs = parallel_apply([nn.Identity()] * 2, deque([(X,), (X + 1,)]))
    torch.testing.assert_close(gather(deque(outputs), "cpu"), torch.cat([X, X + 1]))
    rows = parallel_apply([nn.Identity()] * 2, torch.stack([X, X + 1]))
    torch.testing.assert_close(torch.stack(rows), torch.stack([X, X + 1]))
    names = (name for name in ("a",))
    assert isinstance(gather([{"a": X}] * 2, "cpu", except_keywords=names)["a"], Scattered)


# -- any value for any argument ----------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(3, 2)


class Function(NamedTuple):
    """A public function, and arguments that it accepts."""

    call: Callable[..., Any]
    good: Callable[[], dict[str, Any]]


FUNCTIONS = {
    "scatter": Function(
        replication.scatter, lambda: {"inputs": {"x": X}, "target_gpus": CPUS, "dim": 0}
    ),
    "scatter_kwargs": Function(
        replication.scatter_kwargs,
        lambda: {
            "inputs": (X,), "kwargs": {"y": X}, "target_gpus": CPUS, "dim": 0,
            "inputs_are_scattered": False, "cpu_keywords": ["y"],
        },
    ),
    "gather": Function(
        replication.gather,
        lambda: {
            "outputs": [X, X], "target_device": "cpu", "dim": 0, "gather_to_one_device": True,
        },
    ),
    "replicate": Function(
        lambda devices, detach: replication.replicate(linear(), devices, detach),
        lambda: {"devices": CPUS, "detach": False},
    ),
    "parallel_apply": Function(
        replication.parallel_apply,
        lambda: {
            "modules": [linear(), linear()], "inputs": [(X,), (X,)], "kwargs_tup": [{}, {}],
            "devices": CPUS,
        },
    ),
    "execute_replication_callbacks": Function(
        replication.execute_replication_callbacks,
        lambda: {"modules": replication.replicate(linear(), CPUS), "devices": CPUS},
    ),
    "patch_replication_callback": Function(
        replication.patch_replication_callback,
        lambda: {"data_parallel": nn.DataParallel(linear())},
    ),
    "SyncMaster": Function(
        lambda master_callback: SyncMaster(master_callback).run_master(1),
        lambda: {"master_callback": list},
    ),
    "CallbackContext.group": Function(CallbackContext(2).group, lambda: {"copy_id": 0}),
    "Scattered": Function(lambda items: Scattered(items), lambda: {"items": [1]}),
    "ProcessGroup": Function(ProcessGroup, lambda: {"process_group": None, "name": "layer"}),
    "JoinableStep": Function(replication.JoinableStep, lambda: {"step": print, "empty": ()}),
    "DataParallelCriterion": Function(
        lambda criterion: replication.DataParallelCriterion(criterion, CPUS)(X, X),
        lambda: {"criterion": nn.MSELoss()},
    ),
    "convert_model": Function(
        convert_model, lambda: {"module": nn.Sequential(nn.BatchNorm1d(3)), "group_size": 2}
    ),
    "revert_model": Function(revert_model, lambda: {"module": SynchronizedBatchNorm1d(3)}),
    "set_sbn_eps_mode": Function(set_sbn_eps_mode, lambda: {"mode": "plus"}),
}  # fmt: skip


def all_names(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


#: What a value must be at least, if an argument of this name accepts it.
ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "module": lambda value: isinstance(value, nn.Module),
    "data_parallel": lambda value: isinstance(value, nn.DataParallel),
    "callback": callable,
    "step": callable,
    "empty": lambda value: isinstance(value, (tuple, list)),
    "criterion": lambda value: isinstance(value, nn.Module),
    "master_callback": callable,
    "copy_id": lambda value: False,  # the context is in no forward
    "process_group": lambda value: False,  # there are no processes
    "name": lambda value: False,
    "group_size": lambda value: value is None or (type(value) is int and value > 0),
    "mode": lambda value: False,  # but for two words
    "devices": lambda value: not isinstance(value, (int, float, str)),
    "device_ids": lambda value: not isinstance(value, (int, float, str)),
    "target_gpus": lambda value: not isinstance(value, (int, float, str)),
    "dim": lambda value: isinstance(value, int),
    "except_keywords": lambda value: not isinstance(value, str) and all_names(value),
}


def may_be_accepted(argument: str, value: Any) -> bool:
    return argument not in ACCEPTED or ACCEPTED[argument](value)


#: What they do they do to their arguments.
CHANGING = ("execute_replication", "patch_", "register_", "convert_", "revert_")


@pytest.mark.parametrize(
    ("name", "argument"), [(name, key) for name, fn in FUNCTIONS.items() for key in fn.good()]
)
@examples(0.2)
@given(value=anything)
def test_a_function_takes_an_argument_or_refuses_it_and_changes_nothing(name, argument, value):
    function = FUNCTIONS[name]
    arguments = {**function.good(), argument: value}
    before = fingerprint(arguments)
    outcome = quietly(lambda: function.call(**arguments))
    if refused(outcome.error) or not name.startswith(CHANGING):
        assert fingerprint(arguments) == before
    assert outcome.error or may_be_accepted(argument, value)


# The others want a forward, or other processes.
@pytest.mark.parametrize(
    "name", sorted(FUNCTIONS.keys() - {"CallbackContext.group", "ProcessGroup"})
)
def test_the_arguments_that_are_said_to_be_good_are_accepted(name):
    assert quietly(lambda: FUNCTIONS[name].call(**FUNCTIONS[name].good())).error is None


@pytest.mark.parametrize(
    "option",
    [
        "module", "device_ids", "output_device", "dim", "gather_to_one_device", "except_keywords",
        "inputs_are_scattered", "sort_and_gather", "cpu_keywords",
    ],
)  # fmt: skip
@examples(0.2)
@given(value=anything)
def test_an_option_of_data_parallel_is_refused_or_leaves_the_numbers_alone(option, value):
    assume(not isinstance(value, nn.Module) or option == "module")  # becomes a submodule
    module = nn.Linear(3, 2)
    options = {"module": module, "device_ids": CPUS, option: value}
    before = fingerprint(options)
    outcome = quietly(lambda: DataParallel(**options)(X))
    assert fingerprint(options) == before
    if not refused(outcome.error):
        assert may_be_accepted(option, value)
        y = outcome.value
        y = torch.cat(y) if isinstance(y, Scattered) else y
        torch.testing.assert_close(y, options["module"](X))
    torch.testing.assert_close(DataParallel(module, CPUS)(X), module(X))


@examples(0.3)
@given(value=anything)
def test_any_value_passes_through_a_network_or_is_refused(value):
    """What has no batch goes whole to each replica, and comes back as a list."""

    class Passes(nn.Module):
        def forward(self, value: Any) -> Any:
            return value

    before = fingerprint(value)
    outcome = quietly(lambda: replication.data_parallel(Passes(), (value,), CPUS))
    assert fingerprint(value) == before
    if not refused(outcome.error) and isinstance(value, Tensor) and value.dim() > 0:
        assert fingerprint(outcome.value)[:3] == fingerprint(value)[:3]
        assert fingerprint(outcome.value)[-1] == fingerprint(value)[-1]


#: What is accepted depends on the size of the group.
SIZED = ("reduce_scatter", "src")


@pytest.mark.parametrize("name", COLLECTIVES)
@examples(0.3)
@given(value=anything)
def test_collective_refuses_the_same_values_alone_and_in_replicas_before_waiting(name, value):
    call = COLLECTIVES[name]
    before = fingerprint(value)
    alone = outcome_of(lambda: call(SoloGroup(), value))
    several = outcome_of(lambda: in_replicas(call, [(value,)] * 2))
    assert fingerprint(value) == before
    if refused(several.error):
        assert several.error.__notes__[0].startswith("in replica ")
    if name not in SIZED:
        assert type(several.error) is type(alone.error)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "split"])
@pytest.mark.parametrize("replica", [0, 1])
@examples(0.2)
@given(value=anything)
def test_a_replica_whose_call_is_refused_is_named_to_the_caller(name, replica, value):
    call = COLLECTIVES[name]
    good: Any = {"op": "sum", "src": 0, "reduce_scatter": [X, X]}.get(name, X)
    assume(outcome_of(lambda: in_replicas(call, [(value,)] * 2)).error is not None)
    values = [(good,), (value,)] if replica else [(value,), (good,)]
    error = outcome_of(lambda: in_replicas(call, values)).error
    assert refused(error)
    assert not isinstance(error, ReplicationError)
    assert error.__notes__ == [f"in replica {replica} of 2 on cpu, module `(root)`"]


@examples(0.3)
@given(value=scalars)
def test_a_group_size_that_is_no_size_is_refused_in_the_layer_that_has_it(value):
    class Sum(ReplicaAware, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.group.all_reduce(x)

    layer = Sum()
    model = DataParallel(nn.Sequential(layer), CPUS)
    layer.group_size = value
    error = outcome_of(lambda: model(X)).error
    if refused(error):
        assert error.__notes__[0].endswith("of 2 on cpu, module `0`")
    layer.group_size = None
    torch.testing.assert_close(model(X), (X[:3] + X[3:]).repeat(2, 1))
