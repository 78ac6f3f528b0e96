"""Bad input is refused where it is given, not later, nor in words of another matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor, nn

import replication
from replication import (
    DataParallel,
    Scattered,
    SoloGroup,
    gather,
    parallel_apply,
    replicate,
    scatter_kwargs,
)
from tests.kit.collectives import in_replicas
from tests.kit.junk import COLLECTIVES, CPUS, X, anything, fingerprint, quietly, refused
from tests.kit.properties import examples
from tests.kit.threads import outcome_of

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
            r"`b` .*dimension 0 .*\(2, 3\) and \(2, 4\)\)",
        ),
    ],
)
def test_bad_input_is_refused_where_it_is_given(call, error, text):
    with pytest.raises(error, match=text):
        call()


# -- any value for any argument ----------------------------------------------------------------


def all_names(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


#: What a value must be at least, if an argument of this name accepts it.
ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "module": lambda value: isinstance(value, nn.Module),
    "device_ids": lambda value: not isinstance(value, (int, float, str)),
    "dim": lambda value: isinstance(value, int),
    "except_keywords": lambda value: not isinstance(value, str) and all_names(value),
}


def may_be_accepted(argument: str, value: Any) -> bool:
    return argument not in ACCEPTED or ACCEPTED[argument](value)


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
