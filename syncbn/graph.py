"""The joined autograd graph of synchronized batch normalization.

    replica i:  x_i ──▶ (1) Moments ──▶ z_i, carrier_i (aliases of x_i), local_i, totals_i
                                         │                     └─── with the message
    merging replica:                     │  (2) Merge ──▶ global_i, sums_i, one of each per replica
                                         ▼                     └─── with the reply
    replica i:                       (3) Normalize(x_i, z_i, carrier_i, global_i, sums_i) ──▶ y_i

Numbers do not flow along the graph: a message holds the moments of a shard, a reply the statistics
of the whole batch, as plain tensors. The outputs of (1) and (2) only connect the nodes, so that
gradients flow. Backward is the same graph read backwards. No thread waits in it: the engine runs
(3) for each replica, (2) once, (1) for each replica. A queue or a barrier there would deadlock,
because the engine runs all nodes of the CPU on one thread.

Gradients travel back in two forms, each along its own edges. So several backwards of one graph, of
either form, may run at the same time:

Fast edges (z, carrier, sums, totals)
    In the usual backward (3) hands (1) ``dy`` and ``x``, along z and the carrier, and hands (2)
    two sums over its shard. (2) adds them over all replicas and hands each (1) the totals, from
    which (1) computes dx (see `syncbn.kernels.Kernels.input_gradient`). These outputs are used
    once each, so the engine never adds anything to the values.

Exact edges (x, global, local)
    With ``create_graph=True`` the three nodes return true derivatives, in differentiable
    operations. (3) returns the direct derivative with respect to x, and to (2) the derivative with
    respect to mean and variance of the batch. (2) hands each (1) the derivative with respect to x
    along these, as a linear function of x. The graph of a second derivative ends in the edges x
    and global.

Saved for backward: x_i, once, by (1), and vectors of length C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import (
    direct_apply,
    in_functorch_transform,
    is_batched,
    sees_saved_tensors,
)
from replication.devices import current_streams, use_streams
from syncbn.channels import (
    accumulation_dtype,
    per_channel,
    reduced_dims,
)
from syncbn.kernels import Statistics
from syncbn.merge import MEDIUM, SMALL, CountBatch, Denominator, Shard, merge_moments

__all__: list[str] = []


#: The message of a replica: its `Shard`, and the outputs local and totals of (1).
#: A plain tuple, because making one takes no Python call.
Message = tuple[Shard, Tensor, Tensor]

#: The reply to a replica: values per channel and statistics of the whole batch, and the
#: outputs global and sums of (2). The last two are None for fewer than 2 values.
Reply = tuple[int | Tensor, Statistics | None, tuple[Tensor, Tensor] | None]


def synchronized_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    denominator: Denominator,
    exchange: Callable[[Message], Reply],
) -> Tensor:
    """Normalizes a shard ``(N, C, ...)``, maybe empty, with the moments of the whole batch.

    ``exchange`` sends this replica's message and returns the reply. The output has the layout of
    ``x``.
    """
    if in_functorch_transform():
        raise RuntimeError(
            "torch.func transforms do not reach the other copies of a synchronized layer, so "
            "their derivatives would be lost; transform a function that calls the whole model"
        )
    shard = Shard(x, weight, denominator)
    if weight is not None and weight.dtype != shard.dtype:
        shard.weight = weight = weight.to(shard.dtype)
    if bias is not None and bias.dtype != shard.dtype:
        bias = bias.to(shard.dtype)
    if (
        shard.kernels.measures_small_shards_together
        # Values without further dimensions are added one by one in float32, too coarse for many.
        and 0 < x.numel() <= (MEDIUM if x.shape[2:].numel() > 1 else SMALL)
        and x.dtype == torch.float32
        and x.is_contiguous()
        and torch.is_grad_enabled()
        and not sees_saved_tensors()  # an activation checkpoint needs the moments of the shard
    ):
        shard.unmeasured = x.detach()
    z, carrier, local, totals = _moments(shard, x)
    total, batch, edges = exchange((shard, local, totals))
    if batch is None or edges is None:
        return _output_below_two_values(total, x, weight, bias)
    shard.batch = batch
    return _normalize(shard, x, z, carrier, *edges, weight, bias)  # type: ignore[no-any-return]


def _output_below_two_values(
    total: int | Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Returns the empty output for a batch without values; one value per channel is an error."""
    if total:
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} on "
            f"this replica and {total} value per channel in all of its group; take a larger "
            "batch, or call the layer in eval()"
        )
    # No replica has data. torch defines the result.
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)


