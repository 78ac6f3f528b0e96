"""`global_mean`: the value and the gradient of one device that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from replication import DataParallel, ReplicaAware, functional, global_mean
from tests.kit.ranks import errors_of, needs_gloo, recorded_collectives, run_ranks
from tests.kit.threads import outcome_of

NAN, INF = float("nan"), float("inf")


class Shard(NamedTuple):
    """What one rank has: features, ``(n, ..., 3)``, and perhaps weights of the losses."""

    x: Tensor
    weight: Tensor | None = None


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _mask(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


#: The shards of two ranks, which differ in what they count.
CASES: dict[str, list[Shard]] = {
    "samples": [Shard(drawn(5, 3)), Shard(drawn(2, 3, seed=1))],
    "one": [Shard(drawn(3)), Shard(drawn(3, seed=1))],
    "none on a rank": [Shard(drawn(0, 3)), Shard(drawn(4, 3))],
    "pixels": [
        Shard(drawn(2, 4, 5, 3), _mask(2, 4, 5)),
        Shard(drawn(1, 3, 3, 3, seed=1), _mask(1, 3, 3, seed=3)),
    ],
    "no weight on a rank": [
        Shard(drawn(2, 4, 3), torch.zeros(2, 4, dtype=torch.bool)),
        Shard(drawn(2, 4, 3, seed=1), _mask(2, 4)),
    ],
    "integers": [
        Shard(drawn(3, 3), torch.tensor([2, 0, 5])),
        Shard(drawn(2, 3, seed=1), torch.tensor([300, 1], dtype=torch.int16)),
    ],
    "bytes": [  # whose sum is no byte
        Shard(drawn(3, 3), torch.tensor([200, 0, 200], dtype=torch.uint8)),
        Shard(drawn(2, 3, seed=1), torch.tensor([255, 1], dtype=torch.uint8)),
    ],
    "fractions": [
        Shard(drawn(3, 3), drawn(3, seed=2).abs()),
        Shard(drawn(2, 3, seed=1), drawn(2, seed=3).square().float()),
    ],
    "of samples": [  # broadcast to the tokens
        Shard(drawn(3, 4, 3), torch.tensor([[0.5], [0.0], [2.0]])),
        Shard(drawn(1, 4, 3, seed=1), torch.tensor([[3.0]])),
    ],
    "of classes": [
        Shard(drawn(3, 4, 3), torch.tensor([0.5, 0.0, 2.0, 1.0])),
        Shard(drawn(1, 4, 3, seed=1), torch.tensor([0.5, 0.0, 2.0, 1.0])),
    ],
}


def losses_of(theta: Tensor, shard: Shard, hidden: float) -> Tensor:
    """A loss for each position, with another value where the weight is 0."""
    losses = (shard.x @ theta).square() + (shard.x @ theta).sin()
    if shard.weight is None:
        return losses
    # Derivatives of what is hidden are NaN as well, of the operation that makes it NaN.
    return losses + torch.where(shard.weight.expand_as(losses) == 0, hidden, 0.0)


def mean_of(theta: Tensor, shards: list[Shard]) -> Tensor:
    """The mean over the losses of all ranks, position by position."""
    total, count = theta.new_zeros(()), 0.0
    for shard in shards:
        losses = losses_of(theta, shard, 0.0)
        weight = torch.ones_like(losses) if shard.weight is None else shard.weight
        pairs = zip(losses.flatten(), weight.expand_as(losses).flatten().tolist(), strict=True)
        for loss, each in pairs:
            total, count = total + loss * float(each), count + each
    return total / count


THETA = drawn(3, seed=9)
#: The derivatives of what a network makes of a loss.
UPSTREAM, DIRECTION = 1.7, drawn(3, seed=11)


def derivatives(mean: Tensor, theta: Tensor) -> list[Tensor]:
    """The value, the gradient, and the derivative of the gradient along a direction."""
    (first,) = torch.autograd.grad(mean * UPSTREAM, theta, create_graph=True)
    (second,) = torch.autograd.grad((first * DIRECTION).sum(), theta)
    return [mean.detach(), first.detach(), second]


def in_rank(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, shards in CASES.items():
        theta, shard = THETA.clone().requires_grad_(), shards[rank]
        for hidden in (NAN, INF):
            mean = global_mean(losses_of(theta, shard, hidden), shard.weight)
            found[f"{name}, {hidden}"] = derivatives(mean, theta)
        added = global_mean(losses_of(theta, shard, NAN), shard.weight, averages=False)
        found[f"{name}, added"] = derivatives(added, theta)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, in_rank)


@pytest.mark.parametrize("hidden", [NAN, INF])
@pytest.mark.parametrize("name", CASES)
@needs_gloo
def test_ranks_that_average_have_value_and_derivatives_of_one_device(ranks, name, hidden):
    theta = THETA.clone().requires_grad_()
    value, *grads = derivatives(mean_of(theta, CASES[name]), theta)
    found = [rank[f"{name}, {hidden}"] for rank in ranks]
    for got, *_ in found:
        torch.testing.assert_close(got, value)
    assert torch.equal(found[0][0], found[1][0])
    for expected, *parts in zip(grads, *(got for _, *got in found), strict=True):
        torch.testing.assert_close(sum(parts) / 2, expected)


@pytest.mark.parametrize("name", CASES)
@needs_gloo
def test_ranks_that_add_have_them_with_averages_false(ranks, name):
    theta = THETA.clone().requires_grad_()
    value, *grads = derivatives(mean_of(theta, CASES[name]), theta)
    found = [rank[f"{name}, added"] for rank in ranks]
    for got, *_ in found:
        torch.testing.assert_close(got, value)
    for expected, *parts in zip(grads, *(got for _, *got in found), strict=True):
        torch.testing.assert_close(sum(parts), expected)


@pytest.mark.parametrize("name", CASES)
def test_one_process_has_them(name):
    theta = THETA.clone().requires_grad_()
    for shard in CASES[name]:
        if shard.x.numel() and (shard.weight is None or shard.weight.any()):
            expected = derivatives(mean_of(theta, [shard]), theta)
            for averages in (True, False):
                losses = losses_of(theta, shard, NAN)
                found = derivatives(global_mean(losses, shard.weight, averages=averages), theta)
                torch.testing.assert_close(found, expected)


def test_one_process_may_use_transforms_of_torch_func():
    thetas, shard = drawn(2, 3, seed=5), CASES["pixels"][0]

    def loss(theta: Tensor) -> Tensor:
        return global_mean(losses_of(theta, shard, NAN), shard.weight)

    found = torch.func.vmap(torch.func.grad(loss))(thetas)
    for theta, gradient in zip(thetas, found, strict=True):
        leaf = theta.clone().requires_grad_()
        (expected,) = torch.autograd.grad(mean_of(leaf, [shard]), leaf)
        torch.testing.assert_close(gradient, expected)


# -- replicas ------------------------------------------------------------------------------------


class Net(ReplicaAware, nn.Module):
    def __init__(self, averages: bool = True) -> None:
        super().__init__()
        self.theta, self.averages = nn.Parameter(THETA.clone()), averages

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        losses = losses_of(self.theta, Shard(x, weight), NAN)
        return global_mean(losses, weight, averages=self.averages, group=self.group)


@pytest.mark.parametrize("averages", [True, False])
def test_replicas_average_or_add_what_they_return(averages):
    x, weight = drawn(5, 4, 3), _mask(5, 4)
    weight[:2] = False  # of the first of three replicas
    model = DataParallel(Net(averages), ["cpu"] * 3)
    y = model(x, weight)
    expected = mean_of(model.module.theta, [Shard(x, weight)])
    assert torch.equal(y, y[:1].expand(3))
    torch.testing.assert_close(y[0], expected)
    found = torch.autograd.grad(y.mean() if averages else y.sum(), model.module.theta)
    torch.testing.assert_close(found, torch.autograd.grad(expected, model.module.theta))


# -- wrappers ------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.ELU()).double()


#: Five samples of two micro-batches of two ranks, with classes of which 7 is ignored.
BATCH, CLASSES = drawn(2, 5, 6, 3), torch.randint(
    4, (2, 5, 6), generator=torch.Generator().manual_seed(2)
)  # fmt: skip
CLASSES[0, :2], CLASSES[1, 3, 1:] = 7, 7  # all that rank 0 has in the first micro-batch
OWN = slice(0, 2), slice(2, 5)


def cross_entropies(scores: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        scores.flatten(0, -2), classes.flatten(), reduction="none", ignore_index=7
    )


def by_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def by_fsdp2(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # which starts the compiler

    return fully_shard(net)


def whole(tensor: Tensor | None) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def stepped(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Iterator[Any]:
    """Values of the loss and gradients of a step on one micro-batch, then of one on both."""
    net = network()
    model = wrap(net)
    xs, classes = BATCH[:, OWN[rank]], CLASSES[:, OWN[rank]]
    valid = classes != 7
    with recorded_collectives() as calls:
        losses = cross_entropies(model(xs[0]), classes[0])
        del calls[:]  # the wrapper's own
        loss = global_mean(losses, valid[0].flatten())
    assert [name for name, _ in calls] == ["all_reduce"]
    with recorded_collectives() as calls:
        loss.backward()
    assert calls == []  # but those of the wrapper, which do not come by our functions
    yield loss.item(), [whole(p.grad) for p in net.parameters()]
    net.zero_grad()
    count = functional.all_reduce(valid.sum())
    values = []
    for step, (x, target, weight) in enumerate(zip(xs, classes, valid, strict=True)):
        accumulates = hasattr(model, "no_sync") and step == 0
        with model.no_sync() if accumulates else nullcontext():
            losses = cross_entropies(model(x), target)
            loss = global_mean(losses, weight.flatten(), count=count)
            loss.backward()
            values.append(loss.item())
    yield sum(values), [whole(p.grad) for p in net.parameters()]


def all_steps(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> list[Any]:
    return list(stepped(rank, wrap))


@needs_gloo
@pytest.mark.parametrize("wrap", [by_ddp, pytest.param(by_fsdp2, marks=pytest.mark.slow)])
def test_wrappers_train_on_pixels_and_micro_batches_as_one_device_does(wrap):
    found = run_ranks(2, partial(all_steps, wrap=wrap))
    for index, part in enumerate((slice(0, 1), slice(0, 2))):
        net = network()
        scores, classes = net(BATCH[part]), CLASSES[part]
        loss = nn.functional.cross_entropy(
            scores.flatten(0, -2), classes.flatten(), ignore_index=7
        )
        grads = torch.autograd.grad(loss, list(net.parameters()))
        for rank in found:
            value, gradients = rank[index]
            assert value == pytest.approx(loss.item(), rel=1e-12)
            torch.testing.assert_close(gradients, list(grads))


# -- dtypes and special values -------------------------------------------------------------------


def dtypes(rank: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        losses = torch.full((3 + rank, 1000), 60000.0, dtype=dtype, requires_grad=True)
        mean = global_mean(losses, torch.ones(1, dtype=torch.float16))
        assert mean.dtype == losses.mean().dtype == dtype
        assert mean == torch.tensor(60000.0, dtype=dtype)
        mean.backward()
        assert losses.grad.dtype == dtype
        torch.testing.assert_close(losses.grad, torch.full_like(losses, 2 / 7000))


def not_finite(rank: int) -> None:
    """Values of torch's mean, on every rank."""
    for value in (INF, -INF, NAN):
        losses = torch.tensor([1.0, value] if rank else [2.0], requires_grad=True)
        mean = global_mean(losses)
        torch.testing.assert_close(mean, torch.tensor([1.0, value, 2.0]).mean(), equal_nan=True)
        mean.backward()
        assert losses.grad.tolist() == pytest.approx([2 / 3] * (1 + rank))


