"""The fast path of ranks: a call of a layer in one of several processes, from top to bottom.

    x  ──▶ moments of the shard ──▶ gathered ──▶ moments of the batch ──▶ y
    dy ──▶ two sums of the shard ──▶ summed ──▶ dx

Forward, each rank gathers one vector from all ranks: how many values per channel a rank has, their
mean, and ``1 / sqrt(var + eps)``. Backward, the ranks add one vector: the sums of dy, and of
dy * (x - mean). Everything else concerns the shard of this rank alone, and is done by five kernels
(see `syncbn.kernels`), in one autograd node that saves x and vectors of length C. On accelerators
the host waits for nothing.

If gradients need derivatives, the backward computes the output once more by the reference
implementation (`syncbn.textbook`), with a sum over the ranks that has a derivative. All ranks take
part in it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication import ProcessGroup
from replication.extending import Signature, apply_of
from syncbn.channels import constant_tensor, in_format_of
from syncbn.kernels import Kernels, in_one_dtype
from syncbn.statistics import Arguments, CountBatch, KernelMoments, check_count
from syncbn.textbook import differentiable_gradients


def normalized_in_rank(
    arguments: Arguments, group: ProcessGroup, kernels: Kernels, count_batch: CountBatch
) -> Tensor:
    """Normalizes the shard of this rank with the moments of the whole batch."""
    group.refuse_exports()
    x, weight, bias, (eps, _) = arguments
    weight, bias = in_one_dtype(weight, bias)
    requires_grad = torch.is_grad_enabled() and x.requires_grad
    signatures = _signatures(eps, x.dtype, x.size(1), requires_grad)
    return _normalized(x, weight, bias, group, signatures, kernels, eps, count_batch)  # type: ignore[no-any-return]


class NormalizeRank(Function):
    """The five kernels and the two collectives of a call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        group: ProcessGroup,
        signatures: tuple[Signature, Signature],
        kernels: Kernels,
        eps: float,
        count_batch: CountBatch,
    ) -> Tensor:
        own = kernels.measure(x, eps)
        # The kernels divide by counts, so an empty shard counts as the least positive number.
        dtype = own.mean.dtype
        count = constant_tensor((own.n or torch.finfo(dtype).tiny,), x.device, dtype)
        counts, means, inverses = group.gather(signatures[0], count, own.mean, own.inverse)
        counts = counts.squeeze(1)
        # On accelerators, reading the counts would block the host.
        n = round(sum(counts.tolist())) if kernels.are_on_host else None
        check_count(n, x)  # on every rank
        args = x, own, n, counts, means, inverses, count_batch()
        mean, inverse = kernels.merge_moments(*args)
        batch = KernelMoments(n, mean, inverse, eps, counts.int() if n is None else None)
        ctx.call = group, signatures[1], kernels, batch
        ctx.save_for_backward(x, weight)
        return kernels.normalize(x, weight, bias, batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # If no gradient comes, dy is zeros, because the other ranks wait for the sums of this one.
        (x, weight), (group, signature, kernels, batch) = ctx.saved_tensors, ctx.call
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # the gradients need derivatives
            # Another call than the one below, since what the ranks exchange is another vector.
            signature = signature._replace(name="batch_norm_backward(create_graph=True)")
            needs, add = [needs_dweight, needs_dbias, needs_dx], partial(group.sum, signature)
            dweight, dbias, dx = differentiable_gradients(needs, batch, [dy], [x], weight, add)
            return dx, dweight, dbias, None, None, None, None, None
        dy, dx = in_format_of(dy, x), None
        sum_dy, sum_dy_xmu, dweight, dbias = kernels.reduce_gradient(dy, x, batch, weight)
        if needs_dx:
            totals = group.add(signature, sum_dy, sum_dy_xmu)
            dx = kernels.gradient(dy, x, batch, weight, totals)
        return dx, dweight, dbias if needs_dbias else None, None, None, None, None, None


_normalized = apply_of(NormalizeRank)


@lru_cache(maxsize=1024)
def _signatures(
    eps: float, dtype: torch.dtype, channels: int, requires_grad: bool
) -> tuple[Signature, Signature]:
    """What must match on all ranks, forward and backward."""
    # What ranks exchange depends on eps.
    name, layouts = f"batch_norm(eps={float(eps)})", ((dtype, (channels,)),)
    return Signature(name, layouts, requires_grad), Signature(
        "batch_norm_backward", layouts, requires_grad
    )
