"""A small network, its step with and without replicas, and a mark for two wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.shards import randomized
from tests.kit.wrappers import as_torch_does, ours


def network() -> nn.Module:
    """Takes ``(n, 3, 2)``, also of a single sample, to ``(n, 2)``."""
    layers = [nn.BatchNorm1d(3), nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, momentum=None), nn.Tanh()]
    return randomized(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)).double())


def batch(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 3, 2, dtype=torch.float64) * 2 + 1
    return x, torch.randn(samples, 2, dtype=torch.float64)


def step(run: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """All that a step gives and leaves behind."""
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.backward(dy)
    grads = [leaf.grad, *(parameter.grad.clone() for parameter in net.parameters())]
    return [y.detach(), *grads, *(buffer.clone() for buffer in net.buffers())]


def inner(model: nn.Module) -> Any:
    """The network itself, with or without replicas."""
    return model.module if isinstance(model, nn.DataParallel) else model


def assert_alike(
    use: Callable[[nn.Module], Iterable[Any]],
    net: nn.Module,
    model: nn.Module,
    **tolerances: float,
) -> None:
    """Asserts that ``use`` gives and leaves the same with a network and with its replicas."""
    seen = []
    for one in (net, model):
        torch.manual_seed(1)
        results = list(use(one))
        grads = [parameter.grad for parameter in one.parameters()]
        seen.append([results, grads, list(one.state_dict().values())])
    for expected, actual in zip(*seen, strict=True):
        torch.testing.assert_close(actual, expected, **tolerances)


each_wrap = pytest.mark.parametrize("wrap", [ours, as_torch_does], ids=["ours", "patched"])
