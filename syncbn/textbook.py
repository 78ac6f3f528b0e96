"""The textbook: the whole layer, in plain operations that autograd and the compiler know.

Start to read here. Each copy has a shard of the batch, and ``add`` sums a vector over all copies:

    n, total, squares = add([n, sum(x), sum(x^2)])              one exchange, 1 + 2 C numbers
    mean, var = total / n, squares / n - mean^2
    y = (x - mean) * weight / sqrt(var + eps) + bias

As ``add`` has a derivative, which is the sum over all copies again, that is all: autograd finds
the gradients, and theirs. This runs wherever speed is not the point:

- under `torch.compile`, where ``add`` is torch's functional all-reduce (see `syncbn.compiled`),
- for derivatives of gradients, in the backward of the fast roads (see `gradients`),
- in clamp mode, and on devices without the kernels that the fast roads need.

Empty shards: nothing here chooses its operations by the size of a shard. So the graphs of all
copies have the same nodes, and a backward reaches every sum that other copies wait for.

Digits: each copy measures its shard about a constant, its own mean, so that float32 is enough. The
sums are in float64. Still, squares / n - mean^2 loses log10(mean^2 / var) of their 16 digits: 8
are left for a mean of 1e4 deviations, as many as an input in float32 has. Where a second exchange
does no harm, nothing is lost (see `exact_batch_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from syncbn.channels import (
    accumulation_dtype,
    in_float64,
    per_channel,
    reduced_dims,
    values_per_channel,
)
from syncbn.statistics import Denominator, KernelMoments, Moments

Add = Callable[[Tensor], Tensor]


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, denominator: Denominator, add: Add
) -> tuple[Tensor, Moments]:
    """Returns the output of a shard, and the moments of the batch."""
    # Half precision is rounded once: to the output, and to the gradient of x.
    dtype, x = x.dtype, x.to(accumulation_dtype(x.dtype))
    start = x.detach().sum(reduced_dims(x)) / max(1, values_per_channel(x))
    apart, start = x - per_channel(start, x), in_float64(start)
    moments = moments_of(add(sums_of(apart, start)))
    return normalized(apart, weight, bias, denominator, moments, start).to(dtype), moments


def exact_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, denominator: Denominator, add: Add
) -> tuple[Tensor, Moments]:
    """As `batch_norm`, with all digits at any mean, by two exchanges."""
    # The output does not change if all copies subtract one constant from x, such as their mean.
    with torch.no_grad():
        center = per_channel(batch_norm(x, weight, bias, denominator, add)[1].mean, x)
    y, (n, mean, var) = batch_norm(x - center, weight, bias, denominator, add)
    return y.to(x.dtype), Moments(n, mean + in_float64(center.flatten()), var)


def sums_of(apart: Tensor, start: Tensor | float = 0.0) -> Tensor:
    """Returns n and the sums of x and x^2, ``(1 + 2 C,)`` in float64, given x - start."""
    dims, n = reduced_dims(apart), values_per_channel(apart)
    # The derivative of `square` would keep one more tensor of this size for the next derivative.
    sums = apart.sum(dims), (apart * apart).sum(dims)
    first, second = (in_float64(each / max(1, n)) for each in sums)
    mean = first + start
    # The product at the end: Inductor lets ranks add a `cat` in place, and would then read the sum
    # of the ranks where it needs an operand of the `cat` once more.
    return torch.cat((mean.new_ones(1), mean, second + start * (first + mean))) * n


def moments_of(sums: Tensor) -> Moments:
    """Returns the moments of a batch, 0 without values. Its count is a tensor, ``(1,)``."""
    n = sums[:1].detach()
    mean, square = (sums[1:] / n.clamp(min=1)).chunk(2)
    return Moments(n, mean, (square - mean.square()).clamp(min=0))


def normalized(
    apart: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    denominator: Denominator,
    moments: Moments,
    start: Tensor | float = 0.0,
) -> Tensor:
    """Returns the output of a shard, given x - start and the moments of the batch."""
    _, mean, var = moments
    scale = denominator.of(var).rsqrt()
    if weight is not None:
        scale = scale * in_float64(weight).to(scale.device)
    shift = (start - mean) * scale
    if bias is not None:
        shift = shift + in_float64(bias).to(shift.device)
    return apart * per_channel(scale, apart) + per_channel(shift, apart)


def gradients(
    needs: Sequence[bool],
    batch: KernelMoments,
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    weight: Tensor | None,
    add: Add = lambda sums: sums,
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and shards that are needed, with their derivatives.

    The shards are all that this thread has, and ``add`` sums over those of other processes. The
    mean of the batch is known.
    """
    denominator = Denominator(batch.eps)
    with torch.enable_grad():
        # Views, because several replicas may have the same tensor.
        views: list[Any] = [t if t is None else t.view_as(t) for t in (weight, *xs)]
        weight, *xs = views
        for x, need in zip(xs, needs[2:], strict=True):
            # The input of a node may need a gradient only because the parameters do.
            x.requires_grad_(need or x.requires_grad)
        bias = torch.zeros_like(batch.mean).requires_grad_()  # its value does not matter
        aparts = [x - per_channel(batch.mean, x) for x in xs]
        # On the device of the first sum: the CPU, where devices have no float64.
        sums = [sums_of(apart) for apart in aparts]
        total = reduce(torch.add, [each.to(sums[0].device) for each in sums])
        moments = moments_of(add(total))
        ys = [normalized(apart, weight, bias, denominator, moments) for apart in aparts]
        dys = [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)]
    inputs = [t for t, need in zip((weight, bias, *xs), needs, strict=True) if need]
    grads = iter(torch.autograd.grad(ys, inputs, dys, create_graph=torch.is_grad_enabled()))
    return [next(grads) if need else None for need in needs]