def nothing_anywhere(rank: int) -> None:
    losses = torch.ones(2, requires_grad=True)
    for empty in (
        global_mean(losses[:0]),
        global_mean(losses, torch.zeros(2)),
        global_mean(losses, torch.zeros(2, dtype=torch.bool), count=0),
    ):
        assert empty.isnan()
        empty.backward()
        assert losses.grad.eq(0).all()


def counts(rank: int) -> None:
    losses = torch.tensor([1.0 + rank, 3.0], requires_grad=True)
    for count in (8, 8.0, torch.tensor(8), torch.tensor([8.0]), torch.tensor(8.0).double()):
        mean = global_mean(losses, count=count)
        assert (mean.shape, mean.dtype, mean.item()) == ((), torch.float32, 9 / 8)
        assert torch.autograd.grad(mean, losses)[0].tolist() == [2 / 8] * 2


def without_gradients(rank: int) -> None:
    losses = torch.tensor([1.0 + rank, 3.0], requires_grad=True)
    with torch.no_grad():
        mean = global_mean(losses)
    assert (mean.item(), mean.requires_grad) == (9 / 4, False)
    with torch.inference_mode():
        assert global_mean(losses).item() == 9 / 4
    # A rank whose loss needs no gradient exchanges what the others do.
    mean = global_mean(losses if rank else losses.detach())
    assert (mean.item(), mean.requires_grad) == (9 / 4, rank == 1)


