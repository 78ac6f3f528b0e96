"""Functions that return the arguments of `verify`, or fail, in ranks of `verify_ranks`."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import rnn

from replication import ReplicaAware, functional, global_mean
from syncbn import convert_model


def has_size() -> int:
    """The number of ranks, which is one where one device runs."""
    return distributed.get_world_size()


def equal(**options: Any) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    x, t = torch.randn(6, 3), torch.randn(6, 4)
    loss = nn.functional.mse_loss
    return {
        "model": net,
        "batch": x,
        "targets": t,
        "loss": loss,
        "wrap": DistributedDataParallel,
    } | options


def sum_of_samples() -> dict[str, Any]:
    return equal(loss=lambda y, t: (y - t).square().sum())


def with_a_group() -> dict[str, Any]:
    """A program that makes process groups, in ranks and on one device."""
    groups = [distributed.new_group([rank]) for rank in range(has_size())]
    assert groups[distributed.get_rank()].size() == 1
    return equal()


class Siamese(nn.Module):
    """Two views below each other, so that a layer gets both of a rank one after the other."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.net(torch.cat([a, b])).chunk(2)


def two_views(gather: Any = functional.all_gather) -> dict[str, Any]:
    net = convert_model(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))

    def loss(views: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (torch.cat([*gather(view)]) for view in views)
        return nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))

    batch = torch.randn(7, 3), torch.randn(7, 3)
    return equal(model=Siamese(net), batch=batch, targets=None, loss=loss)


def two_views_of_own() -> dict[str, Any]:
    """Each rank contrasts its own samples only."""
    return two_views(lambda view: [view])


class Recurrent(nn.Module):
    """Pads what it returns to the longest sequence of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def own_lengths() -> dict[str, Any]:
    lengths = torch.tensor([9, 5, 7, 3, 2])

    def loss(y: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
        classes, lengths = t
        losses = nn.functional.cross_entropy(
            y.transpose(1, 2), classes[:, : y.size(1)], reduction="none"
        )
        return global_mean(losses, torch.arange(y.size(1)) < lengths[:, None])

    batch, targets = (torch.randn(5, 9, 3), lengths), (torch.randint(3, (5, 9)), lengths)
    return equal(model=Recurrent(), batch=batch, targets=targets, loss=loss)


def empty_parts() -> dict[str, Any]:
    """All samples go to rank 0, so that the outputs of the others are empty."""
    return {"model": nn.Sequential(Moved(), nn.Linear(3, 2)), "batch": torch.randn(6, 3)}


class Moved(ReplicaAware, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat(self.group.all_gather(x))
        return whole if self.group.rank == 0 else whole[:0]


# -- what differs --------------------------------------------------------------------------------


def compiled() -> dict[str, Any]:
    """torch.compile wraps a network in DDP and outside, and compiles a layer in place."""

    def wrap(net: nn.Module) -> Any:
        return torch.compile(DistributedDataParallel(net), fullgraph=True)

    options = equal(wrap=wrap)
    options["model"][0].compile(fullgraph=True)
    return options | {"model": torch.compile(options["model"])}


def terms() -> dict[str, Any]:
    """One of two terms has a collective without a derivative, and does not use one parameter."""
    net = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)})
    return equal(model=Both(net), loss=loss_of_terms)


class Both(nn.Module):
    def __init__(self, net: nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: layer(x) for name, layer in self.net.items()}


def loss_of_terms(y: dict[str, Tensor], t: Tensor) -> dict[str, Tensor]:
    mean = y["b"].mean(0)
    distributed.all_reduce(mean)
    mean = mean / has_size()
    return {"fit": nn.functional.mse_loss(y["a"], t), "center": mean.square().sum()}


def features_and_scale() -> dict[str, Any]:
    """Two factors: features pass a gather without a derivative, and a scale does not."""
    net = nn.Sequential(nn.Linear(3, 4), Scale())
    return equal(model=net, loss=of_gathered)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.scale


def of_gathered(outputs: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    y, scale = outputs
    parts = [torch.empty_like(y) for _ in range(has_size())]
    distributed.all_gather(parts, y.detach())
    parts[distributed.get_rank()] = y
    return (scale * torch.cat(parts)).logsumexp(0).sum()


def uneven_means() -> dict[str, Any]:
    """Shards of 3 and 2 samples."""
    return equal(batch=torch.randn(5, 3), targets=torch.randn(5, 4))


class Prototypes(nn.Module):
    """A loss with a parameter, which DDP does not wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y @ self.weight.T, t)


