"""Bugs that programs on several ranks have had, each in a few lines, and mended in one.

Each function returns the arguments of `verify`, so that the command runs any of them:

    python -m replication.verify tests.mutations:detached_gather

``tests/test_mutations.py`` holds what `verify` must say of each, and writes a table of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from replication import functional, global_mean
from syncbn import SynchronizedBatchNorm1d

#: The class of what a loss ignores.
IGNORED = -100


def size() -> int:
    return distributed.get_world_size()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def step(
    loss: Callable[..., Any], model: nn.Module | None = None, **others: Any
) -> dict[str, Any]:
    """The arguments of `verify`, with 6 samples and regression targets unless others are given."""
    given = {"batch": torch.randn(6, 3), "targets": torch.randn(6, 4)}
    model = network() if model is None else model
    return {"model": model, "wrap": DistributedDataParallel, "loss": loss} | given | others


def gathered(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, with their derivatives."""
    return torch.cat(functional.all_gather(tensor))


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks, with its derivative."""
    return functional.all_reduce(tensor)


def summed_in_place(tensor: Tensor) -> Tensor:
    """What `torch.distributed` adds up, unseen by autograd."""
    distributed.all_reduce(tensor.data)
    return tensor


def contrast(z: Tensor, w: Tensor, scale: float | Tensor = 10.0) -> Tensor:
    """A loss that compares each sample with all others."""
    logits = scale * F.normalize(z, dim=-1) @ F.normalize(w, dim=-1).T
    return F.cross_entropy(logits, torch.arange(len(z)))


# -- collectives in a loss -----------------------------------------------------------------------


def without_derivative(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, of which this rank's alone has a derivative."""
    parts = [torch.empty_like(tensor) for _ in range(size())]
    distributed.all_gather(parts, tensor.detach())
    parts[distributed.get_rank()] = tensor
    return torch.cat(parts)


def detached_gather(mended: bool = False) -> dict[str, Any]:
    """A gather without a derivative, of which each rank puts its own part back."""
    gather = gathered if mended else without_derivative
    return step(lambda y, t: contrast(gather(y), gather(t)))


class Pair(nn.Module):
    """Two embeddings, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3, 4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(x), self.text(x), self.scale.exp()


def detached_gather_with_temperature(mended: bool = False) -> dict[str, Any]:
    """The same, where a learned temperature multiplies what is compared."""
    gather = gathered if mended else without_derivative
    loss = lambda out: contrast(gather(out[0]), gather(out[1]), out[2])  # noqa: E731
    return step(loss, Pair(), targets=None)


def reduction_in_place(mended: bool = False) -> dict[str, Any]:
    """`dist.all_reduce` in a loss."""
    reduce = summed if mended else summed_in_place

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return (reduce(y.mean(0)) / size()).square().sum()

    return step(loss)


def maximum_in_place(mended: bool = False) -> dict[str, Any]:
    """`dist.all_reduce` of a maximum in a loss."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        hardest = (y - t).square().amax(0)
        if mended:
            return functional.all_reduce(hardest, "max").mean()
        distributed.all_reduce(hardest.data, distributed.ReduceOp.MAX)
        return hardest.mean()

    return step(loss)


def scaled_twice(mended: bool = False) -> dict[str, Any]:
    """A loss of all ranks that is multiplied by their number once more."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        mean = summed((y - t).square().sum()) / summed(torch.tensor(float(y.numel())))
        return mean if mended else size() * mean

    return step(loss)


def stack_for_cat(mended: bool = False) -> dict[str, Any]:
    """`torch.stack` for `torch.cat` after a gather, so that an axis is another one."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        parts = functional.all_gather(y)
        whole = torch.cat(parts) if mended or size() == 1 else torch.stack(parts)
        return -F.log_softmax(whole, dim=1).square().mean()  # over classes, in the latter samples

    return step(loss)