def precise(rank: int) -> None:
    """A share much larger than the mean leaves all digits of the mean."""
    losses = torch.tensor([1e8 if rank else -1e8, 1.0], requires_grad=True)
    assert global_mean(losses).item() == pytest.approx(0.5, abs=4)  # what a sum in float32 leaves
    found = functional.all_gather(global_mean(losses).detach())
    assert torch.equal(*found)


def refused_before_any_waiting(rank: int) -> None:
    """One rank alone calls, and gets its error."""
    if rank == 0:
        with recorded_collectives() as calls:
            for call, error, text in REFUSALS:
                outcome = outcome_of(lambda call=call: call(torch.ones(2, 3)))
                assert type(outcome.error) is error, text
                assert text in str(outcome.error)
        assert calls == []


REFUSALS: list[tuple[Callable[[Tensor], Any], type[Exception], str]] = [
    (lambda x: global_mean(3.0), TypeError, "takes losses as a local tensor (got float)"),
    (lambda x: global_mean(x.long()), TypeError, "floating-point dtype (got torch.int64)"),
    (lambda x: global_mean(x, 0.5), TypeError, "takes weight as a local tensor (got float)"),
    (lambda x: global_mean(x, x + 1j), TypeError, "a weight of a real dtype"),
    (
        lambda x: global_mean(x, x[:, 0]),
        ValueError,
        "losses, [2, 3], or broadcast to it (got [2])",
    ),
    (lambda x: global_mean(x, x[None]), ValueError, "(got [1, 2, 3])"),
    (lambda x: global_mean(x[:, :1], x), ValueError, "losses, [2, 1], or"),
    (lambda x: global_mean(x, x.requires_grad_()), ValueError, "takes weight as a constant"),
    (
        lambda x: global_mean(x, count=x.sum().requires_grad_()),
        ValueError,
        "takes count as a constant",
    ),
    (lambda x: global_mean(x, count=x[0]), ValueError, "a count of one real value on cpu"),
    (lambda x: global_mean(x, count=True), TypeError, "takes a number as count (got bool)"),
    (lambda x: global_mean(x, count="2"), TypeError, "takes a number as count (got str)"),
    (lambda x: global_mean(x, group=2), TypeError, "group must be a Group, a torch."),
]

CHECKS = [
    dtypes, not_finite, nothing_anywhere, counts, without_gradients, precise,
    refused_before_any_waiting,
]  # fmt: skip


@pytest.fixture(scope="module")
def two() -> list[list[str | None]]:
    return run_ranks(2, errors_of, CHECKS)


@needs_gloo
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(two, check):
    for found in two:
        assert found[CHECKS.index(check)] is None


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS, ids=[t for _, _, t in REFUSALS])
def test_wrong_arguments_are_refused_in_one_process(call, error, text):
    outcome = outcome_of(lambda: call(torch.ones(2, 3)))
    assert type(outcome.error) is error
    assert text in str(outcome.error)
