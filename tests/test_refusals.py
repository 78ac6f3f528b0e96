"""Bad input is refused where it is given, not later, nor in words of another matter."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from replication import (
    DataParallel,
    Scattered,
    execute_replication_callbacks,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)
from replication.devices import accelerator
from syncbn import SynchronizedBatchNorm1d
from tests.junk import CPUS, X, refused
from tests.layers import outcome_of
from tests.sharded import run_sharded


@pytest.mark.parametrize(
    "module", [None, 3, "net", [nn.ReLU()], X], ids=lambda v: type(v).__name__
)
def test_only_modules_can_be_replicated(module):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        replicate(module, CPUS)


@pytest.mark.skipif(accelerator() == "cuda", reason="of a machine without CUDA")
@pytest.mark.parametrize(
    "call",
    [
        lambda: replicate(nn.Linear(3, 2), ["cuda:0"]),
        lambda: scatter(X, ["cuda:0"]),
        lambda: scatter_kwargs((X,), None, ["cuda:0"]),
        lambda: gather([X, X], "cuda:0"),
    ],
    ids=["replicate", "scatter", "scatter_kwargs", "gather"],
)
def test_each_step_refuses_a_device_that_is_not_there(call):
    with pytest.raises(ValueError, match="this machine has no device 'cuda:0'"):
        call()


def test_a_single_name_is_not_taken_for_a_list_of_its_letters():
    """`x` is in "box", and so is left on the CPU unasked."""
    with pytest.raises(TypeError, match="must be a list of names"):
        scatter_kwargs((), {"x": X}, CPUS, cpu_keywords="box")


@pytest.mark.parametrize(
    "call",
    [
        lambda: gather({"a": X, "b": X}, "cpu"),
        lambda: parallel_apply([nn.ReLU()], {"x": X}),
        lambda: parallel_apply([nn.ReLU()], [(X,)], {"x": X}),
    ],
    ids=["gather", "inputs", "kwargs_tup"],
)
def test_a_dict_where_a_list_should_be_is_refused(call):
    error = outcome_of(call).error
    assert refused(error)


def test_a_tensor_as_positional_arguments_is_not_taken_for_its_rows():
    """torch splits it; here each row becomes an argument, whole, for every replica."""
    with pytest.raises(TypeError, match=r"inputs must be a tuple .*\(got Tensor\)"):
        scatter_kwargs(X, None, CPUS)


@pytest.mark.parametrize("dim", ["0", None, 0.5, [0], True, nn.ReLU()], ids=repr)
def test_a_dimension_that_is_no_int_is_refused_when_the_model_is_made(dim):
    with pytest.raises(TypeError, match="dim"):
        DataParallel(nn.Linear(3, 2), CPUS, dim=dim)


@pytest.mark.skipif(accelerator() is not None, reason="of a machine without accelerators")
@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
def test_a_range_of_indices_is_a_list_of_indices():
    """torch.nn.DataParallel(net, range(2)) calls the module directly there."""
    model = DataParallel(nn.Linear(3, 2), range(2))
    torch.testing.assert_close(model(X), model.module(X))


@pytest.mark.parametrize("momentum", [1j, "a", torch.ones(()).requires_grad_()], ids=str)
def test_a_momentum_that_is_no_number_is_refused_by_every_replica(momentum):
    layer = SynchronizedBatchNorm1d(3, momentum=momentum)
    assert isinstance(outcome_of(lambda: nn.BatchNorm1d(3, momentum=momentum)(X)).error, TypeError)
    error = outcome_of(lambda: run_sharded(layer, X.split([3, 3]))).error
    assert isinstance(error, TypeError)
    assert any("also failed: the same error" in note for note in error.__notes__)


def test_a_shard_on_another_device_is_refused_by_its_replica():
    replicas = replicate(nn.Sequential(SynchronizedBatchNorm1d(3)), ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    error = outcome_of(lambda: parallel_apply(replicas, [X, X.to("meta")])).error
    assert isinstance(error, RuntimeError)
    assert "expected an input on cpu, where its weight is (got meta)" in str(error)
    assert error.__notes__ == ["in replica 1 of 2 on cpu, module `0`"]


@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}], ids=str)
def test_float8_is_not_implemented_as_in_torchs_layer(options):
    x = X.to(torch.float8_e4m3fn)
    error = outcome_of(lambda: run_sharded(SynchronizedBatchNorm1d(3, **options), [x, x])).error
    assert isinstance(error, NotImplementedError)


def test_what_is_as_good_as_a_list_is_one():
    outputs = parallel_apply([nn.Identity()] * 2, deque([(X,), (X + 1,)]))
    torch.testing.assert_close(gather(deque(outputs), "cpu"), torch.cat([X, X + 1]))
    rows = parallel_apply([nn.Identity()] * 2, torch.stack([X, X + 1]))
    torch.testing.assert_close(torch.stack(rows), torch.stack([X, X + 1]))
    names = (name for name in ("a",))
    assert isinstance(gather([{"a": X}] * 2, "cpu", except_keywords=names)["a"], Scattered)


@pytest.mark.parametrize("name", ["gpu", "gpu0", "cpu:", ""])
def test_a_device_that_torch_does_not_know_is_refused(name):
    with pytest.raises(ValueError, match=r"is not a device of torch; use .cpu. for the CPU"):
        DataParallel(nn.Linear(3, 2), [name])


def test_outputs_that_cannot_be_joined_are_named():
    outputs = [{"a": X, "b": torch.ones(2, 3)}, {"a": X, "b": torch.ones(2, 4)}]
    with pytest.raises(ValueError, match=r"`b`, .*dimension 0 \(got shapes \(2, 3\), \(2, 4\)\)"):
        gather(outputs, "cpu")
    with pytest.raises(ValueError, match="dimension 2"):
        gather([X, X], "cpu", dim=2)
