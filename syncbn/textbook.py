"""The reference implementation, in plain operations: read this file first.

Each copy of a layer has a shard x of the batch, ``(N, C, ...)``. Shards may differ in N, which may
also be 0. Let ``add`` be a function that sums a vector over all copies. Then for each channel

    n, total, squares = add([n_own, sum(x), sum(x^2)])      one exchange of 1 + 2 C numbers
    mean = total / n
    var  = squares / n - mean^2
    y    = (x - mean) / sqrt(var + eps) * weight + bias

is batch normalization (Ioffe & Szegedy, "Batch Normalization: Accelerating Deep Network Training
by Reducing Internal Covariate Shift", 2015, algorithm 1) of the whole batch instead of the shard.

There is no backward in this file, because autograd derives it. What a copy adds changes the
results of all copies, so the derivative of ``add`` is again ``add``, of the gradients. Because of
it the two sums in the gradient of x (section 3 of the same paper) span the whole batch:

    dx = (dy - sum(dy) / n - (x - mean) * sum(dy * (x - mean)) / (n * (var + eps)))
         * weight / sqrt(var + eps)

This defines the results that the project guarantees. The fast paths (`syncbn.ranks` and
`syncbn.replicas`) compute the same with fewer operations. The reference itself runs wherever speed
is not the point:

- under `torch.compile`, because ``add`` can stay in the graph (see `add_in_graph`),
- if gradients need derivatives, in the backward of the fast paths (see
  `differentiable_gradients`),
- with a mask, in clamp mode, and on devices that lack the kernels of the fast paths (see
  `syncbn.by_textbook`).

What is exact
-------------
The formula for var subtracts two numbers that are nearly equal if the mean is large compared with
the standard deviation, and so loses log10(mean^2 / var) digits. There are two remedies:

1. Each copy first subtracts a constant from x, the pivot: the mean of its shard. The sums of
   x - pivot lose no digits. From them the sums of x follow in float64 (see `sums_of`), and these
   are what the copies add. At a mean of 1e4 standard deviations, for example, 8 of 16 digits are
   left, about as many as an input in float32 has. This is `batch_norm`, which takes one sum.
   Compiled calls use it.
2. To subtract the same constant from x on all copies does not change y. If the constant is the
   mean of the batch, the formula for var loses nothing, however large the mean is. But this mean
   is known only after another sum. This is `exact_batch_norm`, which takes two sums. Calls that
   are not compiled use it.

A backward knows the mean from forward, so it is exact with one sum.

The fast paths merge variances in another way (Chan, Golub & LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances", 1979):

    mean = sum_i n_i mean_i / n,    var = sum_i n_i (var_i + (mean_i - mean)^2) / n

where shard i has n_i values per channel. Nothing cancels here, so one exchange is exact at any
mean. But each copy needs the means of all others, so the copies gather them instead of adding,
while the reference asks for no more than a sum.

Empty shards
------------
No operation here is chosen by the size of a shard, so the graphs of all copies have the same
nodes. Otherwise the backward of a copy could leave out a sum that the others wait for.

Padding
-------
Values that do not count are replaced by zeros: in x - pivot, so that they add nothing to a sum,
and in y. The same happens to their gradients. They may be NaN, because nothing is multiplied by
zero. How many values count is a tensor, so shapes do not depend on it, and the host of an
accelerator waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from replication.extending import WithDerivative
from syncbn.channels import (
    accumulation_dtype,
    in_float64,
    per_channel,
    reduced_dims,
    values_per_channel,
)
from syncbn.statistics import Epsilon, KernelMoments, Moments

#: Sums a vector in float64, ``(1 + 2 C,)``, over all copies.
Add = Callable[[Tensor], Tensor]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: Epsilon,
    add: Add,
    padding: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Returns the output of a shard, and the moments of the batch. It takes one sum.

    Args:
        x: The shard, ``(N, C, ...)``, in any floating-point dtype. N may be 0.
        weight: ``(C,)``, or None for ones.
        bias: ``(C,)``, or None for zeros.
        epsilon: What keeps the variance above zero.
        add: Sums a vector over all copies. All of them call it.
        padding: ``(N, 1, ...)``, true where values do not count, or None if all do.
    """
    # Half precision is rounded once: to the output, and to the gradient of x.
    dtype, x = x.dtype, x.to(accumulation_dtype(x.dtype))
    n = count_of(x, padding)
    centered, pivot = centered_at_own_mean(x, n, padding)
    moments = moments_of(add(sums_of(centered, pivot, n)))
    y = normalized(centered, weight, bias, epsilon, moments, pivot)
    return without(y, padding).to(dtype), moments


