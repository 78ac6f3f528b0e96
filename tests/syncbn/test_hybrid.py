"""`SynchronizedBatchNorm` in replicas of several processes, on gloo over loopback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from replication import DataParallel, parallel_apply, patch_replication_callback, replicate
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests import oracle
from tests.ranks import needs_gloo, recorded_collectives, run_ranks
from tests.sharded import randomized
from tests.syncbn import test_processes
from tests.syncbn.test_processes import assert_equal_one_device, go

pytestmark = needs_gloo

#: Replicas and samples of each process. A process without samples has one replica.
SPLITS = {
    "2 x 2": ([2, 2], [4, 4]),
    "2 + 3": ([2, 3], [4, 7]),
    "1 + 2": ([1, 2], [3, 4]),
    "small last batch": ([2, 2], [1, 5]),
    "no data": ([2, 2], [0, 5]),
}
WAYS = ["gather", "reduce", "unseen"]


def batch(samples: Sequence[int], seed: int = 0, features: int = 2) -> tuple[Tensor, ...]:
    """The shards of all processes, the same in each process."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(sum(samples), features, 3, generator=generator, dtype=torch.float64)
    return full.split(list(samples))


layer_like = partial(test_processes.layer_like, dtype=torch.float64)


# -- the numbers -------------------------------------------------------------------------------


def numbers(rank: int, replicas: Sequence[int], samples: Sequence[int]) -> dict[str, Tensor]:
    layer = layer_like()
    model = DataParallel(layer, ["cpu"] * replicas[rank])
    x = batch(samples)[rank].clone().requires_grad_()
    dy = batch(samples, seed=1)[rank]
    (exact,) = torch.autograd.grad(model(x), x, dy, create_graph=True)
    (second,) = torch.autograd.grad(exact.square().sum(), x)
    y = model(x)
    fast, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)
    evaluated = model.eval()(x) if rank == 1 else x  # evaluation does not wait
    found = {"y": y, "exact": exact, "second": second, "fast": fast, "dw": dw, "db": db}
    found |= {"mean": layer.running_mean, "var": layer.running_var, "evaluated": evaluated}
    return {name: tensor.detach() for name, tensor in found.items()} | {
        "count": layer.num_batches_tracked
    }


