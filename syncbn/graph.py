"""The joined autograd graph of synchronized batch normalization.

    replica i:  x_i ──▶ (1) Moments ──▶ z_i (alias of x_i), moments_i
                                         │                     └─── message to the merging replica
    merging replica:                     │  (2) Merge: all moments ──▶ merged_i, one per replica
                                         ▼                                └─── reply
    replica i:                       (3) Normalize(z_i, merged_i, weight, bias) ──▶ y_i

Backward is the same graph read backwards. No thread waits in it: the engine runs (3) for each
replica, (2) once, (1) for each replica. A queue or a barrier there would deadlock, because the
engine runs all nodes of the CPU on one thread.

Two kinds of values run backwards, each along edges of its own, so that any number of backwards
of one graph may be under way at once, of either kind:

Fast edges
    In the usual backward (3) hands (1) what its one pass needs: ``dy``, ``x`` and the scale
    w * s, with s = 1 / sqrt(denominator). (3) gives (2) the derivatives by the merged moments,
        dmean = -w * s * sum(dy),  dvar = -w * s^2 / 2 * sum(dy * x_hat)
    (2) adds them over all replicas and hands each (1) the totals, and (1) computes
        dx = w * s * dy + 2 * dvar / n * (x - mean) + dmean / n
    (Ioffe & Szegedy, arXiv:1502.03167, section 3, solved for dx). The outputs of (1) that these
    values come back to (z, carrier, scale, totals) exist for this alone: they are used once each,
    by (3) or (2), so the engine never adds anything to them.

Exact edges
    With ``create_graph=True`` the three nodes return true derivatives, in differentiable
    operations: (3) directly to x, (2) to the moments. The graph of a second derivative ends in
    the same edges, which may then carry true derivatives beside the values of the fast ones.

Saved for backward: x_i, once, by (1), and vectors of length C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched
from replication.groups.replicas import ordinary
from syncbn import channels, kernels
from syncbn import moments as statistics

__all__: list[str] = []


class Denominator(NamedTuple):
    """The square of the divisor: ``var + eps``, or ``max(var, eps)`` in clamp mode."""

    eps: float
    clamps: bool = False

    def of(self, var: Tensor) -> Tensor:
        """Returns the denominator for a variance."""
        return self.clamped(var) + self.added

    def clamped(self, var: Tensor) -> Tensor:
        """Returns the variance, clamped if the mode says so, without `added`."""
        return var.clamp(min=self.eps) if self.clamps else var

    @property
    def added(self) -> float:
        """The constant that is added to the result of `clamped`."""
        return 0.0 if self.clamps else self.eps

    def slope(self, var: Tensor) -> Tensor:
        """Returns the derivative of the denominator by ``var``: 0 or 1."""
        return (var >= self.eps).to(var.dtype) if self.clamps else torch.ones_like(var)


class BatchContext:
    """State that the nodes of one call share across all replicas."""

    def __init__(self, total: int | Tensor) -> None:
        #: Values per channel in the whole batch; a tensor where the host should not wait for it.
        self.total = total


class ReplicaContext:
    """State that one replica's nodes share: (3) sets it, and the backward of (1) reads it."""

    batch: BatchContext
    center: kernels.Center


class LocalMoments(NamedTuple):
    """The message of a replica: its values per channel, and their ``(2, C)`` moments."""

    values: int
    moments: Tensor
    #: Its edge carries the totals of a fast backward. Its values are not used.
    totals: Tensor


class GlobalMoments(NamedTuple):
    """The reply: the ``(2, C)`` moments of the whole batch; None below 2 values per channel."""

    batch: BatchContext
    moments: Tensor | None
    #: See `syncbn.moments.has_large_mean`.
    has_large_mean: bool = True


def merge_shards(messages: Sequence[LocalMoments]) -> list[GlobalMoments]:
    """Merges the moments of all replicas, in replica order, into a reply to each."""
    batch = BatchContext(sum(message.values for message in messages))
    if batch.total < 2:
        return [GlobalMoments(batch, None)] * len(messages)
    counts = [message.values for message in messages]
    tensors = [ordinary(message.moments) for message in messages]
    tensors += [ordinary(message.totals) for message in messages]
    merged = Merge.apply(counts, *tensors)  # type: ignore[no-untyped-call]
    is_large = statistics.has_large_mean(merged[0].detach())
    return [GlobalMoments(batch, moments, is_large) for moments in merged]


class PendingCall(NamedTuple):
    """A replica's call between (1) and (3), waiting for the moments of the whole batch."""

    replica: ReplicaContext
    #: The outputs z, carrier and scale of (1), whose edges lead from (3) back to (1).
    fast: tuple[Tensor, Tensor, Tensor]
    message: LocalMoments


def begin(x: Tensor) -> PendingCall:
    """Runs (1) on a shard, which gives the message to send."""
    replica = ReplicaContext()
    *fast, moments, totals = Moments.apply(replica, x)  # type: ignore[no-untyped-call]
    return PendingCall(
        replica, tuple(fast), LocalMoments(channels.values_per_channel(x), moments, totals)
    )


