"""Every wait ends, the first error wins, and the next step is correct."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from replication import (
    DataParallel,
    ReplicaAware,
    ReplicaFailed,
    ReplicasDiverged,
    ReplicationError,
    SyncMaster,
    patch_replication_callback,
)
from replication.sync.rendezvous import Abort
from syncbn import SynchronizedBatchNorm1d
from tests.layers import (
    DEADLINE,
    Centering,
    CustomDataParallel,
    FailsAt,
    Numbered,
    Repeat,
    freed,
    no_garbage_collection,
    outcome_of,
    soon,
    together,
    until_others_wait,
    values,
)


class LayerError(Exception):
    """An error that only the tests raise."""


def ours(module: nn.Module, n: int) -> nn.Module:
    return DataParallel(module, ["cpu"] * n)


# -- one replica fails -------------------------------------------------------------------------


def test_uncollected_results_are_freed():
    """The message of a replica that waited, whose graph refers to the replica by a hook."""

    class Hooked(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = SynchronizedBatchNorm1d(2), 2.0

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            x.register_hook(lambda grad: grad * self.factor)
            seen.append(weakref.ref(x))
            if self.copy_id == 1:
                until_others_wait(2)
                raise LayerError
            return self.layer(x)

    seen: list[Any] = []
    with contextlib.suppress(LayerError):
        ours(Hooked(), 3)(torch.randn(6, 2, requires_grad=True))
    gc.collect()
    assert len(seen) == 3
    assert freed(*seen)


def test_error_that_several_replicas_raise_is_one_of_theirs():
    class AllFail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LayerError(len(x))

    with pytest.raises(LayerError):
        ours(nn.Sequential(Centering(), AllFail()), 3)(torch.randn(6, 2))


def test_waiting_replica_sees_who_failed_and_with_what():
    seen = []

    class Watches(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Centering()

        def forward(self, x: Tensor) -> Tensor:
            if self.copy_id == 1:
                raise LayerError("own")
            try:
                return self.layer(x)
            except ReplicationError as error:
                seen.append(error)
                raise

    with pytest.raises(LayerError):
        ours(Watches(), 2)(torch.randn(4, 2))
    (error,) = seen
    assert type(error) is ReplicaFailed
    assert str(error).startswith("replica 1 of 2 failed with LayerError: own.")


def test_waiting_peer_is_woken_while_another_replica_still_runs():
    woken = threading.Event()

    class Layer(Numbered):
        """Copy 2 fails; copy 1 waits; copy 0 runs until copy 1 has been woken."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = Centering()

        def forward(self, x: Tensor) -> Tensor:
            if self.copy_id == 0:
                assert woken.wait(DEADLINE)
                return x
            if self.copy_id == 2:
                raise LayerError
            try:
                return self.layer(x)
            finally:
                woken.set()

    with pytest.raises(LayerError):
        ours(Layer(), 3)(torch.randn(6, 2))


