"""Batch normalization the slow obvious way: float64, one channel and one value at a time.

Imports nothing of the packages under test, so that it cannot share their mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Expected:
    """What one device that sees the whole batch computes."""

    outputs: list[Tensor]
    input_grads: list[Tensor]
    weight_grad: Tensor
    bias_grad: Tensor
    running_mean: Tensor
    running_var: Tensor
    mean: list[float] = field(default_factory=list)


def batch_norm(
    shards: Sequence[Tensor],
    upstream: Sequence[Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    momentum: float = 0.1,
    clamps: bool = False,
) -> Expected:
    """Normalizes the union of ``shards``, each ``(N, C, ...)`` with any N and extent."""
    channels = shards[0].size(1)
    gamma = [1.0] * channels if weight is None else weight.tolist()
    beta = [0.0] * channels if bias is None else bias.tolist()
    outputs = [torch.zeros(s.shape, dtype=torch.float64) for s in shards]
    grads = [torch.zeros(s.shape, dtype=torch.float64) for s in shards]
    dweight, dbias, running_mean, running_var = torch.zeros(4, channels, dtype=torch.float64)
    means = []
    for c in range(channels):
        values = [v for s in shards for v in s[:, c].flatten().tolist()]
        dys = [v for u in upstream for v in u[:, c].flatten().tolist()]
        n = len(values)
        mean = math.fsum(values) / n
        var = math.fsum((v - mean) ** 2 for v in values) / n
        sigma = math.sqrt(max(var, eps) if clamps else var + eps)
        hats = [(v - mean) / sigma for v in values]
        s1 = math.fsum(dys)
        s2 = math.fsum(dy * hat for dy, hat in zip(dys, hats, strict=True))
        # The deviation does not depend on the input where it is clamped.
        along = 0.0 if clamps and var < eps else s2
        dxs = [
            gamma[c] / sigma * (dy - s1 / n - hat * along / n)
            for dy, hat in zip(dys, hats, strict=True)
        ]
        dweight[c], dbias[c] = s2, s1
        running_mean[c] = momentum * mean
        running_var[c] = (1 - momentum) + momentum * var * n / (n - 1)
        means.append(mean)
        ys = iter([gamma[c] * hat + beta[c] for hat in hats])
        dxs_left = iter(dxs)
        for output, grad in zip(outputs, grads, strict=True):
            for view, source in ((output[:, c], ys), (grad[:, c], dxs_left)):
                numbers = [next(source) for _ in range(view.numel())]
                view.copy_(torch.tensor(numbers, dtype=torch.float64).view(view.shape))
    return Expected(outputs, grads, dweight, dbias, running_mean, running_var, means)
