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


class Sleeping(nn.Module):
    """Sleeps in rank 1, while rank 0 waits for it in a collective."""

    def forward(self, x: Tensor) -> Tensor:
        if has_size() > 1:
            if distributed.get_rank() == 1:
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
