"""The textbook: the whole layer, in plain operations that autograd and the compiler know.

Start to read here. Each copy of a layer has a shard of the batch, ``(N, C, ...)``, and ``add`` is
a function that sums a vector over all copies. Then for each channel

    n, total, squares = add([n_own, sum(x), sum(x^2)])          one exchange of 1 + 2 C numbers
    mean, var = total / n, squares / n - mean^2
    y = (x - mean) * weight / sqrt(var + eps) + bias

is batch normalization of the whole batch (Ioffe & Szegedy, "Batch Normalization: Accelerating
Deep Network Training by Reducing Internal Covariate Shift", 2015). As ``add`` has a derivative,
which is the sum of the gradients over all copies, autograd finds the gradients, and theirs.

This is what the project promises, so it runs wherever speed is not the point:

- under `torch.compile`, where ``add`` stays in the graph (see `add_in_graph`),
- for gradients that need derivatives, in the backward of the two fast roads (see
  `differentiable_gradients`),
- in clamp mode, and on devices without the kernels that the fast roads need.

Digits. A sum of squares loses digits if the mean is large against the deviation:

1. Each copy measures its shard about a constant, its own mean, so its sums are exact up to
   rounding in the dtype of x. What is sent is in float64. There the parts are merged by their sums
   of x^2 and not by their deviations (Chan, Golub & LeVeque, "Updating Formulae and a Pairwise
   Algorithm for Computing Sample Variances", 1979), because that would need a second exchange. So
   log10(mean^2 / var) of 16 digits are lost: at a mean of 1e4 deviations 8 are left, as many as an
   input in float32 has. That is `batch_norm`, with one sum. Compiled calls use it.
2. The output does not change if all copies subtract one constant from x. If it is the mean of the
   batch, nothing is lost, however large the mean. But the mean is only known after a first sum.
   That is `exact_batch_norm`, with two sums. Uncompiled calls use it.

A backward needs one sum to be exact, because the mean is known from forward.

Empty shards. Nothing here chooses its operations by the size of a shard. So the graphs of all
copies have the same nodes, and a backward reaches every sum in which other copies take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from replication.groups.base import WithDerivative
from syncbn.channels import (
    accumulation_dtype,
    in_float64,
    per_channel,
    reduced_dims,
    values_per_channel,
)
from syncbn.statistics import Denominator, KernelMoments, Moments

#: Sums a vector in float64, ``(1 + 2 C,)``, over all copies.
Add = Callable[[Tensor], Tensor]


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, denominator: Denominator, add: Add
) -> tuple[Tensor, Moments]:
    """Returns the output of a shard, and the moments of the batch. It takes one sum.

    Args:
        x: The shard, ``(N, C, ...)``, in any floating-point dtype. N may be 0.
        weight: ``(C,)``, or None for ones.
        bias: ``(C,)``, or None for zeros.
        denominator: ``var + eps``, or what stands for it in clamp mode.
        add: Sums a vector over all copies. All of them call it.
    """
    # Half precision is rounded once: to the output, and to the gradient of x.
    dtype, x = x.dtype, x.to(accumulation_dtype(x.dtype))
    start = x.detach().sum(reduced_dims(x)) / max(1, values_per_channel(x))
    deviation, start = x - per_channel(start, x), in_float64(start)
    moments = moments_of(add(sums_of(deviation, start)))
    return normalized(deviation, weight, bias, denominator, moments, start).to(dtype), moments


def exact_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, denominator: Denominator, add: Add
) -> tuple[Tensor, Moments]:
    """Returns what `batch_norm` does, with all digits at any mean. It takes two sums."""
    with torch.no_grad():
        center = per_channel(batch_norm(x, weight, bias, denominator, add)[1].mean, x)
    y, (n, mean, var) = batch_norm(x - center, weight, bias, denominator, add)
    return y.to(x.dtype), Moments(n, mean + in_float64(center.flatten()), var)


def sums_of(deviation: Tensor, start: Tensor | float = 0.0) -> Tensor:
    """Returns n and the sums of x and x^2, ``(1 + 2 C,)`` in float64, given x - start."""
    dims, n = reduced_dims(deviation), values_per_channel(deviation)
    # The derivative of `square` would keep one more tensor of this size for the next derivative.
    sums = deviation.sum(dims), (deviation * deviation).sum(dims)
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
    deviation: Tensor,
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
    return deviation * per_channel(scale, deviation) + per_channel(shift, deviation)


def differentiable_gradients(
    needs: Sequence[bool],
    batch: KernelMoments,
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    weight: Tensor | None,
    add: Add = lambda sums: sums,
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and shards that are needed, with their derivatives.

    Args:
        needs: Whether to return the gradients of weight, bias, and each of the shards.
        batch: The moments of the batch.
        dys: The gradients of the outputs.
        xs: The shards that this process has.
        weight: ``(C,)``, or None.
        add: Sums over the shards of other processes.
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
        deviations = [x - per_channel(batch.mean, x) for x in xs]
        # On the device of the first sum: the CPU, where devices have no float64.
        sums = [sums_of(deviation) for deviation in deviations]
        total = reduce(torch.add, [each.to(sums[0].device) for each in sums])
        moments = moments_of(add(total))
        ys = [normalized(each, weight, bias, denominator, moments) for each in deviations]
        dys = [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)]
    inputs = [t for t, need in zip((weight, bias, *xs), needs, strict=True) if need]
    grads = iter(torch.autograd.grad(ys, inputs, dys, create_graph=torch.is_grad_enabled()))
    return [next(grads) if need else None for need in needs]


# -- the sum over processes, as `torch.compile` can see it -------------------------------------

# What exchanges values outside of a compiled graph cuts the graph in two. A network would fall
# apart into about as many graphs as it has layers, and take longer compiled than not. For a sum
# torch has an operator that stays in the graph.


def add_in_graph(name: str, tag: Tensor, tensor: Tensor) -> Tensor:
    """Returns the sum of a vector over the ranks of a group, given its name in operators."""
    added: Any = partial(_add_tagged, name, tag)
    return WithDerivative.apply(added, added, tensor)  # type: ignore[no-any-return, no-untyped-call]


def _add_tagged(name: str, tag: Tensor, tensor: Tensor) -> Tensor:
    # The compiler makes one collective of two that sum the same expression, perhaps on one rank
    # only, where two layers have the same input. So each sum also has a tag: one value of a buffer
    # of its layer, which each call changes. In backward the calls of one layer have the same tag,
    # but gradients that depend on different sums.
    collectives = torch.ops._c10d_functional
    tagged = torch.cat((tensor, in_float64(tag)))
    return collectives.wait_tensor(collectives.all_reduce(tagged, "sum", name))[: len(tensor)]  # type: ignore[no-any-return]
