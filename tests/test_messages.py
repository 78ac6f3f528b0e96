"""What a user reads after one of the likely mistakes: whole texts, to be judged by reading them.

Each says what has happened and where (layer, replica, device), what was expected and what came,
and what to do.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replication.sync.rendezvous
from replication import (
    DataParallel,
    ReplicaAware,
    Scattered,
    execute_replication_callbacks,
    replicate,
)
from syncbn import SynchronizedBatchNorm1d, convert_model, verify
from tests.kit.layers import Centering, FailsAt, Recomputed
from tests.kit.properties import pairwise
from tests.kit.threads import outcome_of
from tests.kit.wrappers import AsTorchDoes, customized, ours

CPUS = ["cpu", "cpu"]
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def reads(expected: str) -> Callable[[Callable[[], Any]], Callable[[], None]]:
    """Makes a test of a mistake: what it tells, white space aside, is ``expected``."""

    def decorate(mistake: Callable[[], Any]) -> Callable[[], None]:
        @wraps(mistake)
        def test() -> None:
            told = told_of(mistake)
            # An older torch does not print whether a layer has a bias.
            told = re.sub(r"(affine=True)(?!, bias)", r"\1, bias=True", told)
            assert " ".join(told.split()) == " ".join(expected.split())

        return test

    return decorate


def told_of(mistake: Callable[[], Any]) -> str:
    """Warnings, and the error with all its notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = outcome_of(mistake).error
    lines = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    if error is not None:
        lines += [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    # If both of two replicas fail, either may be the first.
    lines = [line.replace("in replica 1 of 2 on", "in replica 0 of 2 on") for line in lines]
    return "\n".join(lines)


def network() -> nn.Module:
    return convert_model(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))))


# -- layers that talk --------------------------------------------------------------------------


@reads("""
    ReplicasDiverged: replica 1 did not begin within 0.01 s. Replicas that communicate must run at
    the same time, each in its own thread.
      replica 0: waits at `1.0`, call 1
      replica 1: has not begun
""")
def test_replicas_are_called_one_after_the_other():
    """Clause 3d: a replica that never starts."""
    replicas = replicate(network(), CPUS)
    execute_replication_callbacks(replicas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.01)
        patch.setattr(replication.sync.rendezvous, "LOOK_AGAIN", 0.01)
        for replica, shard in zip(replicas, X.chunk(2), strict=True):
            replica(shard)


@reads("""
    ReplicationError: `0`, replica 0: barrier in a replication callback; callbacks run one after
    the other, so that no other copy can answer: call collectives in forward
    in __data_parallel_replicate__ of `0` (Eager), copy 0 of 2
""")
def test_a_callback_calls_a_collective():
    class Eager(ReplicaAware, nn.Module):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            super().__data_parallel_replicate__(ctx, copy_id)
            self.group.barrier()

    DataParallel(nn.Sequential(Eager()), CPUS)(X)


@reads("""
    UnsynchronizedWarning: `1.0`: SynchronizedBatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True,
    bias=True, track_running_stats=True) is not synchronized, because its replica is not
    connected to the others. Use replication.DataParallel, or derive the wrapper's class from
    torch.nn.DataParallel and call replication.patch_replication_callback(model). If the layer
    overrides
    __data_parallel_replicate__, call super's there
""")
def test_a_stock_data_parallel_is_wrapped_around_a_converted_network():
    """vacancy#40, inplace_abn#96. Without an accelerator torch's would not split."""
    AsTorchDoes(network(), 2)(X)


# -- batch normalization -----------------------------------------------------------------------


@reads("""
    ValueError: SynchronizedBatchNorm1d expected 3 channels in dimension 1 (got size
    torch.Size([4, 5]))
    in replica 0 of 2 on cpu, module `1`
""")
def test_a_layer_has_the_wrong_number_of_channels():
    """vacancy#31"""
    DataParallel(nn.Sequential(nn.Linear(3, 5), SynchronizedBatchNorm1d(3)), CPUS)(X)


@reads("""
    RuntimeError: `1.0` (SynchronizedBatchNorm1d) expected an input in torch.float32 on cpu, as its
    weight (got torch.float64 on cpu); convert one by .to()
    in replica 0 of 2 on cpu, module `1.0`
""")
def test_the_batch_is_of_another_dtype_than_the_layer():
    net = network()
    net[0].double()
    DataParallel(net, CPUS)(X.double())