def finish(
    pending: PendingCall,
    reply: GlobalMoments,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    denominator: Denominator,
) -> Tensor:
    """Runs (3), which gives the output of a shard.

    Raises:
        ValueError: The whole batch has one value per channel.
    """
    replica = pending.replica
    replica.batch = reply.batch
    if reply.moments is None:
        return output_without_moments(reply, x, weight, bias)
    mean = reply.moments[0].detach()
    replica.center = kernels.center_of(mean, x, reply.has_large_mean)
    return Normalize.apply(  # type: ignore[no-any-return, no-untyped-call]
        replica, denominator, x, *pending.fast, reply.moments, weight, bias
    )


def output_without_moments(
    reply: GlobalMoments, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Returns the output for a batch with fewer than 2 values per channel: empty, if it has none.

    Raises:
        ValueError: The whole batch has one value per channel.
    """
    if reply.batch.total:
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} on "
            f"this replica and {reply.batch.total} value per channel in all of its group; take a "
            "larger batch, or call the layer in eval()"
        )
    # No replica has data. torch defines the result.
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)


def synchronized_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    denominator: Denominator,
    exchange: Callable[[LocalMoments], GlobalMoments],
) -> tuple[Tensor, GlobalMoments]:
    """Normalizes ``x`` with the moments of the whole batch.

    Args:
        x: ``(N, C, ...)``, this replica's shard; may be empty.
        weight: ``(C,)`` or None.
        bias: ``(C,)`` or None.
        denominator: How ``eps`` enters.
        exchange: Sends this replica's `LocalMoments` and returns the `GlobalMoments`.

    Returns:
        The output, in the layout of ``x``, and the reply.

    Raises:
        ValueError: The whole batch has one value per channel.
    """
    pending = begin(x)
    reply = exchange(pending.message)
    return finish(pending, reply, x, weight, bias, denominator), reply


class Moments(Function):
    """(1) Computes the moments of a shard; its backward computes the input gradient."""

    @staticmethod
    def forward(ctx: Any, replica: ReplicaContext, x: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.replica = replica
        moments = statistics.moments(x)
        return (
            x.view_as(x),
            x.view_as(x),
            moments.new_empty(moments.size(1)),
            moments,
            torch.empty_like(moments),
        )

    @staticmethod
    def backward(
        ctx: Any,
        dy: Tensor | None,
        x: Tensor | None,
        scale: Tensor | None,
        dmoments: Tensor | None,
        totals: Tensor | None,
    ) -> tuple[None, Tensor | None]:
        dx: Tensor | None = None
        if dy is None and dmoments is None and totals is None:
            return None, None  # called by the engine without any gradient
        if x is None:  # this replica's output is unused, so (3) has not run
            (x,) = ctx.saved_tensors
        if dy is not None or totals is not None:
            replica: ReplicaContext = ctx.replica
            if totals is None:
                totals = torch.zeros_like(replica.center.head).expand(2, -1)
            dmean, dvar = totals / replica.batch.total
            dx = kernels.input_gradient(dy, x, replica.center, scale, 2 * dvar, dmean)
        if dmoments is not None:
            exact = _moments_derivative(x, dmoments)
            dx = exact if dx is None else dx + exact
        return None, dx


def _moments_derivative(x: Tensor, dmoments: Tensor) -> Tensor:
    """Returns the derivative of the moments of x by x."""
    # Without any values the result is empty, but still depends on dmoments: between processes the
    # second derivative is a collective, in which this rank must take part.
    n = max(channels.values_per_channel(x), 1)
    dmean, dvar = (channels.per_channel(d, x) for d in dmoments / n)
    dims = channels.reduced_dims(x)
    centered = x.to(channels.accumulation_dtype(x.dtype))
    # Twice: the second pass removes the rounding error of a large mean.
    centered = centered - centered.detach().mean(dims, keepdim=True)
    centered = centered - centered.mean(dims, keepdim=True)
    return (dmean + 2 * dvar * centered).to(x.dtype)


class Merge(Function):
    """(2) Merges the moments of all replicas; in backward adds derivatives, in replica order.

    Its inputs are the moments of all replicas, then their `LocalMoments.totals`.
    """

    @staticmethod
    def forward(ctx: Any, counts: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        moments = tensors[: len(counts)]
        ctx.save_for_backward(*moments)
        ctx.counts = counts
        merged = statistics.merge(*stacked(counts, moments))
        return tuple(merged.to(m.device, copy=True) for m in moments)

    @staticmethod
    def backward(ctx: Any, *sums: Tensor | None) -> tuple[Tensor | None, ...]:
        moments = ctx.saved_tensors
        home, n = moments[0].device, len(moments)
        present = [s.to(home) for s in sums if s is not None]
        if not present:
            return (None,) * (1 + 2 * n)
        total = torch.stack(present).sum(0)
        exact = needs_true_derivatives(total)
        grads = _merge_derivative(ctx.counts, moments, total) if exact else [total] * n
        along = [
            grad.to(m.device) if needed else None
            for grad, m, needed in zip(
                grads, moments, ctx.needs_input_grad[1 : n + 1], strict=True
            )
        ]
        nothing = [None] * n
        return (None, *along, *nothing) if exact else (None, *nothing, *along)


def needs_true_derivatives(grad: Tensor) -> bool:
    """Returns whether this backward builds a graph or computes batched gradients.

    Batched gradients (``is_grads_batched``) do not support in-place operations.
    """
    return torch.is_grad_enabled() or is_batched(grad)


def stacked(counts: list[int], moments: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the arguments of `syncbn.moments.merge` for some replicas, on one device."""
    home, total = moments[0].device, sum(counts)
    stats = torch.stack([m.to(home) for m in moments])
    share = torch.tensor([[[count / total]] for count in counts], dtype=stats.dtype)
    return share.to(home, non_blocking=True), stats  # a GPU's host does not wait for a few bytes


def _merge_derivative(
    counts: list[int], moments: Sequence[Tensor], grad: Tensor
) -> Sequence[Tensor]:
    share, stats = stacked(counts, moments)
    share, means = share[:, 0], stats[:, 0]
    mean = (share * means).sum(0)
    dmean, dvar = grad
    # The terms through the merged mean cancel.
    return torch.stack((share * (dmean + 2 * dvar * (means - mean)), share * dvar), 1).unbind(0)


class Normalize(Function):
    """(3) Normalizes a shard; its backward computes the gradients of parameters and moments.

    It uses only the edges of its inputs z, carrier and scale, not their values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replica: ReplicaContext,
        denominator: Denominator,
        x: Tensor,
        z: Tensor,
        carrier: Tensor,
        scale: Tensor,
        merged: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.replica, ctx.denominator = replica, denominator
        ctx.options = [None if p is None else (p.device, p.dtype) for p in (weight, bias)]
        # (1) has saved x, unless x needs no gradient, and the backward reads it from there: saving
        # it twice would run hooks on saved tensors (which may copy them to the CPU) twice.
        ctx.moments = z.grad_fn
        ctx.save_for_backward(merged, weight, None if z.requires_grad else x)
        return kernels.normalize(
            x, replica.center, denominator.clamped(merged[1]), denominator.added, weight, bias
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 9
        merged, weight, x = ctx.saved_tensors
        if x is None:
            (x,) = ctx.moments.saved_tensors
        dx = along_z = scale = None
        if needs_true_derivatives(dy):
            derivative = _normalize_derivative(dy, x, merged, weight, ctx.denominator)
            dx, dmerged, dweight, dbias = derivative
        else:
            var, eps = ctx.denominator.clamped(merged[1]), ctx.denominator.added
            dweight, dbias = kernels.reduce(dy, x, ctx.replica.center, var, eps)
            inverse = (var + eps).rsqrt()
            scale = _times(inverse, weight)
            dmerged = torch.stack((dbias, dweight)).to(merged).mul_(scale)
            dmerged = moment_gradients(dmerged, inverse, merged[1], ctx.denominator)
            along_z = dy
        of_weight, of_bias = ctx.options
        return (
            None,
            None,
            dx,
            along_z,
            x,  # so that (1) does not unpack it once more: activation checkpoints forbid that
            scale,
            dmerged,
            None if of_weight is None else dweight.to(*of_weight),
            None if of_bias is None else dbias.to(*of_bias),
        )


def moment_gradients(
    sums: Tensor, inverse: Tensor, var: Tensor, denominator: Denominator
) -> Tensor:
    """Converts the sums of ``scale * dy`` and ``scale * dy * x_hat``, in place, to the derivatives
    by mean and variance."""
    sums.neg_()
    sums[1].mul_(inverse).mul_(0.5)
    if denominator.clamps:  # a clamped variance has no derivative
        sums[1].mul_(denominator.slope(var))
    return sums


def _times(statistics: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the product, on the device of the statistics."""
    return statistics if weight is None else statistics * weight.to(statistics.device)


def _normalize_derivative(
    dy: Tensor, x: Tensor, merged: Tensor, weight: Tensor | None, denominator: Denominator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the derivatives by x, by the merged moments, by weight and by bias."""
    dims = channels.reduced_dims(x)
    mean, var = merged
    inverse = denominator.of(var).rsqrt()
    scale = _times(inverse, weight)
    dtype = channels.accumulation_dtype(x.dtype)
    dy = dy.to(dtype)
    head = mean.detach().to(dtype).to(mean)
    centered = x - channels.per_channel(head, x) - channels.per_channel(mean - head, x)
    dbias, along_x = (sums.to(mean.device) for sums in (dy.sum(dims), (dy * centered).sum(dims)))
    dweight = along_x * inverse
    dvar = -0.5 * dweight * scale * inverse * denominator.slope(var)
    return (
        (dy * channels.per_channel(scale, x)).to(x.dtype),
        torch.stack((-dbias * scale, dvar)),
        dweight,
        dbias,
    )
