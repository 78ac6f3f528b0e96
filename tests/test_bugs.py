"""What has gone wrong once, each with the smallest model that shows it."""

from __future__ import annotations

import textwrap
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from replication import (
    DataParallel,
    ReplicaFailed,
    ReplicationError,
    SyncMaster,
    execute_replication_callbacks,
    parallel_apply,
    patch_replication_callback,
    replicate,
)
from syncbn import SynchronizedBatchNorm1d
from tests.deadlines import DEADLINE, ends
from tests.processes import run_python
from tests.sharded import run_sharded

X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def layer(**options) -> SynchronizedBatchNorm1d:
    return SynchronizedBatchNorm1d(3, dtype=torch.float64, **options)


def whole_batch(x=X):
    return nn.functional.batch_norm(x, None, None, training=True)


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


# -- the original reached past the replica -----------------------------------------------------


class Branches(nn.Module):
    """Refers to a method of its own in an attribute, bound when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = layer()
        self.branches = {"main": self.run}

    def run(self, x):
        return self.bn(x)

    def forward(self, x):
        return self.branches["main"](x)


def test_bound_methods_in_attributes_become_the_replicas():
    model = DataParallel(Branches(), ["cpu"] * 4)
    torch.testing.assert_close(model(X), whole_batch())
    assert model.module.bn.num_batches_tracked == 1


def test_a_forward_set_on_the_object_becomes_the_replicas():
    net = nn.Sequential(layer())
    net.forward = types.MethodType(lambda self, x: self[0](x), net)
    torch.testing.assert_close(DataParallel(net, ["cpu"] * 4)(X), whole_batch())


def test_a_closure_that_refers_to_the_original_is_warned_of():
    net = nn.Sequential(layer())
    plain = net[0].forward
    net[0].forward = lambda x: plain(x)
    with pytest.warns(UserWarning, match="is called by a replica but is not part of it"):
        DataParallel(net, ["cpu"] * 4)(X)


# -- modules that cannot be replicated ---------------------------------------------------------


@pytest.mark.parametrize("trains", [False, True])
def test_torch_func_is_refused_instead_of_losing_derivatives(trains):
    model = DataParallel(nn.Linear(3, 1).requires_grad_(trains), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"torch.func transforms do not reach"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(4, 3))


class OwnDerivative(nn.Sequential):
    def forward(self, x):
        return torch.func.grad(lambda x: super(OwnDerivative, self).forward(x).sum())(x)


def test_torch_func_inside_a_replica_is_refused_by_a_synchronized_layer():
    with pytest.raises(RuntimeError, match=r"do not reach the other copies"):
        DataParallel(OwnDerivative(layer()), ["cpu"] * 2)(X)


@pytest.mark.parametrize("attribute", ["list", "dict"])
def test_containers_that_contain_themselves_are_left_as_they_are(attribute):
    net = nn.Linear(3, 2)
    cycle: list[object] | dict[str, object] = []
    if attribute == "dict":
        cycle = {}
        cycle["self"] = cycle
    else:
        cycle.append(cycle)
    net.cycle = cycle
    assert replicate(net, ["cpu"] * 2)[1].cycle is cycle


def test_a_replica_can_be_replicated_in_its_own_forward():
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = layer()

        def forward(self, x, deeper=True):
            if not deeper:
                return self.bn(x)
            replicas = replicate(self, ["cpu"] * 2)
            execute_replication_callbacks(replicas)
            return torch.cat(parallel_apply(replicas, [(part, False) for part in x.chunk(2)]))

    expected = torch.cat([whole_batch(half) for half in X.chunk(2)])
    torch.testing.assert_close(DataParallel(Again(), ["cpu"] * 2)(X), expected)


def test_a_sparse_gradient_of_one_replica_and_a_dense_one_of_another_are_summed():
    net = nn.Embedding(5, 2)
    first, second = (replica.weight for replica in replicate(net, ["cpu"] * 2))
    rows = torch.tensor([1, 3])
    loss = nn.functional.embedding(rows, first, sparse=True).sum() + second.sum()
    loss.backward()
    expected = torch.ones(5, 2)
    expected[rows] += 1
    assert torch.equal(net.weight.grad.to_dense(), expected)


# -- errors ------------------------------------------------------------------------------------


def test_an_error_that_cannot_be_printed_still_wakes_the_others():
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fail(messages):
        raise Unprintable

    master = SyncMaster(fail)
    pipe = master.register_slave(1)
    caught = []

    def slave() -> None:
        try:
            pipe.run_slave(1)
        except ReplicaFailed as error:
            caught.append(error)

    thread = threading.Thread(target=slave, daemon=True)
    thread.start()
    with pytest.raises(Unprintable):
        master.run_master(0)
    assert ends(thread), "the slave hangs"
    assert "failed with Unprintable" in str(caught[0])


def test_a_follow_up_of_another_kind_does_not_mask_the_first_error():
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = layer()

        def forward(self, x):
            try:
                return self.bn(x)
            except ReplicaFailed:
                raise SystemExit(1) from None

    with pytest.raises(KeyError, match="first"):
        run_sharded(nn.Sequential(Failing({0: KeyError("first")}), Exits()), X.split([4, 4]))


def test_replicas_that_have_failed_say_so_when_they_are_used_again():
    replicas = replicate(nn.Sequential(Failing({1: KeyError("k")}), layer()), ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    inputs = [(part,) for part in X.chunk(2)]
    with pytest.raises(KeyError):
        parallel_apply(replicas, inputs)
    for replica in replicas:
        replica[0].errors = {}
    with pytest.raises(
        ReplicaFailed, match=r"failed with KeyError.* reached `1`, call \d after that"
    ):
        parallel_apply(replicas, inputs)


# -- pipes -------------------------------------------------------------------------------------


def test_a_replica_cannot_have_two_slaves_of_one_master():
    class Greedy(nn.Module):
        def __data_parallel_replicate__(self, ctx, copy_id):
            if copy_id == 0:
                ctx.master = SyncMaster(lambda messages: messages)
            else:
                ctx.master.register_slave(copy_id)
                ctx.master.register_slave(copy_id + 10)

    with pytest.raises(ReplicationError, match="replica 1 cannot register another slave"):
        execute_replication_callbacks([Greedy(), Greedy()])


@pytest.mark.parametrize("answer", [None, 5, [5], [(0, 1, 2)], "ab"], ids=str)
def test_an_answer_that_is_not_made_of_pairs_is_an_error_that_says_what_it_must_be(answer):
    with pytest.raises(ReplicationError, match=r"must return one \(identifier, reply\)"):
        SyncMaster(lambda messages: answer).run_master(1)


# -- threads -----------------------------------------------------------------------------------


def test_two_branches_may_run_side_by_side_inside_a_replica():
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = layer(), layer()

        def forward(self, x):
            return torch.stack(parallel_apply([self.a, self.b], [(x,), (2 * x,)]), 1)

    for _ in range(20):
        y = DataParallel(Parallel(), ["cpu"] * 3)(X)
        torch.testing.assert_close(y[:, 0], whole_batch())


def test_replicas_share_the_threads_that_the_caller_has_now():
    class Threads(nn.Module):
        def forward(self, x):
            return x + torch.get_num_threads()

    model = DataParallel(Threads(), ["cpu"] * 2)
    try:
        for count, share in ((1, 1), (4, 2), (3, 1), (6, 3)):
            torch.set_num_threads(count)
            assert model(torch.zeros(2)).tolist() == [share] * 2
            assert torch.get_num_threads() == count
            # What a thread begins with is not the share.
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result(timeout=DEADLINE) == count
            # Replicas called from there have new threads of their own.
            with ThreadPoolExecutor(1) as pool:
                assert (
                    pool.submit(model, torch.zeros(2)).result(timeout=DEADLINE).tolist()
                    == [share] * 2
                )
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_an_interrupted_forward_lets_the_interpreter_end():
    """A thread in the middle of an operation of torch made it abort."""
    program = """
        import _thread, sys, threading, torch
        from torch import nn
        from replication import DataParallel
        started = threading.Barrier(3)
        class Busy(nn.Module):
            def forward(self, x):
                started.wait(20)
                for _ in range(30):
                    x = torch.tanh(x @ x)
                return x
        def interrupt():
            started.wait(20)
            _thread.interrupt_main()
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            DataParallel(Busy(), ["cpu"] * 2)(torch.randn(2, 500, 500).repeat(1, 1, 1))
        except KeyboardInterrupt:
            sys.exit(3)
    """
    done = run_python("-c", textwrap.dedent(program))
    assert done.returncode == 3, done.stderr


# -- arguments, numbers ------------------------------------------------------------------------


def test_infinite_values_give_the_running_statistics_of_torchs_layer():
    x = X.clone()
    x[3, 1], x[5, 2] = float("inf"), float("nan")
    reference, synchronized = nn.BatchNorm1d(3, dtype=torch.float64), layer()
    reference(x)
    run_sharded(synchronized, x.split([4, 4]))
    for name in ("running_mean", "running_var"):
        one, other = getattr(synchronized, name), getattr(reference, name)
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("calls_super", [True, False])
def test_a_derived_class_that_replaces_replicate_can_be_patched(calls_super):
    """The callbacks are run once, whether it calls the method that it replaces or not."""

    class Derived(DataParallel):
        def replicate(self, module, device_ids):
            if calls_super:
                return super().replicate(module, device_ids)
            return replicate(module, device_ids)

    model = Derived(layer(), ["cpu"] * 3)
    patch_replication_callback(model)
    torch.testing.assert_close(model(X), whole_batch())