def wrong_group(mended: bool = False) -> dict[str, Any]:
    """A gather over a group that has this rank only."""
    own = [distributed.new_group([rank]) for rank in range(size())][distributed.get_rank()]
    group = None if mended else own

    def loss(y: Tensor, t: Tensor) -> Tensor:
        z, w = (torch.cat(functional.all_gather(each, group)) for each in (y, t))
        return contrast(z, w)

    return step(loss)


def no_gather(mended: bool = False) -> dict[str, Any]:
    """Negatives of the same rank only."""
    gather = gathered if mended else torch.clone
    return step(lambda y, t: contrast(gather(y), gather(t)))


def labels_without_offset(mended: bool = False) -> dict[str, Any]:
    """Labels of rank 0 on each rank."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        first = len(y) * distributed.get_rank() if mended else 0
        return F.cross_entropy(y @ gathered(t).T, first + torch.arange(len(y)))

    return step(loss)


def one_term_of_two(mended: bool = False) -> dict[str, Any]:
    """`dist.all_reduce` in one term of two."""
    reduce = summed if mended else summed_in_place

    def loss(y: Tensor, t: Tensor) -> dict[str, Tensor]:
        center = reduce(y.mean(0)) / size()
        return {"distance": F.mse_loss(y, t), "regularizer": 0.05 * center.square().sum()}

    return step(loss)


# -- counts --------------------------------------------------------------------------------------


def mean(losses: Tensor, weight: Tensor, mended: bool) -> Tensor:
    """The mean of a rank's losses, or that of all ranks."""
    return global_mean(losses, weight) if mended else losses.sum() / weight.sum()


def mean_of_uneven_shards(mended: bool = False) -> dict[str, Any]:
    """A mean over 3 samples on one rank and over 2 on the other."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return mean((y - t).square(), torch.ones_like(y), mended)

    return step(loss, batch=torch.randn(5, 3), targets=torch.randn(5, 4))


def tokens_of_own(mended: bool = False) -> dict[str, Any]:
    """A mean over the tokens of a rank, of which some are ignored."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        losses = F.cross_entropy(y, t, ignore_index=IGNORED, reduction="none")
        return mean(losses, t != IGNORED, mended)

    return step(loss, targets=torch.tensor([0, 1, 2, IGNORED, IGNORED, 3]))


def pixels_of_own(mended: bool = False) -> dict[str, Any]:
    """A mean over the pixels of a rank, of which some are ignored."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        losses = F.cross_entropy(y, t, ignore_index=IGNORED, reduction="none")
        return mean(losses, t != IGNORED, mended)

    labels = torch.randint(3, (4, 5, 5))
    labels[3, 1:] = IGNORED
    return step(loss, nn.Conv2d(2, 3, 1), batch=torch.randn(4, 2, 5, 5), targets=labels)


def boxes_of_own(mended: bool = False) -> dict[str, Any]:
    """A sum over the number of boxes on the same rank. Each image has three at most."""

    def loss(y: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
        boxes, valid = t
        losses = (y.unflatten(1, (3, 4)) - boxes).abs().sum(-1) * valid
        return mean(losses, valid, mended)

    valid = (torch.arange(3) < torch.tensor([3, 2, 1, 0])[:, None]).double()
    targets = torch.randn(4, 3, 4), valid
    return step(loss, nn.Linear(5, 12), batch=torch.randn(4, 5), targets=targets)


def count_of_all_without_size(mended: bool = False) -> dict[str, Any]:
    """A sum over the count of all ranks, without their number."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        count = (t != IGNORED).sum()
        distributed.all_reduce(count)
        total = F.cross_entropy(y, t, ignore_index=IGNORED, reduction="sum")
        return total * (size() if mended else 1) / count

    return step(loss, targets=torch.tensor([0, 1, 2, IGNORED, IGNORED, 3]))


def sum_under_ddp(mended: bool = False) -> dict[str, Any]:
    """A sum over samples, which DDP then averages over ranks."""
    return step(lambda y, t: (size() if mended else 1) * (y - t).square().sum())


