"""`verify` between processes: every rank gets the same result, or an error, with gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from replication import ReplicaAware
from syncbn import DataParallel, convert_model, verify
from tests.kit.ranks import needs_gloo, run_ranks
from tests.kit.threads import outcome_of

pytestmark = [needs_gloo, pytest.mark.slow]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).tanh())


def network(rank: int) -> nn.Module:
    """Each rank draws other parameters."""
    torch.manual_seed(rank)
    return convert_model(Net())


def batch(samples: int) -> Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))


def is_in_use() -> bool:
    """Whether the processes of the program can still communicate, as they all do."""
    x = torch.ones(1)
    distributed.all_reduce(x)
    return x.item() == distributed.get_world_size()


# -- what is equal -------------------------------------------------------------------------------


def verified(rank: int) -> list[tuple[str, float]]:
    net, found = network(rank), []
    before, world = copy.deepcopy(net.state_dict()), distributed.group.WORLD
    loss = nn.CrossEntropyLoss(reduction="sum")
    for options in (
        {},
        {"wrap": DistributedDataParallel},
        {"wrap": fully_shard},
        {"wrap": fully_shard},  # again: torch remembers groups of such parameters
        {"loss": loss, "targets": torch.arange(7) % 2},
        {"wrap": lambda net: DistributedDataParallel(net), "loss": mean_over_ranks},
    ):
        result = verify(net, batch(7), **options)
        assert result and result.copies == "ranks"
        largest = max(d.error for kind in result.differences.values() for d in kind)
        found.append((str(result), largest))
    net.norm.process_group = world
    assert verify(DistributedDataParallel(copy.deepcopy(net)), {"x": batch(7)})
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in net.modules())
    assert distributed.group.WORLD is world and is_in_use()
    sharded = fully_shard(network(rank))  # as a program that goes on
    sharded(batch(4)).sum().backward()
    nn.utils.clip_grad_norm_(sharded.parameters(), 1.0).full_tensor()
    return found


def mean_over_ranks(y: Tensor) -> Tensor:
    """A sum over the batch, whose gradients DistributedDataParallel then divides."""
    return distributed.get_world_size() * y.square().sum()


@pytest.mark.parametrize("size", [2, 3])
def test_synchronized_ranks_are_equal_and_all_get_the_same_result(size):
    first, *others = run_ranks(size, verified)
    assert all(other == first for other in others)
    for text, largest in first:
        assert text.endswith(f"\n{size} ranks: equal (tolerance 1e-06)")
        assert largest < 1e-9


# -- what differs --------------------------------------------------------------------------------


class Counting(ReplicaAware, nn.Module):
    """Its buffer has the number of the rank, and nothing uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rank", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.rank.fill_(self.group.rank)
        return x.clone()


def each_samples_mean(y: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, targets)


def sum_of_samples(y: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, targets, reduction="sum")


def times_ranks(y: Tensor, targets: Tensor) -> Tensor:
    return distributed.get_world_size() * each_samples_mean(y, targets)


def found_by(rank: int, make: Callable[[int], nn.Module], options: dict[str, Any]) -> list[str]:
    found = verify(make(rank), batch(6), **options)
    return [str(found.first_difference), found.explanation]