def merge_shards(
    messages: Sequence[Message], count_batch: CountBatch | None = None
) -> list[Reply]:
    """Merges the moments of all replicas, in replica order, into a reply to each.

    ``count_batch`` is None in a recomputation, which must not update running statistics.
    """
    shards, local, totals = zip(*messages, strict=True)
    total = sum(map(attrgetter("values"), shards))
    running = None if count_batch is None or total == 1 else count_batch()
    if total < 2:  # of 1 value the forward raises
        return [(total, None, None)] * len(shards)
    batches = merge_moments(shards, total, running)
    streams = current_streams(map(attrgetter("device"), shards))
    for shard, batch in zip(shards, batches, strict=True):
        shard.batch, shard.unmeasured, shard.streams = batch, None, streams
    outputs = _merge(shards, *local, *totals)
    n = len(shards)
    pairs = zip(outputs[:n], outputs[n:], strict=True)
    return list(zip([total] * n, batches, pairs, strict=True))


class Moments(Function):
    """(1) Computes the moments of a shard; its backward computes the input gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, x: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.shard = shard
        if shard.unmeasured is None:
            shard.moments = shard.kernels.moments(x, shard.denominator.eps)
        elif x.numel() > SMALL:  # here, where the replicas run in parallel
            shard.rounded()
        local = x.new_empty(3, x.size(1), dtype=shard.dtype)
        totals = local.new_empty(2, x.size(1))
        return x, x, local, totals  # torch makes an alias of x for each

    @staticmethod
    def backward(
        ctx: Any,
        dy: Tensor | None,
        x: Tensor | None,
        exact: Tensor | None,
        rows: Tensor | None,
    ) -> tuple[None, Tensor | None]:
        if dy is None and exact is None and rows is None:
            return None, None  # called by the engine without any gradient
        if x is None:  # this replica's output is unused, so (3) has not run
            (x,) = ctx.saved_tensors
        shard: Shard = ctx.shard
        dx = None
        if dy is not None or rows is not None:
            if rows is None:
                rows = shard.batch.mean.new_zeros(2, x.size(1))
            dx = (
                shard.kernels.input_gradient(dy, x, shard.batch, shard.weight, rows)
                if shard.values
                else torch.empty_like(x)
            )
        if exact is not None:
            shift, slope, center = (per_channel(row, x) for row in exact)
            along = shift + slope * (x - center)
            dx = along.to(x.dtype) if dx is None else dx + along.to(x.dtype)
        return None, dx


class Merge(Function):
    """(2) Connects the replicas; in backward adds what each of them sends, in replica order.

    Its inputs are local of all replicas, then totals; its outputs global, then sums.
    """

    @staticmethod
    def forward(ctx: Any, shards: Sequence[Shard], *edges: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shards = shards
        outputs = [edge.new_empty(2, edge.size(1)) for edge in edges]
        ctx.save_for_backward(outputs[0])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shards: Sequence[Shard] = ctx.shards
        n = len(shards)
        with use_streams(shards[0].streams):
            exact = added(grads[:n])
            derivatives: list[Tensor | None] = [None] * n
            if exact is not None:
                derivative = merge_derivative(exact, shards[0], *ctx.saved_tensors)
                derivatives = [derivative.to(shard.device) for shard in shards]
            return None, *derivatives, *merged_rows(shards, grads[n:])


def merged_rows(shards: Sequence[Shard], sums: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the result of `Kernels.rows` for each shard, given the sums over each shard."""
    totals = added(sums)
    if totals is None:
        return [None] * len(shards)
    # First the shards that have sent sums, because these know the weight of the forward.
    return rows_of(shards, totals, sorted(range(len(shards)), key=lambda i: sums[i] is None))


def rows_of(
    shards: Sequence[Shard], totals: Tensor, order: Iterable[int] | None = None
) -> list[Tensor | None]:
    """Returns the result of `Kernels.rows` for each shard, given the sums over all shards."""
    rows: list[Tensor | None] = [None] * len(shards)
    made: dict[int, Tensor] = {}  # usually all replicas share one `Statistics`
    for i in order or range(len(shards)):
        key = id(shards[i].batch)
        if key not in made:
            made[key] = shards[i].rows(totals)
        rows[i] = made[key]
    return rows