def ratio_of_own(mended: bool = False) -> dict[str, Any]:
    """A Dice loss, a ratio of sums, of each rank."""
    reduce = summed if mended else torch.clone

    def loss(y: Tensor, t: Tensor) -> Tensor:
        shared, both = reduce((y.sigmoid() * t).sum()), reduce((y.sigmoid() + t).sum())
        return 1 - 2 * shared / both

    return step(loss, targets=torch.rand(6, 4).round())


# -- statistics ----------------------------------------------------------------------------------


class Center(nn.Module):
    """Subtracts a running mean. ``mean`` computes that of a batch."""

    def __init__(self, mean: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mean = mean
        self.register_buffer("center", torch.zeros(4))

    def forward(self, y: Tensor) -> Tensor:
        out = y - self.center
        with torch.no_grad():
            self.center.lerp_(self.mean(y), 0.1)
        return out


def mean_of_all(y: Tensor) -> Tensor:
    return gathered(y).mean(0)


def own_mean(y: Tensor) -> Tensor:
    return y.mean(0)


def mean_of_rank_0(y: Tensor) -> Tensor:
    mean = y.mean(0)
    distributed.broadcast(mean, 0)
    return mean


def centered(mean: Callable[[Tensor], Tensor], mended: bool) -> dict[str, Any]:
    layer = Center(mean_of_all if mended else mean)
    return step(F.mse_loss, nn.Sequential(network(), layer))


def statistics_of_own(mended: bool = False) -> dict[str, Any]:
    """A running mean of the samples of a rank."""
    return centered(own_mean, mended)


def statistics_of_rank_0(mended: bool = False) -> dict[str, Any]:
    """A running mean of the samples of rank 0, on every rank."""
    return centered(mean_of_rank_0, mended)


class Codebook(nn.Module):
    """Moving averages for two codes: how many samples are near each, and their sum."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduce = reduce
        self.register_buffer("counts", torch.zeros(2))
        self.register_buffer("sums", torch.zeros(2, 4))

    def forward(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            near = F.one_hot((y[:, 0] > 0).long(), 2).to(y)
            self.counts.lerp_(summed(near.sum(0)), 0.5)
            self.sums.lerp_(self.reduce(near.T @ y), 0.5)
        return y.clone()


def half_of_the_statistics(mended: bool = False) -> dict[str, Any]:
    """A codebook whose counts are added up over the ranks, but not its sums."""
    layer = Codebook(summed if mended else torch.clone)
    return step(F.mse_loss, nn.Sequential(network(), layer))


def plain_batch_norm(mended: bool = False) -> dict[str, Any]:
    """BatchNorm that is not synchronized."""
    norm = SynchronizedBatchNorm1d(4) if mended else nn.BatchNorm1d(4)
    return step(F.mse_loss, nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh()))


class Normalized(nn.Module):
    """A normalization by hand. ``moments`` computes the mean and the variance."""

    def __init__(self, moments: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.moments = moments

    def forward(self, y: Tensor) -> Tensor:
        mean, variance = self.moments(y)
        return (y - mean) / (variance + 1e-5).sqrt()


def moments_of_all(y: Tensor) -> Sequence[Tensor]:
    whole = gathered(y)
    return whole.mean(0), whole.var(0, correction=0)


def averaged_variances(y: Tensor) -> Sequence[Tensor]:
    """The mean over the ranks of their variances misses how far their means are apart."""
    return [summed(each) / size() for each in (y.mean(0), y.var(0, correction=0))]


def moments_without_derivative(y: Tensor) -> Sequence[Tensor]:
    whole = without_derivative(y)
    return whole.mean(0), whole.var(0, correction=0)


def mean_of_variances(mended: bool = False) -> dict[str, Any]:
    """A variance that is the mean of the ranks' variances."""
    moments = moments_of_all if mended else averaged_variances
    return step(F.mse_loss, nn.Sequential(network(), Normalized(moments)))


def detached_moments(mended: bool = False) -> dict[str, Any]:
    """Statistics of all ranks without their derivatives."""
    moments = moments_of_all if mended else moments_without_derivative
    return step(F.mse_loss, nn.Sequential(network(), Normalized(moments)))


# -- parameters, and their wrapper ---------------------------------------------------------------


class Averaged(nn.Module):
    """Averages gradients, but broadcasts no parameters."""

    def __init__(self, net: nn.Module, broadcasts: bool) -> None:
        super().__init__()
        self.net = net
        for parameter in net.parameters():
            if broadcasts:
                distributed.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter: Tensor) -> None:
        distributed.all_reduce(parameter.grad.div_(size()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def seeded_by_rank(make: Callable[[], nn.Module], mended: bool) -> nn.Module:
    torch.manual_seed(0 if mended else distributed.get_rank())
    made = make()
    torch.manual_seed(0)
    return made


def different_initialization(mended: bool = False) -> dict[str, Any]:
    """Ranks begin with different parameters, and nothing broadcasts them."""
    model = seeded_by_rank(network, mended)
    wrap = lambda net: Averaged(net, broadcasts=mended)  # noqa: E731
    return step(F.mse_loss, model, wrap=wrap, strict=True)


class Prototypes(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y @ self.weight.T, t)


def classified(loss: nn.Module, mended: bool) -> dict[str, Any]:
    """With the parameters of a loss outside of the model, or with a layer of it in their place."""
    targets = torch.arange(6) % 5
    if mended:
        layer = nn.Linear(4, 5, bias=False)
        return step(F.cross_entropy, nn.Sequential(network(), layer), targets=targets)
    return step(loss, targets=targets)


def parameters_of_the_loss(mended: bool = False) -> dict[str, Any]:
    """A loss with parameters, which DDP does not wrap."""
    return classified(Prototypes(), mended)


def other_parameters_of_the_loss(mended: bool = False) -> dict[str, Any]:
    """The same, where they begin with different values."""
    return classified(seeded_by_rank(Prototypes, mended), mended) | {"strict": True}


def temporary_ddp(mended: bool = False) -> dict[str, Any]:
    """`DDP(net)(x)`, whose hooks end with it."""

    def wrap(net: nn.Module) -> Callable[[Tensor], Tensor]:
        # Nothing else refers to the wrapper, so that its hooks end with the forward.
        return (
            DistributedDataParallel(net) if mended else lambda x: DistributedDataParallel(net)(x)
        )

    return step(F.mse_loss, wrap=wrap)


def forgotten_no_sync(mended: bool = False) -> dict[str, Any]:
    """`no_sync` in the step that should synchronize."""

    def wrap(net: nn.Module) -> nn.Module:
        model = DistributedDataParallel(net)
        model.require_backward_grad_sync = mended  # what `no_sync` sets, for a step too many
        return model

    return step(F.mse_loss, wrap=wrap)


def ignored_parameter(mended: bool = False) -> dict[str, Any]:
    """A parameter that DDP was told to ignore."""

    def wrap(net: nn.Module) -> nn.Module:
        if not mended:
            net._ddp_params_and_buffers_to_ignore = ["2.bias"]
        return DistributedDataParallel(net)

    return step(F.mse_loss, wrap=wrap)


# -- random numbers ------------------------------------------------------------------------------


def dropout(mended: bool = False) -> dict[str, Any]:
    """Dropout, which draws other numbers on each rank."""
    layer = nn.Dropout(0.5).eval() if mended else nn.Dropout(0.5)
    return step(F.mse_loss, nn.Sequential(network(), layer))


class Noisy(nn.Module):
    """Adds noise of one row, of rank 0 or of each rank."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.is_shared = is_shared

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x[0])
        if self.is_shared:
            distributed.broadcast(noise, 0)
        return x + 0.1 * noise


def noise_of_own(mended: bool = False) -> dict[str, Any]:
    """Noise that should be the same on all ranks."""
    return step(F.mse_loss, nn.Sequential(network(), Noisy(is_shared=mended)))


def directions_of_own(mended: bool = False) -> dict[str, Any]:
    """A loss that draws directions on each rank."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        directions = torch.randn(4, 8, dtype=y.dtype)
        if mended:
            distributed.broadcast(directions, 0)
        return ((y - t) @ directions).square().mean()

    return step(loss)
