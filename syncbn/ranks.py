"""A call of a layer in one of several processes, from top to bottom.

    x  ──▶ moments of the shard ──▶ gathered ──▶ moments of the batch ──▶ y
    dy ──▶ two sums of the shard ──▶ summed ──▶ dx

Forward, each rank gathers one vector of all ranks: how many values per channel a rank has, their
mean, and how far they spread. Backward, the ranks add one vector: the sums of dy, and of
dy * (x - mean). Everything else is on one shard: the five kernels, in one autograd node that saves
x and vectors of length C. Where gradients need derivatives of their own, the backward computes the
output once more, by the textbook. All ranks take part in that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched
from replication.errors import ReplicationError
from replication.groups.base import Signature
from replication.groups.comparison import debugging_advice
from replication.groups.processes import ProcessGroup
from syncbn.channels import HALF, constant_tensor, in_dtype, in_format_of
from syncbn.kernels import TINY, Kernels
from syncbn.statistics import CountBatch, LayerCall, check_count
from syncbn.textbook import gradients


def normalized_in_rank(
    call: LayerCall, group: ProcessGroup, kernels: Kernels, count_batch: CountBatch
) -> Tensor:
    """Normalizes the shard of this rank with the moments of the whole batch."""
    x, weight, bias, (eps, _) = call
    if x.dtype in HALF:
        weight = weight if weight is None else weight.float()
        bias = bias if bias is None else bias.float()
    return _normalize(x, weight, bias, Ranks(group, call), kernels, eps, count_batch)  # type: ignore[no-any-return]


class Normalize(Function):
    """The usual call: five kernels and two collectives."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        ranks: Ranks,
        kernels: Kernels,
        eps: float,
        count_batch: CountBatch,
    ) -> Tensor:
        own = kernels.measured(x, eps)
        n, counts, means, inverses = ranks.gathered(own.n, own.mean, own.inverse)
        check_count(n, x)  # on every rank
        batch = kernels.merged(x, own, n, counts, means, inverses, count_batch)
        ctx.ranks, ctx.kernels, ctx.batch = ranks, kernels, batch
        ctx.save_for_backward(x, weight)
        return kernels.normalized(x, weight, bias, batch)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Without a gradient dy is zeros, because the other ranks wait for the sums of this one.
        (x, weight), kernels, batch = ctx.saved_tensors, ctx.kernels, ctx.batch
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_batched(dy):
            needs, add = [needs_dweight, needs_dbias, needs_dx], ctx.ranks.group.all_reduce
            dweight, dbias, dx = gradients(needs, batch, [dy], [x], weight, add)
            return dx, dweight, dbias, None, None, None, None
        dy = in_format_of(dy, x)
        sum_dy, sum_dy_xmu, dweight, dbias = kernels.reduced(dy, x, batch, weight)
        dx = None
        if needs_dx:
            sums = ctx.ranks.summed(sum_dy, sum_dy_xmu)
            dx = kernels.gradient(dy, x, batch, weight, sums)
        return dx, dweight, dbias if needs_dbias else None, None, None, None, None


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Any = super(Function, Normalize).apply


class Ranks:
    """The two collectives of a call."""

    #: The number of values per channel of this rank, ``(1,)``, in the dtype that ranks exchange.
    #: `gathered` sets it.
    _count: Tensor

    def __init__(self, group: ProcessGroup, call: LayerCall) -> None:
        x = call.x
        requires_grad = torch.is_grad_enabled() and x.requires_grad
        self.group = group
        self._forward, self._backward = _calls(
            call.denominator.eps, x.dtype, x.size(1), requires_grad
        )

    def gathered(self, n: Any, mean: Tensor, spread: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Returns n of the whole batch, and of all ranks: counts, ``(size,)``, means and spreads.

        A count of 0 is tiny (see `TINY`). Where reading counts would block the host, n is the
        counts in int32, not their sum. Spreads are variances or inverse deviations.
        """
        count = constant_tensor((n or TINY[mean.dtype],), mean.device, mean.dtype)
        self._count, vectors = count, (count, mean, spread)
        counts, means, spreads = self.group.gather_vectors(self._forward, *vectors)
        counts = counts.view(-1)
        total = self._total(counts.tolist()) if counts.is_cpu else counts.to(torch.int32)
        return total, counts, means, spreads

    def _total(self, counts: Sequence[float]) -> int:
        """Returns the sum of the counts that ranks announce, after a check."""
        for rank, count in enumerate(counts):
            # NaN is refused as well, and more than float64 can count.
            if count != TINY[torch.float64] and not (0 < count < 2**53 and count % 1 == 0):
                raise ReplicationError(
                    f"{self.group.where}: rank {rank} announces {count} values per channel; "
                    f"is a layer in eval() on some ranks?{debugging_advice()}"
                )
        return round(sum(counts))

    def summed(self, *sums: Tensor) -> Sequence[Tensor]:
        """Adds the two vectors of all ranks."""
        # On the CPU as many values as in a forward, so that ranks can name one that meets it.
        vectors = (self._count, *sums) if self._count.is_cpu else sums
        vector = in_dtype(torch.cat(vectors), self._count.dtype)
        total = in_dtype(self.group.sum_vector(self._backward, vector), sums[0].dtype)
        return total.split_with_sizes([len(each) for each in vectors])[-2:]


@lru_cache(maxsize=1024)
def _calls(
    eps: float, dtype: torch.dtype, channels: int, requires_grad: bool
) -> tuple[Signature, Signature]:
    """What must match on all ranks, forward and backward."""
    # What ranks exchange depends on eps.
    name, layouts = f"batch_norm(eps={float(eps)})", ((dtype, (channels,)),)
    return Signature(name, layouts, requires_grad), Signature(
        "batch_norm_backward", layouts, requires_grad
    )