def added(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the sum of all that are not None, in order, on the device of the first."""
    present = [grad for grad in grads if grad is not None]
    if len(present) > 3:  # two kernels for any number
        return torch.stack([grad.to(present[0].device) for grad in present]).sum(0)
    if not present:
        return None
    total, *others = present
    for grad in others:
        total = total + grad.to(total.device)
    return total


class Normalize(Function):
    """(3) Normalizes a shard; its backward computes the gradients of parameters and moments.

    It uses only the edges of its inputs z, carrier, edge and sums, not their values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shard: Shard,
        x: Tensor,
        z: Tensor,
        carrier: Tensor,
        edge: Tensor,
        sums: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shard = shard
        # (1) has saved x, unless x needs no gradient, and the backward reads it from there: saving
        # it twice would run hooks on saved tensors (which may copy them to the CPU) twice.
        ctx.moments = z.grad_fn
        ctx.save_for_backward(edge, weight, None if z.requires_grad else x)
        if not shard.values:
            return torch.empty_like(x)
        return shard.kernels.normalize(x, shard.batch, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 8
        shard: Shard = ctx.shard
        # (1) always receives x from here, because activation checkpoints forbid that it unpacks x
        # once more.
        needs_dweight, needs_dbias = ctx.needs_input_grad[6:]
        edge, weight, x = ctx.saved_tensors
        if x is None:
            (x,) = ctx.moments.saved_tensors
        if needs_true_derivatives(dy) or shard.batch.messages_differ:
            with use_streams(shard.streams):  # mean and variance may be on another device
                dx, dedge, dweight, dbias = _normalize_derivative(dy, x, edge, weight, shard)
            return None, dx, None, x, dedge, None, dweight, dbias if needs_dbias else None
        if shard.values:
            sums, dweight, dbias = shard.kernels.reduce(dy, x, shard.batch, weight)
        else:
            dbias, dweight = sums = torch.zeros_like(edge)
        if weight is not None:
            # An optimizer may step inside this backward, before (1) and (2) need the weight.
            shard.weight = weight.clone()
            if shard.batch.weights_differ:
                sums = sums * weight
        if shard.denominator.clamps:  # a clamped variance has no derivative
            with use_streams(shard.streams):  # as above
                _, var = shard.moments_of(shard.batch)
                sums[1].mul_(shard.denominator.slope(var).to(sums))
        return (
            *(None, None, dy),
            x,
            *(None, sums),
            dweight if needs_dweight else None,
            dbias if needs_dbias else None,
        )


# Functions of the graph, without the calls in Python that `Function.apply` makes.
_moments, _merge, _normalize = map(direct_apply, (Moments, Merge, Normalize))


def needs_true_derivatives(grad: Tensor) -> bool:
    """Returns whether this backward builds a graph or computes batched gradients.

    Batched gradients (``is_grads_batched``) do not support in-place operations.
    """
    return torch.is_grad_enabled() or is_batched(grad)


class Attach(Function):
    """Returns numbers as if they had flowed along an edge of the graph."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, edge: Tensor) -> Tensor:
        ctx.device, ctx.dtype = edge.device, edge.dtype
        ctx.streams = current_streams([numbers.device, edge.device])
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with use_streams(ctx.streams):
            return None, grad.to(ctx.device, ctx.dtype)


def attached(mean_and_var: tuple[Tensor, Tensor], edge: Tensor) -> Tensor:
    """Returns mean and variance, ``(2, C)``, whose derivatives go along an edge of the graph."""
    return Attach.apply(torch.stack(mean_and_var), edge)  # type: ignore[no-any-return, no-untyped-call]


def merge_derivative(grad: Tensor, shard: Shard, edge: Tensor) -> Tensor:
    """Returns the derivative with respect to x, ``shift + slope * (x - center)``.

    It is ``(3, C)``: shift, slope, center. ``grad``, ``(2, C)``, is the derivative with respect to
    mean and variance of the batch, which have derivatives along ``edge``, the output global of
    (2). ``shard`` may be any replica's.
    """
    moments = attached(shard.moments_of(shard.batch), edge)
    mean = moments[0]
    dmean, dvar = grad.to(mean) / shard.batch.total
    slope = 2 * dvar
    # In two parts, so that a large mean costs no precision.
    center = mean.detach().to(shard.dtype).to(mean)
    return torch.stack((dmean - slope * (mean - center), slope, center)).to(grad.dtype)


def _normalize_derivative(
    dy: Tensor, x: Tensor, edge: Tensor, weight: Tensor | None, shard: Shard
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the derivatives with respect to x, moments of the batch, weight and bias."""
    dims = reduced_dims(x)
    mean, var = attached(shard.moments_of(shard.batch), edge)
    inverse = shard.denominator.of(var).rsqrt()
    scale = inverse if weight is None else inverse * weight.to(inverse.device)
    dtype = accumulation_dtype(x.dtype)
    dy = dy.to(dtype)
    head = mean.detach().to(dtype).to(mean)
    centered = x - per_channel(head, x) - per_channel(mean - head, x)
    dbias, along_x = (sums.to(mean) for sums in (dy.sum(dims), (dy * centered).sum(dims)))
    dweight = along_x * inverse
    dvar = -0.5 * dweight * scale * inverse * shard.denominator.slope(var)
    return (
        (dy * per_channel(scale, x)).to(x.dtype),
        torch.stack((-dbias * scale, dvar)).to(edge),
        None if weight is None else dweight.to(weight),
        dbias.to(edge),
    )