def loss_with_parameters() -> dict[str, Any]:
    return equal(loss=Prototypes(), targets=torch.arange(6) % 5)


class Center(nn.Module):
    """A running mean of its inputs, which rank 0 alone updates, or each rank its own."""

    def __init__(self, of_first: bool) -> None:
        super().__init__()
        self.of_first = of_first
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.of_first and distributed.get_rank()):
            self.center = self.center.lerp(x.detach().mean(0), 0.1)
        return x


def own_statistics() -> dict[str, Any]:
    return equal(model=nn.Sequential(nn.Linear(3, 4), Center(of_first=False)))


def statistics_of_rank_0() -> dict[str, Any]:
    return equal(model=nn.Sequential(nn.Linear(3, 4), Center(of_first=True)))


class Codebook(nn.Module):
    """Each rank sums up its own samples, and the codes come from the sums of all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(2, 4))
        self.register_buffer("sums", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            near = torch.cdist(x, self.codes).argmin(1)
            self.sums.mul_(0.9).index_add_(0, near, x)
            spread = self.sums.clone()
            distributed.all_reduce(spread)
            self.codes.copy_(spread / spread.norm())
        return x + self.codes.mean(0)


def own_sums() -> dict[str, Any]:
    return equal(model=nn.Sequential(nn.Linear(3, 4), Codebook()))


def batch_norm() -> dict[str, Any]:
    return equal(model=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))


def coupled() -> dict[str, Any]:
    """Each rank contrasts its own samples only."""
    return equal(loss=lambda y, t: nn.functional.cross_entropy(y @ t.T, torch.arange(len(y))))


def other_beginning(strict: bool = False) -> dict[str, Any]:
    """Each rank draws other parameters, and nothing broadcasts them."""
    torch.manual_seed(distributed.get_rank())
    net = nn.Linear(3, 4)
    torch.manual_seed(0)

    def wrap(net: nn.Module) -> nn.Module:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        return net

    return equal(model=net, wrap=wrap, strict=strict)


def average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    distributed.all_reduce(parameter.grad.div_(has_size()))


def strict_beginning() -> dict[str, Any]:
    return other_beginning(strict=True)


def strict_and_broadcast() -> dict[str, Any]:
    return other_beginning(strict=True) | {"wrap": DistributedDataParallel}


# -- ranks that fail -----------------------------------------------------------------------------


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")
        self.function = lambda: None


def raises() -> dict[str, Any]:
    if distributed.get_rank() == 1:
        raise OSError("no such file")
    return equal()


def raises_unpicklable() -> dict[str, Any]:
    if distributed.get_rank() == 1:
        raise Unpicklable("no such", "file")
    return equal()


def exits() -> dict[str, Any]:
    if distributed.get_rank() == 1:
        raise SystemExit(3)
    return equal()


def dies() -> dict[str, Any]:
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return equal()


def gathers_other_sizes(samples: int = 5) -> dict[str, Any]:
    """A collective of torch that gets tensors of 3 samples and of 2, and kills a rank."""

    def loss(y: Tensor, t: Tensor) -> Tensor:
        parts = [torch.empty_like(y) for _ in range(has_size())]
        distributed.all_gather(parts, y.detach())
        return torch.cat(parts).mean()

    return equal(batch=torch.randn(samples, 3), targets=torch.randn(samples, 4), loss=loss)


def aborts() -> dict[str, Any]:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        if has_size() > 1 and distributed.get_rank() == 1:
            os.abort()
        return nn.functional.mse_loss(y, t)

    return equal(loss=loss)


class Sleeping(nn.Module):
    """Sleeps in rank 1, while rank 0 waits for it in a collective."""

    def forward(self, x: Tensor) -> Tensor:
        if has_size() > 1:
            if distributed.get_rank() == 1:
                print("sleeps", flush=True)
                time.sleep(1000)
            distributed.all_reduce(x.detach())
        return x


def hangs() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(3, 4), Sleeping())
    return equal(model=net)


def keeps_the_lock() -> dict[str, Any]:
    if distributed.get_rank() == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")  # for years, in C
    return equal()
