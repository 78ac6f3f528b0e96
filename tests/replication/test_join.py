"""Ranks that run out of data go on with empty batches, and train like one device."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

from replication import JoinableStep, ReplicaAware
from syncbn import convert_model
from tests.kit.ranks import needs_gloo, run_ranks

pytestmark = pytest.mark.slow

EPOCHS = 2

#: The sizes of the batches of each rank.
CASES = {
    "one rank has no data": [[], [3, 2, 4]],
    "the first rank ends first": [[2], [3, 2, 4]],
    "the last rank ends first": [[4, 1, 3], [2, 2], [1]],
    "equally many": [[2, 3], [4, 1]],
    "no rank has data": [[], []],
}


class Shift(ReplicaAware, nn.Module):
    """A layer of one's own, with several collectives."""

    def forward(self, x: Tensor) -> Tensor:
        count = self.group.all_reduce(torch.tensor(len(x)))
        return x - 0.1 * self.group.all_reduce(x.sum(0)) / count


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2), Shift()]
    return nn.Sequential(*layers).double()


def batches(sizes: list[list[int]], rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in sizes[rank]]
    return [(both[:, :3], both[:, 3:]) for both in made]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def train(rank: int, sizes: list[list[int]], bucket_cap_mb: float) -> tuple[Any, ...]:
    net = convert_model(network())
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
    optimizer = optimizer_of(net)
    losses = []

    def train_one_batch(x: Tensor, y: Tensor) -> float:
        count = torch.tensor(len(x))
        distributed.all_reduce(count)
        loss = (model(x) - y).square().sum() / count
        optimizer.zero_grad()
        (loss * distributed.get_world_size()).backward()
        optimizer.step()
        return loss.item()

    step = JoinableStep(train_one_batch, (torch.empty(0, 3).double(), torch.empty(0, 2).double()))
    for _ in range(EPOCHS):
        with Join([step]):
            own = [step(x, y) for x, y in batches(sizes, rank)]
        losses += own + [0.0] * (max(map(len, sizes)) - len(own))
    return net.state_dict(), optimizer.state_dict()["state"], losses


def train_on_one_device(sizes: list[list[int]]) -> tuple[Any, ...]:
    net = network()
    optimizer = optimizer_of(net)
    losses = []
    loaders = [batches(sizes, rank) for rank in range(len(sizes))]
    for _ in range(EPOCHS):
        for parts in zip_longest(*loaders):
            x, y = (torch.cat(both) for both in zip(*filter(None, parts), strict=True))
            loss = (net(x) - y).square().sum() / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return net.state_dict(), optimizer.state_dict()["state"], losses


@needs_gloo
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 25])  # several buckets, or one
@pytest.mark.parametrize("case", CASES)
def test_ranks_with_unequal_numbers_of_batches_train_like_one_device(case, bucket_cap_mb):
    sizes = CASES[case]
    results = run_ranks(len(sizes), train, sizes, bucket_cap_mb)
    state, moments, losses = train_on_one_device(sizes)
    for own_state, own_moments, _ in results:
        torch.testing.assert_close(own_state, state)
        torch.testing.assert_close(own_moments, moments)
    shares = zip(*[own_losses for *_, own_losses in results], strict=True)
    torch.testing.assert_close([sum(share) for share in shares], losses)


def test_a_step_begins_when_the_others_know_of_it(monkeypatch):
    handle = mock.Mock()
    monkeypatch.setattr(Join, "notify_join_context", lambda step: handle)
    assert JoinableStep(lambda: handle.wait.call_count, ())() == 1


OTHERS = distributed.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, ()), TypeError, "step must be a function"),
        ((print, torch.empty(0, 3)), TypeError, "step must be a function, and empty a tuple"),
        ((print, (), 3), TypeError, "process_group must be a"),
        ((print, (), OTHERS), ValueError, "`JoinableStep`: process_group must contain"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        JoinableStep(*arguments)


def test_join_says_what_is_missing_without_processes():
    with pytest.raises(RuntimeError, match=r"call init_process_group"):
        Join([JoinableStep(print, ())])
