"""One call of a synchronized layer between processes, as `torch.compile` can see it.

Problem: what exchanges values outside of a compiled graph cuts it in two. A network falls
apart into about as many graphs as it has layers, and takes longer compiled than not.

Idea: ranks exchange nothing but one sum, forward and backward, for which torch has an operator
that stays in the graph. Everything else is plain operations, which the compiler fuses and
differentiates. The sums are n, n * mean and n * (var + mean^2) in float64:

    var = sum(x^2) / n - mean^2 has lost log10(mean^2 / var) of the 16 digits of float64: 8 are
    left for a mean of 1e4 deviations, as many as the inputs have in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replication.groups.processes import Collective
from syncbn.channels import accumulation_dtype, in_float64, values_per_channel
from syncbn.formula import affine, affine_map
from syncbn.moments import moments_in_operations
from syncbn.statistics import CountBatch, LayerCall, Moments


def compiled_batch_norm(
    call: LayerCall, added: Callable[[Tensor], Tensor], count_batch: CountBatch
) -> Tensor:
    """Normalizes a shard with the moments of the batch. ``added`` sums over the ranks."""
    x = call.x.to(accumulation_dtype(call.x.dtype))
    batch = moments_of_sums(Collective.apply(added, added, _sums(x)))  # type: ignore[no-untyped-call]
    count_batch().update(batch)
    scale, shift = affine_map(call, batch)
    return affine(x, batch.mean, scale, shift, one_pass=False).to(call.x.dtype)


def _sums(x: Tensor) -> Tensor:
    """Returns n, the sum and the sum of squares of each channel in float64, ``(1 + 2 C,)``."""
    mean, var = moments_in_operations(x)
    # The product at the end: Inductor lets ranks add a `cat` in place, and would then read the sum
    # of the ranks where it needs an operand of the `cat` once more.
    return torch.cat((mean.new_ones(1), mean, var + mean.square())) * values_per_channel(x)


def moments_of_sums(sums: Tensor) -> Moments:
    """Returns the moments of a batch, 0 without values. Its count is a tensor, ``(1,)``."""
    n = sums[:1].detach()
    mean, square = (sums[1:] / n.clamp(min=1)).chunk(2)
    return Moments(n, mean, (square - mean.square()).clamp(min=0))


def sum_in_graph(name: str, tag: Tensor, tensor: Tensor) -> Tensor:
    """Returns the sum of a vector over the ranks of a group, given its name in operators."""
    # The compiler makes one collective of two that sum the same expression, perhaps on one rank
    # only, where two layers have the same input. So each sum also has a tag: one value of a buffer
    # of its layer, which each call changes. In backward the calls of one layer have the same tag,
    # but gradients that depend on different sums.
    collectives = torch.ops._c10d_functional
    tagged = torch.cat((tensor, in_float64(tag)))
    return collectives.wait_tensor(collectives.all_reduce(tagged, "sum", name))[: len(tensor)]  # type: ignore[no-any-return]