def exact_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: Epsilon,
    add: Add,
    padding: Tensor | None = None,
    first_add: Add | None = None,
) -> tuple[Tensor, Moments]:
    """Returns what `batch_norm` does, with all digits at any mean. It takes two sums.

    The first, of 1 + C numbers, needs no derivative. ``first_add`` takes it, if it is given.
    """
    with torch.no_grad():
        n = count_of(x, padding)
        mean = own_mean(x.to(accumulation_dtype(x.dtype)), n, padding)
        total = (first_add or add)(torch.cat((mean.new_ones(1), mean)) * n)
        center = per_channel(total[1:] / total[:1].clamp(min=1), x)
    y, (n, mean, var) = batch_norm(x - center, weight, bias, epsilon, add, padding)
    return y.to(x.dtype), Moments(n, mean + in_float64(center.flatten()), var)


def without(x: Tensor, padding: Tensor | None) -> Tensor:
    """Returns x with zeros as padding."""
    # `masked_fill` would lose the memory format.
    return x if padding is None else torch.where(padding, x.new_zeros(()), x)


def count_of(x: Tensor, padding: Tensor | None) -> Any:
    """Returns how many values of a channel count: an int, or with padding a tensor, ``(1,)``."""
    if padding is None:
        return values_per_channel(x)
    return in_float64(padding.numel() - padding.sum()).view(1)


def at_least_one(n: Any) -> Any:
    return n.clamp(min=1) if isinstance(n, Tensor) else max(1, n)


def own_mean(x: Tensor, n: Any, padding: Tensor | None = None) -> Tensor:
    """Returns the mean of a shard, ``(C,)`` in float64, 0 without values. It has no derivative."""
    mean: Tensor = in_float64(without(x.detach(), padding).sum(reduced_dims(x))) / at_least_one(n)
    return mean


def centered_at_own_mean(
    x: Tensor, n: Any, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns x - pivot, and the pivot, ``(C,)`` in float64: the mean of the shard, rounded."""
    pivot = own_mean(x, n, padding).to(x.dtype)
    return without(x - per_channel(pivot, x), padding), in_float64(pivot)


def sums_of(centered: Tensor, pivot: Tensor | float = 0.0, n: Any = None) -> Tensor:
    """Returns n and the sums of x and x^2, ``(1 + 2 C,)`` in float64, given d = x - pivot."""
    dims, n = reduced_dims(centered), values_per_channel(centered) if n is None else n
    # The derivative of `square` would keep one more tensor of this size for the next derivative.
    sums = centered.sum(dims), (centered * centered).sum(dims)
    first, second = (in_float64(each) / at_least_one(n) for each in sums)
    # E[x] = E[d] + pivot, and E[x^2] = E[d^2] + pivot * (2 E[d] + pivot).
    mean = first + pivot
    # Multiplied last: Inductor may let ranks add a `cat` in place, and must not read it again.
    result: Tensor = torch.cat((mean.new_ones(1), mean, second + pivot * (first + mean))) * n
    return result


def moments_of(sums: Tensor) -> Moments:
    """Returns the moments of a batch, 0 without values. Its count is a tensor, ``(1,)``."""
    n = sums[:1].detach()
    mean, square = (sums[1:] / n.clamp(min=1)).chunk(2)
    return Moments(n, mean, (square - mean.square()).clamp(min=0))


def normalized(
    centered: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: Epsilon,
    moments: Moments,
    pivot: Tensor | float = 0.0,
) -> Tensor:
    """Returns the output of a shard, given x - pivot and the moments of the batch."""
    _, mean, var = moments
    scale = epsilon.regularized(var).rsqrt()
    if weight is not None:
        scale = scale * in_float64(weight).to(scale.device)
    shift = (pivot - mean) * scale
    if bias is not None:
        shift = shift + in_float64(bias).to(shift.device)
    return centered * per_channel(scale, centered) + per_channel(shift, centered)


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
    epsilon = Epsilon(batch.eps)
    with torch.enable_grad():
        # Views, because several replicas may have the same tensor.
        views: list[Any] = [t if t is None else t.view_as(t) for t in (weight, *xs)]
        weight, *xs = views
        if weight is not None:  # in which the shards add its gradient
            weight = weight.to(accumulation_dtype(weight.dtype))
        for x, need in zip(xs, needs[2:], strict=True):
            if need:  # perhaps only because parameters need one (see `Save` in `syncbn.replicas`)
                x.requires_grad_()
        bias = torch.zeros_like(batch.mean).requires_grad_()  # its value does not matter
        every_centered = [x - per_channel(batch.mean, x) for x in xs]
        # On the device of the first sum: the CPU, where devices have no float64.
        sums = [sums_of(centered) for centered in every_centered]
        total = reduce(torch.add, [each.to(sums[0].device) for each in sums])
        moments = moments_of(add(total))
        ys = [normalized(each, weight, bias, epsilon, moments) for each in every_centered]
        dys = [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=True)]
    inputs = [t for t, need in zip((weight, bias, *xs), needs, strict=True) if need]
    grads = iter(torch.autograd.grad(ys, inputs, dys, create_graph=True))
    return [next(grads) if need else None for need in needs]


# -- the sum over processes, as `torch.compile` can see it -------------------------------------

# A call outside the graph splits it. A network would become about as many graphs as it has layers,
# and run slower than uncompiled. But torch has an operator for a sum that stays in the graph.


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
