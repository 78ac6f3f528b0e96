"""The first error wins, wakes all who wait, and the next step is correct."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    DataParallel,
    ReplicaAware,
    ReplicaFailed,
    execute_replication_callbacks,
    parallel_apply,
    replicate,
)
from syncbn import SynchronizedBatchNorm1d
from tests.faults import ours
from tests.layers import (
    DEADLINE,
    Centering,
    FailsAt,
    LayerError,
    Numbered,
    freed,
    until_others_wait,
)
from tests.sharded import BATCH, norm, run_sharded

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


# -- errors that end programs ------------------------------------------------------------------


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


# -- calls in backward ---------------------------------------------------------------------------


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


# -- what a replica leaves behind that something has ended -------------------------------------


# -- errors that hide others -------------------------------------------------------------------


class Failing(nn.Module):
    """Raises ``errors[index]`` in the replica of that index."""

    def __init__(self, errors: dict[int, object]) -> None:
        super().__init__()
        self.errors = errors

    def forward(self, x):
        error = self.errors.get(int(threading.current_thread().name[-1]))
        if error is not None:
            raise error
        return x


def test_a_follow_up_of_another_kind_does_not_mask_the_first_error():
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = norm()

        def forward(self, x):
            try:
                return self.bn(x)
            except ReplicaFailed:
                raise SystemExit(1) from None

    with pytest.raises(KeyError, match="first"):
        run_sharded(nn.Sequential(Failing({0: KeyError("first")}), Exits()), BATCH.split([4, 4]))


def test_replicas_that_have_failed_say_so_when_they_are_used_again():
    replicas = replicate(nn.Sequential(Failing({1: KeyError("k")}), norm()), ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    inputs = [(part,) for part in BATCH.chunk(2)]
    with pytest.raises(KeyError):
        parallel_apply(replicas, inputs)
    for replica in replicas:
        replica[0].errors = {}
    with pytest.raises(ReplicaFailed, match=r"failed with KeyError.* was at `1`, call \d"):
        parallel_apply(replicas, inputs)