def all_numbers(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for way in WAYS:
        go(way)
        for name, (replicas, samples) in SPLITS.items():
            found[way, name] = numbers(rank, replicas, samples)
    go("gather")
    return found | {check.__name__: check(rank) for check in CHECKS}


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_ranks(2, all_numbers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("split", SPLITS)
def test_replicas_in_processes_compute_what_one_device_computes(found, way, split):
    processes = [results[way, split] for results in found]
    _, samples = SPLITS[split]
    shards, upstream = batch(samples), batch(samples, seed=1)
    plain = assert_equal_one_device(processes, shards, upstream, layer_like())
    torch.testing.assert_close(processes[1]["evaluated"], plain.eval()(shards[1]).detach())


# -- whole networks ----------------------------------------------------------------------------


class Shortcut(nn.Module):
    """Parallel branches, one of which is called first and is the shorter one."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.BatchNorm1d(4)
        self.deep = nn.Sequential(
            nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Tanh(), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        )
        self.last = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        short = self.shortcut(x)
        return self.deep(x) + short * self.last(x).tanh()


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        conv = nn.Conv1d(2, 4, 1)
        self.body = nn.Sequential(nn.BatchNorm1d(2), conv, Shortcut(), nn.ReLU(), Shortcut())
        self.head = nn.Linear(4, 1)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for part in self.body:
            x = checkpoint(part, x, use_reentrant=False) if self.checkpoints else part(x)
        return self.head(x.mean(2))


def net(checkpoints: bool = False) -> Net:
    torch.manual_seed(3)
    return Net(checkpoints).double()


def loss_of(y: Tensor) -> Tensor:
    return (y - 1).square().mean()


STEPS = 4
#: Samples of the processes: equally many, for the mean loss.
SAMPLES = [6, 6]


def trained(model: nn.Module, shards: Sequence[Tensor], forwards: int = 1) -> list[Tensor]:
    """The losses of some steps of momentum SGD, which changes the model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for start in range(0, STEPS * forwards, forwards):
        optimizer.zero_grad()
        loss = sum(loss_of(model(shard)) for shard in shards[start : start + forwards])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def own_batches(rank: int, count: int) -> list[Tensor]:
    """The gradients of inputs make the first layer's collective the last of a backward."""
    return [batch(SAMPLES, seed)[rank].clone().requires_grad_() for seed in range(count)]


def in_ddp(rank: int, replicas: Sequence[int], **options: Any) -> tuple[Any, list[Tensor]]:
    inner = convert_model(net(**options))
    model = DistributedDataParallel(DataParallel(inner, ["cpu"] * replicas[rank]))
    losses = trained(model, own_batches(rank, STEPS))
    return inner.state_dict(), losses


def ddp(rank: int) -> Any:
    found = {str(replicas): in_ddp(rank, replicas) for replicas in ([2, 2], [2, 3], [1, 2])}
    return found | {"checkpoints": in_ddp(rank, [2, 3], checkpoints=True)}


def two_forwards_in_one_backward(rank: int) -> Any:
    """As in a GAN. DDP sums the gradients of both."""
    inner = convert_model(net())
    model = DistributedDataParallel(DataParallel(inner, ["cpu"] * (2 + rank)))
    return inner.state_dict(), trained(model, own_batches(rank, 2 * STEPS), forwards=2)


def without_ddp(rank: int) -> Any:
    """The gradients are of the process's own loss."""
    inner = convert_model(net())
    loss_of(DataParallel(inner, ["cpu"] * (2 + rank))(batch(SAMPLES)[rank])).backward()
    return {name: parameter.grad for name, parameter in inner.named_parameters()}


def patched(rank: int) -> Any:
    inner = convert_model(net())
    model = Stock(inner)
    patch_replication_callback(model)
    losses = trained(DistributedDataParallel(model), own_batches(rank, STEPS))
    return inner.state_dict(), losses


class Stock(nn.DataParallel):
    """torch's class, with replicas on the CPU."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids = module, [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        shards = x.chunk(len(self.device_ids))
        replicas = self.replicate(self.module, self.device_ids[: len(shards)])
        return torch.cat(self.parallel_apply(replicas, [(shard,) for shard in shards], None))

    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        return replicate(module, ["cpu"] * len(device_ids))

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return parallel_apply(replicas, inputs, kwargs)


def parts(rank: int) -> Any:
    """Of three of the five replicas, in two processes, and of the other two."""
    layer = layer_like(group_size=3)
    x = batch([2, 3])[rank].clone().requires_grad_()
    y = DataParallel(layer, ["cpu"] * (2 + rank))(x)
    (dx,) = torch.autograd.grad(y, x, batch([2, 3], seed=1)[rank])
    return y.detach(), dx, layer.running_mean


def traffic(rank: int) -> Any:
    layer = SynchronizedBatchNorm1d(16)
    model = DataParallel(layer, ["cpu"] * 2)
    x = torch.randn(8, 16, 5, requires_grad=True)
    model(x)  # makes the group of torch.distributed
    with recorded_collectives() as calls:
        model(x).sum().backward()
    return calls


def different_eps(rank: int) -> Any:
    """Of the replicas of one process, whose gradients then take the exact way."""

    class SetsEps(SynchronizedBatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            self.eps = 0.1 if self._has_original_buffers else 1e-5
            return super().forward(input)

    torch.manual_seed(1)
    layer = randomized(SetsEps(2, dtype=torch.float64))
    x = batch([4, 4])[rank].clone().requires_grad_()
    y = DataParallel(layer, ["cpu"] * 2)(x)
    return y.detach(), *torch.autograd.grad(y, x, batch([4, 4], seed=1)[rank])


def one_value(rank: int) -> str:
    model = DataParallel(SynchronizedBatchNorm1d(2), ["cpu"] * 2)
    try:
        model(torch.ones(1 - rank, 2))
    except ValueError as error:
        return str(error)
    return "no error"


def unused_in_a_process(rank: int) -> Tensor:
    """A process whose loss does not use its outputs still takes part in the backward."""
    x = batch([4, 4])[rank].clone().requires_grad_()
    y = DataParallel(layer_like(), ["cpu"] * 2)(x)
    return torch.autograd.grad((rank * y.pow(3)).sum(), x)[0]


CHECKS = [
    ddp, two_forwards_in_one_backward, without_ddp, patched, parts, traffic, different_eps,
    one_value, unused_in_a_process,
]  # fmt: skip


def assert_equals_one_device(results: Sequence[Any], forwards: int = 1) -> None:
    one = net()
    losses = trained(
        one, [torch.cat(batch(SAMPLES, seed)) for seed in range(STEPS * forwards)], forwards
    )
    for state, _ in results:
        torch.testing.assert_close(dict(state), dict(one.state_dict()))
    means = [torch.stack(both).mean() for both in zip(*(own for _, own in results), strict=True)]
    torch.testing.assert_close(means, losses)


@pytest.mark.parametrize("which", ["[2, 2]", "[2, 3]", "[1, 2]", "checkpoints"])
def test_training_under_ddp_equals_one_device(found, which):
    assert_equals_one_device([results["ddp"][which] for results in found])


def test_two_forwards_in_one_backward_under_ddp(found):
    key = "two_forwards_in_one_backward"
    assert_equals_one_device([results[key] for results in found], forwards=2)


def test_patched_data_parallel_under_ddp(found):
    assert_equals_one_device([results["patched"] for results in found])


def test_gradients_without_ddp_are_of_the_own_loss(found):
    one = net()
    (2 * loss_of(one(torch.cat(batch(SAMPLES))))).backward()  # the sum of both means
    for name, parameter in one.named_parameters():
        total = sum(results["without_ddp"][name] for results in found)
        torch.testing.assert_close(total, parameter.grad)


def test_parts_that_span_processes(found):
    ys, dxs, means = zip(*(results["parts"] for results in found), strict=True)
    x, dy = (torch.cat(batch([2, 3], seed)) for seed in (0, 1))
    layer = layer_like()
    first, last = (
        oracle.batch_norm([x[part]], [dy[part]], layer.weight, layer.bias)
        for part in (slice(0, 3), slice(3, 5))
    )
    torch.testing.assert_close(torch.cat(ys), torch.cat(first.outputs + last.outputs))
    torch.testing.assert_close(torch.cat(dxs), torch.cat(first.input_grads + last.input_grads))
    plain = nn.BatchNorm1d(2, dtype=torch.float64)
    plain.load_state_dict(layer_like().state_dict())
    plain(x[:3])
    for mean in means:  # the part of each process's replica 0
        torch.testing.assert_close(mean, plain.running_mean)


def test_one_collective_each_way(found):
    for results in found:
        assert results["traffic"] == [("all_gather", 8 * 33), ("all_gather", 8 * 32)]


def test_replicas_that_differ_in_eps(found):
    ys, dxs = zip(*(results["different_eps"] for results in found), strict=True)
    torch.manual_seed(1)
    layer = layer_like()
    x = torch.cat(batch([4, 4])).requires_grad_()
    mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True, unbiased=False)
    eps = torch.tensor([0.1, 0.1, 1e-5, 1e-5] * 2, dtype=torch.float64).view(-1, 1, 1)
    weight, bias = (p.detach().view(1, -1, 1) for p in (layer.weight, layer.bias))
    y = (x - mean) / (var + eps).sqrt() * weight + bias
    (dx,) = torch.autograd.grad(y, x, torch.cat(batch([4, 4], seed=1)))
    torch.testing.assert_close(torch.cat(ys), y.detach())
    torch.testing.assert_close(torch.cat(dxs), dx)


def test_one_value_in_all_is_torchs_error_in_every_process(found):
    for results in found:
        assert results["one_value"].startswith("Expected more than 1 value per channel")


def test_process_whose_outputs_are_unused(found):
    x = torch.cat(batch([4, 4])).requires_grad_()
    plain = nn.BatchNorm1d(2, dtype=torch.float64)
    plain.load_state_dict(layer_like().state_dict())
    (dx,) = torch.autograd.grad(plain(x)[4:].pow(3).sum(), x)
    torch.testing.assert_close(torch.cat([r["unused_in_a_process"] for r in found]), dx)