def test_replica_that_handles_the_failure_of_another_does_not_hide_it():
    class Handles(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Centering()

        def forward(self, x: Tensor) -> Tensor:
            if self.copy_id == 1:
                raise LayerError
            try:
                return self.layer(x)
            except ReplicaFailed:
                return x

    with pytest.raises(LayerError):
        ours(Handles(), 2)(torch.randn(4, 2))


def test_replica_that_handles_its_own_error_has_not_failed():
    class Handles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = FailsAt(1, LayerError)
            self.layer = Centering()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(LayerError):
                x = self.fails(x)
            return self.layer(x)

    x = torch.randn(4, 2)
    torch.testing.assert_close(ours(Handles(), 2)(x), x - x.mean(0))


# -- the master's callback fails ---------------------------------------------------------------


# -- replicas diverge --------------------------------------------------------------------------


def test_module_path_is_that_within_the_network():
    net = nn.Sequential(nn.ReLU(), nn.Sequential(Repeat(Centering(), (1, 0))))
    with pytest.raises(ReplicasDiverged, match=r"`1\.0\.layer`, call 1"):
        ours(net, 2)(torch.randn(4, 2))


def test_layer_that_is_the_root_has_a_name():
    class Skips(Centering):
        def forward(self, x: Tensor) -> Tensor:
            return x if self._parallel_id == 1 else super().forward(x)

    with pytest.raises(ReplicasDiverged, match=r"`\(root\)`, call 1: replica 0 waits"):
        ours(Skips(), 2)(torch.randn(4, 2))


class Program(Numbered):
    """Replica i does what ``programs[i]`` says: calls of the layers a and b, and "!" to fail."""

    def __init__(self, programs: Sequence[str]) -> None:
        super().__init__()
        self.programs = programs
        self.a, self.b = Centering(), Centering()

    def forward(self, x: Tensor) -> Tensor:
        for step in self.programs[self.copy_id or 0]:
            if step == "!":
                raise LayerError(self.copy_id)
            x = getattr(self, step)(x)
        return x


programs = st.lists(st.text("ab", max_size=3), min_size=2, max_size=4)


@given(programs=programs)
def test_replicas_get_values_if_and_only_if_their_calls_match(programs):
    x = torch.randn(len(programs), 2)
    outcome = outcome_of(lambda: ours(Program(programs), len(programs))(x))
    if len(set(programs)) > 1:
        assert isinstance(outcome.error, ReplicasDiverged)
    else:
        torch.testing.assert_close(outcome.value, x - x.mean(0) if programs[0] else x)


@given(programs=programs, replica=st.integers(0, 3), after=st.integers(0, 3))
def test_failing_replica_wins_where_the_others_would_have_gone_on(programs, replica, after):
    # All do the same as far as the failing one goes, and more: only it can end anything.
    n, common = len(programs), programs[0][:after]
    programs = [common + "ab" + rest for rest in programs]
    programs[replica % n] = common + "!"
    outcome = outcome_of(lambda: ours(Program(programs), n)(torch.randn(n, 2)))
    assert isinstance(outcome.error, LayerError)
    assert outcome.error.args == (replica % n,)


# -- layers for the older toolkits -------------------------------------------------------------


# -- the deadline of the test run --------------------------------------------------------------


def test_an_error_that_ends_programs_does_not_wait_for_the_other_replicas():
    released = threading.Event()

    class Exits(nn.Module):
        def forward(self, x):
            if threading.current_thread().name == "replica-0":
                raise SystemExit(3)
            assert released.wait(DEADLINE)
            return x

    model = DataParallel(Exits(), ["cpu"] * 3)
    with pytest.raises(SystemExit) as caught:  # while the others are still busy
        model(torch.zeros(3))
    released.set()
    # A second note would say which replicas were still running after some seconds.
    assert caught.value.__notes__ == ["in replica 0 of 3 on cpu, module `(root)`"]


# -- calls in backward, and in other threads ---------------------------------------------------


class Asks(ReplicaAware, nn.Module):
    """Notes whether it is in a recomputation, asked in a thread that the replica starts."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        self.answers += values(together(lambda: group.recomputes))
        return x * 2


def test_a_thread_that_a_replica_starts_knows_whether_the_forward_is_a_recomputation():
    answers: list[bool] = []
    model = ours(Asks(answers), 2)
    x = torch.randn(4, 3, requires_grad=True)
    checkpoint(lambda x: model(x).square(), x, use_reentrant=False).sum().backward()
    assert answers == [False, False, True, True]


def test_a_backward_inside_the_forward_may_call_collectives():
    class Penalty(ReplicaAware, nn.Module):
        """Multiplies by the sum of the replicas' gradients of the square of its input."""

        def forward(self, x: Tensor) -> Tensor:
            group, leaf = self.group, x.detach().requires_grad_()
            leaf.register_hook(lambda grad: group.all_reduce(grad.sum(0)).expand_as(grad))
            answers.append(group.recomputes)
            (grad,) = torch.autograd.grad(leaf.square().sum(), leaf)
            return x * grad

    answers: list[bool] = []
    x = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(ours(Penalty(), 3)(x), x * 2 * x.sum(0))
    assert answers == [False] * 3


# -- what a replica leaves behind that something has ended --------------------------------------


def test_a_master_waits_for_a_slave_that_was_interrupted_meanwhile():
    collected: list[Any] = []

    def reply(messages: Any) -> Any:
        collected.append([message for _, message in messages])
        return messages

    def withdraw(pipe: Any) -> None:
        def run() -> None:
            outcomes.append(outcome_of(lambda: pipe.run_slave("withdrawn")))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert soon(lambda: len(rendezvous._waits) == 2)
        wait = rendezvous._waits[1]
        with rendezvous.lock:  # as if a signal had come
            wait.error = Abort(ReplicationError, "interrupted", None)
            rendezvous.end_waits([wait])
        thread.join(DEADLINE)

    master, outcomes = SyncMaster(reply), []
    pipes = [master.register_slave(i) for i in (1, 2)]
    rendezvous = master._outside_forward

    def slaves() -> list[Any]:
        assert soon(lambda: len(rendezvous._waits) == 1)  # the master's
        withdraw(pipes[0])
        first, second = together(lambda: pipes[1].run_slave("b"), lambda: pipes[0].run_slave("a"))
        return values([first, second])

    assert values(together(lambda: master.run_master("m"), slaves)) == ["m", ["b", "a"]]
    assert collected == [["m", "a", "b"]]
    assert str(outcomes[0].error) == "interrupted"


def test_errors_that_a_parallel_apply_swallows_keep_no_replica_alive():
    class Swallows(CustomDataParallel):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            def run(i: int) -> None:
                with contextlib.suppress(LayerError, ReplicaFailed):
                    replicas[i](*inputs[i], **kwargs[i])

            seen.extend(weakref.ref(replica) for replica in replicas)
            values(together(*(lambda i=i: run(i) for i in range(len(replicas)))))
            return inputs

        def gather(self, outputs: Any, output_device: Any) -> None:
            """There is nothing to gather."""

    seen: list[Any] = []
    model = Swallows(nn.Sequential(FailsAt(1, LayerError), Centering()), 3)
    patch_replication_callback(model)
    with no_garbage_collection():
        model(torch.randn(6, 2))
        assert len(seen) == 3
        assert freed(*seen)
