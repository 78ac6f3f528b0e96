"""The beginning and the end of each replica are seen in every way to run it. No trace is left."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    CallbackContext,
    ReplicaFailed,
    ReplicasDiverged,
    ReplicationError,
    execute_replication_callbacks,
    parallel_apply,
    replicate,
)
from replication.sync.lifecycle import first_failure_wins, rendezvous_of
from syncbn import SynchronizedBatchNorm1d
from tests.kit.deadlines import DEADLINE, Deadline, ends, soon
from tests.kit.layers import Centering, FailsAt, LayerError, Numbered, Recomputed, Repeat
from tests.kit.memory import copied_each_way, freed, no_garbage_collection
from tests.kit.threads import outcome_of
from tests.kit.wrappers import (
    AsTorchDoes,
    ByForward,
    ByPlainThreads,
    CustomDataParallel,
    Stock,
    SwallowingErrors,
    as_torch_does,
    customized,
    ours,
    patched,
)

WRAPS = {
    "ours": ours,
    "ours overridden": customized,
    "our parallel_apply": patched(CustomDataParallel),
    "as torch does": as_torch_does,
    "plain threads": patched(ByPlainThreads),
    "forward": patched(ByForward),
}
each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


# -- every way to run them ---------------------------------------------------------------------


@each_wrap
def test_replicas_communicate_in_every_runner(wrap):
    x = torch.randn(7, 2)
    torch.testing.assert_close(wrap(Centering(), 3)(x), x - x.mean(0))


@each_wrap
@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 2, 2), (1, 1, 2), (0, 1, 1)], ids=str)
def test_end_is_seen_in_every_runner(wrap, counts):
    model = wrap(Repeat(Centering(), counts), 3)
    with pytest.raises(ReplicasDiverged, match="`layer`, call"):
        model(torch.randn(6, 2))


@each_wrap
def test_error_is_noted_with_replica_device_and_module(wrap):
    """Clause 5b: notes name the replica, its device and the submodule."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), FailsAt(1, LayerError)))
    with pytest.raises(LayerError) as caught:
        wrap(net, 3)(torch.randn(6, 2))
    assert caught.value.__notes__ == ["in replica 1 of 3 on cpu, module `1.1`"]


def test_error_of_a_replica_without_tensors_names_no_device():
    error = outcome_of(partial(watched(FailsAt(1, LayerError))[1], torch.ones(1))).error
    assert error.__notes__ == ["in replica 1 of 2, module `(root)`"]


def test_errors_of_the_package_name_the_replicas_themselves():
    error = outcome_of(partial(watched(FailsAt(1, ReplicationError))[1], torch.ones(1))).error
    assert type(error) is ReplicationError and not hasattr(error, "__notes__")


@pytest.mark.parametrize("wrap", [ours, patched(Stock)], ids=["ours", "torch's own, patched"])
def test_hook_of_the_root_that_fails_is_seen(wrap):
    def fail_in_copy_1(module: Repeat, args: Any) -> None:
        if module.copy_id == 1:
            raise LayerError

    root = Repeat(Centering(), (1, 1, 1))
    root.register_forward_pre_hook(fail_in_copy_1)
    at_once = Deadline(5.0)
    with pytest.raises(LayerError):
        wrap(root, 3)(torch.randn(6, 2))
    assert not at_once.has_passed()


@each_wrap
def test_hooks_of_the_root_run_once_per_replica(wrap):
    net = nn.Sequential(Centering())
    calls: list[int] = []
    net.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    wrap(net, 3)(torch.randn(6, 2))
    # Who calls `forward` goes past the hooks.
    assert calls == ([] if wrap is WRAPS["forward"] else [2] * 3)


def test_omitted_replica_does_not_block_the_others():
    replicas = watched(Centering(), 3)
    with pytest.raises(ReplicasDiverged, match="replica 2: does not run"):
        parallel_apply(replicas[:2], [torch.ones(1, 1)] * 2)


