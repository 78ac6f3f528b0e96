"""Padded batches, and what a layer must make of them: the numbers of what is no padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit import oracle
from tests.kit.layers import LAYERS
from tests.kit.shards import randomized

NAN = float("nan")

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Masked(nn.Module):
    """A network of one layer, so that messages name it."""

    def __init__(self, features: int = 3, dims: int = 1, **options: Any) -> None:
        super().__init__()
        self.bn = randomized(LAYERS[max(1, dims)][1](features, **options))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.bn(x, mask=mask)


def mask_of(samples: int, extent: Sequence[int], seed: int = 0) -> Tensor:
    """Random; of three replicas that share 7 samples, the second has no valid position."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(samples, *extent, generator=generator) < 0.6
    mask[3:6] = False
    mask[0] = True
    return mask


def padded(x: Tensor, mask: Tensor, value: float = NAN) -> Tensor:
    """A copy with the same strides and other padding."""
    return torch.where(mask.unsqueeze(1), x, torch.tensor(value, dtype=x.dtype, device=x.device))


def valid(x: Tensor, mask: Tensor) -> Tensor:
    """The values that count, ``(n, C)`` in float64."""
    return x.double().movedim(1, -1)[mask]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `valid`, with zeros elsewhere."""
    result = torch.zeros(*mask.shape, values.size(1), dtype=values.dtype)
    result[mask] = values
    return result.movedim(-1, 1)


def expected(layer: Any, x: Tensor, mask: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, the gradients of x, weight and bias, and the buffers, after the first call."""
    weight, bias = (t if t is None else t.detach().double() for t in (layer.weight, layer.bias))
    momentum = 1.0 if layer.momentum is None else layer.momentum
    found = oracle.batch_norm(
        [valid(x, mask)], [valid(dy, mask)], weight, bias, eps=layer.eps, momentum=momentum
    )
    images = [spread(values[0], mask) for values in (found.outputs, found.input_grads)]
    gradients = [] if weight is None else [found.weight_grad, found.bias_grad]
    buffers = [found.running_mean, found.running_var] if layer.track_running_stats else []
    return [*images, *gradients, *buffers]


def stepped(model: Callable[..., Tensor], layer: Any, *batch: Tensor) -> list[Tensor]:
    x, mask, dy = batch
    leaf = x.clone().requires_grad_()
    y = model(leaf, mask=mask)
    y.backward(dy)
    gradients = [leaf.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    return [y.detach(), *gradients, *list(layer.buffers())[:2]]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], **tolerances: float) -> None:
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double().cpu(), exact.cpu(), **tolerances)