@reads("""
    ValueError: Expected more than 1 value per channel when training, got input size
    torch.Size([1, 3]) and 1 value in all of its group; take a larger batch,
    or call the layer in eval()
    in replica 0 of 2 on cpu, module `1.0`
""")
def test_there_is_a_single_value_in_all():
    """apex#262"""
    DataParallel(network(), CPUS)(Scattered([X[:1], X[:0]]))


@reads("""
    ReplicationError: `0.net.1`, replica 0: an activation checkpoint recomputed this layer with an
    input that differs from the one in forward (4 values per channel). Check that: (1)
    checkpoint() has use_reentrant=False; (2) the checkpointed code does the same thing both
    times; (3) it contains no dropout if replicas share a device; (4) parameters did not change
    since the forward.
""")
def test_a_layer_is_in_a_reentrant_checkpoint():
    """inplace_abn#48, pt#43946"""

    net = nn.Sequential(nn.Linear(3, 3), SynchronizedBatchNorm1d(3))
    model = DataParallel(nn.Sequential(Recomputed(net, use_reentrant=True)), CPUS)
    y = model(X.clone().requires_grad_())
    of_replica_0 = y[:4]
    of_replica_0.backward(torch.randn(4, 3))


# -- devices and wrapping ----------------------------------------------------------------------


@reads("""
    ValueError: this machine has no accelerator of index 0; use "cpu" for the CPU, and
    device_ids=["cpu", "cpu"] for two replicas on it
""")
def test_an_index_names_a_device_that_is_not_there():
    replicate(network(), [0, 1])


@reads("""
    RuntimeError: module must have its parameters and buffers on device cpu (device_ids[0]) but
    found one of them on device: meta (`0.weight`); call module.to('cpu')
""")
def test_a_parameter_is_on_another_device():
    """torch's own words."""
    net = network()
    net[0].to("meta")
    DataParallel(net, CPUS)(X)


@pytest.mark.parametrize(
    "use",
    [lambda net: DataParallel(net, CPUS)(X), lambda net: verify(net, X)],
    ids=["forward", "verify"],
)
def test_a_module_is_not_initialized(use):
    with pytest.raises(RuntimeError) as error:
        use(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))
    assert str(error.value) == (
        "`1` (LazyLinear) has uninitialized parameters; initialize them first: run one batch "
        "through the module before it is replicated"
    )


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch is too old")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about what traces
@pytest.mark.parametrize(
    "how",
    [torch.export.export, partial(torch.export.export, strict=True), torch.jit.trace],
    ids=["export", "strict export", "trace"],
)
def test_replicas_are_exported(how):
    """Replicas in threads leave no trace."""
    net = nn.Sequential(nn.Linear(3, 2)).requires_grad_(False)
    text = "replicas cannot be exported or traced; export model.module"
    with pytest.raises(Exception, match=text):
        how(DataParallel(net, CPUS), (X,))
    how(DataParallel(net, CPUS).module, (X,))


# -- errors with their own methods --------------------------------------------------------------


def fails(*args: Any) -> Any:
    raise ValueError("from a method of the error")


def odd(**attributes: Any) -> type[Exception]:
    return type("Odd", (Exception,), attributes)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


#: By what is odd about it.
ODD: dict[str, Callable[[], BaseException]] = {
    "takes no attribute": odd(__setattr__=fails),
    "is frozen": Frozen,
    "str fails": odd(__str__=fails),
    "notes fail": odd(__notes__=property(fails)),
    "ends an iteration": StopIteration,
}


@pairwise(what=ODD, wrap=[ours, customized])
def test_an_odd_error_arrives_as_it_was_raised_and_wakes_the_others(what, wrap):
    raised = ODD[what]()
    net = nn.Sequential(FailsAt(1, lambda: raised), Centering())
    error = outcome_of(lambda: wrap(net, 2)(X)).error
    assert error is raised
    net[0].active = False
    torch.testing.assert_close(wrap(net, 2)(X), X - X.mean(0))


class FirstParameter(nn.Linear):
    """Fails in replicas, which have no parameters. The error has no text."""

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.parameters())


@pytest.mark.parametrize(
    ("net", "path"), [(FirstParameter(3, 3), "(root)"), (nn.Sequential(FirstParameter(3, 3)), "0")]
)
def test_notes_name_the_layer_of_an_error_without_a_text_and_do_not_repeat_it(net, path):
    error = outcome_of(lambda: DataParallel(net, ["cpu"] * 3)(torch.ones(6, 3))).error
    assert type(error) is StopIteration
    (where,) = error.__notes__
    assert re.fullmatch(rf"in replica \d of 3 on cpu, module `{re.escape(path)}`", where)