def test_an_error_of_the_runner_itself_wakes_the_replicas_and_is_raised():
    """Clause 5d: errors that follow never mask it."""
    threads, outcomes = [], []

    class Fails(CustomDataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            def run() -> None:
                outcomes.append(outcome_of(partial(replicas[0], *inputs[0])))

            threads.append(threading.Thread(target=run))
            threads[0].start()
            assert soon(lambda: rendezvous_of(replicas).waits)
            raise LayerError

    with pytest.raises(LayerError):
        patched(Fails)(Centering(), 2)(torch.randn(4, 2))
    assert ends(threads[0])
    text = "the caller has ended the forward. Replica 0 was at `(root)`, call 1"
    assert (type(outcomes[0].error), str(outcomes[0].error)) == (ReplicaFailed, text + ".")


# -- a caller that swallows errors -------------------------------------------------------------


def test_peers_of_a_replica_whose_error_is_swallowed_are_woken():
    model = patched(SwallowingErrors)(nn.Sequential(FailsAt(2, LayerError), Centering()), 3)
    seen = live_replicas(model)
    with no_garbage_collection():
        model(torch.randn(6, 2))
        errors = [outcome.error for outcome in model.outcomes]
        assert [type(error) for error in errors] == [ReplicaFailed, ReplicaFailed, LayerError]
        assert errors[0].__cause__ is errors[2]
        errors.clear()
        model.outcomes.clear()
        assert freed(*seen)


# -- replicas that do not run at the same time -------------------------------------------------


def test_one_replica_may_run_in_the_calling_thread():
    class FirstAtHome(CustomDataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            with ThreadPoolExecutor() as pool:
                second = pool.submit(replicas[1], *inputs[1], **kwargs[1])
                return [replicas[0](*inputs[0], **kwargs[0]), second.result(DEADLINE)]

    x = torch.randn(6, 2)
    torch.testing.assert_close(patched(FirstAtHome)(Centering(), 2)(x), x - x.mean(0))


def test_layer_that_is_recomputed_after_the_forward_says_so():
    x = torch.randn(4, 2, requires_grad=True)
    y = ours(Recomputed(nn.Sequential(Centering(), nn.Tanh())), 2)(x)
    with pytest.raises(ReplicationError, match="nor in a recomputation"):
        y.backward(torch.randn_like(y))


# -- nothing is left behind --------------------------------------------------------------------


def live_replicas(model: nn.Module) -> list[Any]:
    """Weak references to the replicas that the model makes from now on."""
    seen: list[Any] = []
    make = model.replicate

    def replicate_and_note(*args: Any) -> Any:
        replicas = make(*args)
        seen.extend(weakref.ref(replica) for replica in replicas)
        return replicas

    model.replicate = replicate_and_note
    return seen


@each_wrap
def test_replicas_end_with_the_forward(wrap):
    model = wrap(nn.Sequential(nn.Linear(2, 2), Centering()), 2)
    seen = live_replicas(model)
    with no_garbage_collection():
        output = model(torch.randn(4, 2))
        assert freed(*seen)
        output.sum().backward()


@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
@each_wrap
def test_original_is_not_touched(wrap):
    """Clause 7b: nothing is left on the original module."""
    net = nn.Sequential(nn.Linear(2, 2), Centering(), nn.BatchNorm1d(2))
    before = [dict(vars(module)) for module in net.modules()]
    held = [dict(d) for m in net.modules() for d in (m._parameters, m._buffers, m._modules)]
    wrap(net, 2)(torch.randn(4, 2))
    assert [vars(module) for module in net.modules()] == before
    now = [d for m in net.modules() for d in (m._parameters, m._buffers, m._modules)]
    for old, new in zip(held, now, strict=True):
        assert old.keys() == new.keys()
        assert all(old[key] is new[key] for key in old)


# -- the replicas as objects -------------------------------------------------------------------


def watched(module: nn.Module, n: int = 2, **kwargs: Any) -> list[nn.Module]:
    replicas = replicate(module, ["cpu"] * n, **kwargs)
    execute_replication_callbacks(replicas)
    return replicas


class Signed(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x * scale


@copied_each_way
def test_copy_of_a_replica_belongs_to_no_forward(copied):
    net = nn.Sequential(Signed(), Numbered())
    net.forward = torch.neg
    replicas = watched(net, detach=True)
    twin = copied(replicas[0])
    assert rendezvous_of([twin]) is None
    assert rendezvous_of(replicas) is not None
    x = torch.randn(2)
    assert torch.equal(twin[0](x, scale=2), 2 * x)
    assert torch.equal(twin(x), -x)
    assert vars(twin).keys() - vars(net).keys() == {"_is_replica", "_former_parameters"}


def test_replica_may_call_itself_and_catch_the_error():
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Centering()

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            if not depth:
                raise LayerError
            with suppress(LayerError):
                return self(self.layer(x), depth - 1)
            return self.layer(x)

    x = torch.randn(4, 2)
    torch.testing.assert_close(ours(Recursive(), 2)(x), x - x.mean(0))


# -- small parts -------------------------------------------------------------------------------


def test_the_first_failure_wins_and_an_interrupt_of_the_caller_before_it():
    first, second, interrupt = KeyError("first"), SystemExit("second"), KeyboardInterrupt()

    def fail(replicas: Any, raised: BaseException) -> None:
        follow_up = ReplicationError("follow-up")
        for replica, error in ((3, first), (1, second), (2, follow_up), (0, second)):
            rendezvous_of(replicas).fail(replica, error)
        raise raised

    for raised, expected in ((KeyError("another"), first), (interrupt, interrupt)):
        call = partial(first_failure_wins, fail, watched(Signed()), raised)
        assert outcome_of(call).error is expected
    for replicas in ([nn.ReLU()], watched(Signed(), 1)):
        assert first_failure_wins(lambda replicas: replicas, replicas) is replicas


# -- replicas that are kept --------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps its replicas, as none should be."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.kept: dict[int, nn.Module] = {}  # the replicas share it

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.kept[copy_id] = self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("wrap", [ours, patched(AsTorchDoes)])
@pytest.mark.parametrize(
    "layer", [partial(SynchronizedBatchNorm1d, 3), Centering], ids=["ours", "older"]
)
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("part", ["replica", "layer"])
def test_a_replica_that_is_kept_after_its_forward_is_given_up(wrap, layer, index, part):
    """inplace_abn#88: marked parallel, and its peers do not run."""
    net = Keeps(layer())
    wrap(net, 2)(torch.randn(7, 3))
    replica = net.kept[index]
    net.kept.clear()
    if part == "replica":  # which may not run alone
        with pytest.raises(ReplicasDiverged, match=f"replica {1 - index}: has ended"):
            replica(torch.randn(4, 3))
    else:
        text = "runs none of them|forward has ended"
        with pytest.raises(ReplicationError, match=text):
            replica.layer(torch.randn(4, 3))


def test_replicas_may_run_several_times():
    replicas = watched(Centering())
    for _ in range(2):
        x = torch.randn(2, 3, 2)
        y = torch.stack(parallel_apply(replicas, list(x)))
        torch.testing.assert_close(y, x - x.mean((0, 1)))