def in_wrapper(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def unaveraged(net: nn.Module) -> nn.Module:
    return net


MEAN = "Outputs are equal, and the mean of the ranks' losses is one device's"
LOSS_DIFFERS = "Outputs are equal, but already the loss differs.\n"
INSIDE = "Ask for that number inside the loss, because one device calls the loss as well"
ABOUT_HALF = (
    "Outputs are equal, and the ranks' losses add up to one device's: only gradients differ.\n"
    "Every gradient is 1/2 of one device's: DDP averages over 2 ranks, so losses that add up to "
    "one device's must be multiplied by the number of ranks. "
    f"{INSIDE}"
)
ABOUT_TWICE = "Every gradient is 2 times one device's: "
TARGETS = batch(6)[:, :2].contiguous()


@pytest.mark.parametrize(
    ("options", "explanation"),
    [
        ({"wrap": DistributedDataParallel, "loss": sum_of_samples}, ABOUT_HALF),
        ({"wrap": fully_shard, "loss": sum_of_samples}, ABOUT_HALF.replace("DDP", "the wrapper")),
        (
            {"wrap": DistributedDataParallel, "loss": times_ranks},
            f"{LOSS_DIFFERS}{ABOUT_TWICE}DDP averages over 2 ranks, so the loss must be divided "
            f"by the number of ranks. {INSIDE}",
        ),
        (
            {"loss": each_samples_mean},
            f"{MEAN}: only gradients differ.\n{ABOUT_TWICE}without wrap, verify adds over 2 "
            "ranks, and the mean of the ranks' losses is one device's loss. Pass "
            "wrap=DistributedDataParallel if your program averages, or else divide the loss by "
            f"the number of ranks. {INSIDE}",
        ),
        ({"wrap": in_wrapper, "loss": each_samples_mean}, None),
        ({"loss": sum_of_samples}, None),
    ],
    ids=["sum", "sharded", "times n", "unwrapped", "mean", "unwrapped sum"],
)
def test_a_factor_of_the_number_of_ranks_is_explained(options, explanation):
    for first, text in run_ranks(2, found_by, network, options | {"targets": TARGETS}):
        assert text == (explanation or "")
        assert first == "None" if explanation is None else first.startswith("gradient of input")


def unconverted(rank: int) -> nn.Module:
    return Net()


ALONE = (
    "Each rank computes `norm` (BatchNorm1d) from its own samples, as if it were alone: "
    "synchronize it, by syncbn.convert_model or torch's SyncBatchNorm\n"
    "Each rank updates `norm.running_mean`, `norm.running_var` from its own samples"
)


def counting(rank: int) -> nn.Module:
    return nn.Sequential(network(rank), Counting())


@pytest.mark.parametrize(
    ("make", "wrap", "where", "explained"),
    [
        (unconverted, None, "output of `norm` (BatchNorm1d): error", ALONE),
        (unconverted, fully_shard, "output of `norm` (BatchNorm1d): error", ALONE),
        (
            counting,
            None,
            "buffer of `1.rank`: error",
            "Only rank 1 changes `1.rank`, and the others",
        ),
        (
            network,
            unaveraged,
            "gradient of `stem.weight`: error",
            "The ranks have different gradients of `stem.weight`, `stem.bias`, `norm.weight` and "
            "3 more, so nothing averages them",
        ),
    ],
    ids=["plain", "sharded", "buffer", "not averaged"],
)
def test_what_differs_is_named_with_the_ranks(make, wrap, where, explained):
    for first, text in run_ranks(2, found_by, make, {"wrap": wrap}):
        assert first.startswith(where)
        assert explained in text
        assert "rank 1 and rank 0 differ" in first or make is unconverted


# -- what is refused -----------------------------------------------------------------------------


class Raising(nn.Module):
    """The first layer communicates, so the other ranks wait in the second one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.first, self.second = where, nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        size, rank = distributed.get_world_size(), distributed.get_rank()
        if (self.where == "alone" and size == 1) or (self.where == "forward" and rank == 1):
            raise OSError("no such file")
        if self.where == "skipped" and rank == 1:
            return y
        if self.where == "backward" and rank == 1:
            y.register_hook(refuse)
        return self.second(y)


def refuse(grad: Tensor) -> None:
    raise OSError("no such file")


def bad_calls(rank: int) -> dict[str, Callable[[], Any]]:
    def call(model: nn.Module, x: Any = None, **options: Any) -> Callable[[], Any]:
        return partial(verify, model, batch(6) if x is None else x, **options)

    def raising(where: str) -> nn.Module:
        return convert_model(Raising(where))

    net = network(rank)
    return {
        "other models": call(nn.Sequential(net) if rank else net),
        "other devices": call(copy.deepcopy(net).to("meta") if rank else net),
        "other layers": call(raising("skipped")),
        "other modes": call(network(rank).eval() if rank else net),
        "evaluation": call(network(rank).eval()),
        "other batches": call(net, batch(6) + rank),
        "their own shards": call(net, batch(6 + rank)),
        "other options": call(net, dtype=torch.float32 if rank else torch.float64),
        "other targets": call(net, loss=sum_of_samples, targets=TARGETS + rank),
        "targets alone": call(net, targets=TARGETS),
        "one sample": call(net, batch(1)),
        "dropout": call(nn.Sequential(net, nn.Dropout(0.5))),
        "sharded": call(fully_shard(network(rank))),
        "forward": call(raising("forward")),
        "backward": call(raising("backward"), wrap=DistributedDataParallel),
        "alone": call(raising("alone")),
        "loss": call(net, loss=lambda y: y.square()),
    }


def refused(rank: int) -> dict[str, str]:
    errors = {}
    for name, call in bad_calls(rank).items():
        error = outcome_of(call).error
        errors[name] = f"{type(error).__name__}: {error}"
        assert is_in_use(), name
    assert verify(network(rank), batch(6))
    return errors


ON_ALL = {
    "other models": "ValueError: every rank must pass the same model (got another on rank 1",
    "other devices": "ValueError: every rank must pass the same model (got another on rank 1",
    "evaluation": "ValueError: the model must be in training mode",
    "other batches": "ValueError: every rank must pass the same `batch` (got another on rank 1",
    "their own shards": "ValueError: every rank must pass the same `batch`",
    "other options": "ValueError: every rank must pass the same options",
    "other targets": "ValueError: every rank must pass the same `targets`",
    "targets alone": "ValueError: targets are for a loss",
    "one sample": "ValueError: the batch must have a part for each of 2 ranks (got 1",
    "dropout": "ValueError: the model must not draw random numbers",
    "sharded": "TypeError: expected a model that is not sharded",
    "alone": "OSError: no such file",
    "loss": "ValueError: the loss must be a tensor of one number",
}
#: What one rank raises, and the others quote.
ON_ONE = {
    "other modes": (1, "ValueError: the model must be in training mode"),
    "forward": (1, "OSError: no such file"),
    "backward": (1, "OSError: no such file"),
}


def test_bad_input_raises_on_every_rank_and_the_program_goes_on():
    ranks = run_ranks(2, refused)
    for errors in ranks:
        assert {k: errors[k] for k, v in ON_ALL.items() if not errors[k].startswith(v)} == {}
    for errors in ranks:
        assert "the calls do not match: rank 0: `second`, call 2: " in errors["other layers"]
    for name, (origin, text) in ON_ONE.items():
        assert ranks[origin][name].startswith(text)
        quoted = (
            f"ReplicationError: verify ends on every rank, because rank {origin} raised {text}"
        )
        assert ranks[1 - origin][name].startswith(quoted)


def verified_by_one_rank(rank: int) -> bool:
    """The replicas of one rank, whose layers would wait for the other rank."""
    if rank:
        return True
    net = network(rank)
    net.norm.process_group = distributed.group.WORLD
    return bool(verify(DataParallel(net, ["cpu"] * 2), batch(6), ["cpu"] * 2))


def test_devices_compare_the_replicas_of_one_rank_alone():
    assert run_ranks(2, verified_by_one_rank) == [True, True]


def verified_by_one(rank: int) -> str:
    error = outcome_of(partial(verify, network(0), batch(6), wrap=DistributedDataParallel)).error
    return str(error)


def test_a_wrapper_for_one_process_is_refused():
    (text,) = run_ranks(1, verified_by_one)
    assert "torch.distributed has one process" in text and "use --nproc-per-node=2" in text
