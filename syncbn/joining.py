"""Small shards on the CPU: one node of the graph, on the merging replica, normalizes them all.

    replica i        ShardInput: x_i, weight_i, bias_i ──▶ merging replica
    merging replica  Joined, of the inputs of all replicas
    replica i        ShardOutput: y_i                  ◀──

For small tensors per-operation overhead dominates, and the threads of the replicas compete for the
GIL. Here one thread runs all operations, some of them for all replicas at once, and the graph has
one node instead of 2 n + 1. It computes and saves the same values as the nodes of `syncbn.graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched, sees_saved_tensors
from syncbn import channels, kernels
from syncbn import moments as statistics
from syncbn.graph import (
    BatchContext,
    Denominator,
    GlobalMoments,
    LocalMoments,
    PendingCall,
    begin,
    finish,
    merge_shards,
    moment_gradients,
    stacked,
)

__all__: list[str] = []

#: The largest shard, in values, for which this is faster than a node per replica.
SMALL = 2**17


class ShardInput(NamedTuple):
    """The message of a replica: the arguments of its call."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    denominator: Denominator


class ShardOutput(NamedTuple):
    """The reply: the output and the moments of the batch. Both are None below 2 values."""

    y: Tensor | None
    global_moments: GlobalMoments


def is_small(x: Tensor) -> bool:
    """Returns whether a shard may be sent to the merging replica as it is.

    Hooks on saved tensors and torch modes of a replica must see its own operations.
    """
    return (
        x.numel() <= SMALL
        and x.device.type == "cpu"
        and not x.is_inference()
        and torch.is_grad_enabled()
        and not sees_saved_tensors()
    )


def merge_messages(
    messages: Sequence[LocalMoments | ShardInput],
) -> list[GlobalMoments | ShardOutput]:
    """Returns the reply to each message."""
    shards = [message for message in messages if isinstance(message, ShardInput)]
    total = sum(channels.values_per_channel(shard.x) for shard in shards)
    if (
        len(shards) == len(messages)
        and total > 1
        and len(set(map(_must_match, shards))) == 1
        # Otherwise the replicas' graphs share no node and may be used separately.
        and any(shard.x.requires_grad for shard in shards)
    ):
        return list(_joined(shards, total))
    return _one_by_one(messages)


def _must_match(shard: ShardInput) -> tuple[object, ...]:
    _, weight, bias, denominator = shard
    return denominator, *(None if p is None else p.dtype for p in (weight, bias))


def _joined(shards: Sequence[ShardInput], total: int) -> list[ShardOutput]:
    xs, weights, biases, (denominator, *_) = zip(*shards, strict=True)
    *ys, merged = Joined.apply(denominator, *xs, *weights, *biases)  # type: ignore[no-untyped-call]
    global_moments = GlobalMoments(BatchContext(total), merged)
    return [ShardOutput(y, global_moments) for y in ys]


def _one_by_one(
    messages: Sequence[LocalMoments | ShardInput],
) -> list[GlobalMoments | ShardOutput]:
    """Replies with the nodes of `syncbn.graph`, run here for the replicas that sent shards."""
    calls = [begin(m.x) if isinstance(m, ShardInput) else m for m in messages]
    moments = merge_shards([c.message if isinstance(c, PendingCall) else c for c in calls])
    replies: list[GlobalMoments | ShardOutput] = []
    for message, call, reply in zip(messages, calls, moments, strict=True):
        if isinstance(message, ShardInput) and isinstance(call, PendingCall):
            y = None if reply.moments is None else finish(call, reply, *message)
            replies.append(ShardOutput(y, reply))
        else:
            replies.append(reply)
    return replies


class Joined(Function):
    """Normalizes all shards; see `syncbn.graph` for the formulas.

    Its inputs are the shards, the weights and the biases of all replicas. Its outputs are their
    outputs and the merged moments, which are not differentiable.
    """

    @staticmethod
    def forward(ctx: Any, denominator: Denominator, *tensors: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        n = len(tensors) // 3
        xs, weights, biases = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        merged, total = _moments(xs)
        is_large = statistics.has_large_mean(merged)
        var, eps = denominator.clamped(merged[1]), denominator.added
        ctx.center = center = kernels.center_of(merged[0], xs[0], is_large)
        ctx.denominator, ctx.total = denominator, total
        ctx.save_for_backward(*xs, *weights, merged)
        ctx.biases = biases  # only their dtypes matter
        ctx.mark_non_differentiable(merged)
        return (
            *(
                kernels.normalize(x, center, var, eps, weight, bias)
                for x, weight, bias in zip(xs, weights, biases, strict=True)
            ),
            merged,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *tensors, merged = ctx.saved_tensors
        dys, biases = grads[:-1], ctx.biases
        if all(dy is None for dy in dys):  # called by the engine without any gradient
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() or any(dy is not None and is_batched(dy) for dy in dys):
            tensors += biases
            return None, *_derivative(ctx.denominator, tensors, ctx.needs_input_grad[1:], dys)
        n = len(dys)
        xs, weights = tensors[:n], tensors[n:]
        var, eps = ctx.denominator.clamped(merged[1]), ctx.denominator.added
        inverse = (var + eps).rsqrt()
        dweights: list[Tensor | None] = [None] * n
        dbiases: list[Tensor | None] = [None] * n
        sums = []
        for i, dy in enumerate(dys):
            if dy is not None:
                dweight, dbias = kernels.reduce(dy, xs[i], ctx.center, var, eps)
                sums += [dbias, dweight]
                dweights[i] = None if weights[i] is None else dweight.to(weights[i].dtype)
                dbiases[i] = None if biases[i] is None else dbias.to(biases[i].dtype)
        scales = inverse.expand(n, -1)
        if weights[0] is not None:
            scales = scales * torch.stack(weights)
        present = [i for i, dy in enumerate(dys) if dy is not None]
        used = scales if len(present) == n else scales[present]
        total = (torch.stack(sums).double().unflatten(0, (-1, 2)) * used[:, None]).sum(0)
        total = moment_gradients(total, inverse, merged[1], ctx.denominator)
        dmean, dvar = total.div_(ctx.total)
        dvar.mul_(2)
        dxs = [
            kernels.input_gradient(dy, x, ctx.center, scale, dvar, dmean) if needed else None
            for dy, x, scale, needed in zip(
                dys, xs, scales, ctx.needs_input_grad[1 : n + 1], strict=True
            )
        ]
        return None, *dxs, *dweights, *dbiases


def _moments(xs: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Returns the moments of the whole batch, and its values per channel."""
    if len({(x.shape[1:], x.is_contiguous()) for x in xs}) == 1:
        x = torch.cat(tuple(xs))
        return statistics.moments(x), channels.values_per_channel(x)
    counts = [channels.values_per_channel(x) for x in xs]
    merged = statistics.merge(*stacked(counts, [statistics.moments(x) for x in xs]))
    return merged, sum(counts)


def _derivative(
    denominator: Denominator,
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    dys: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Returns the gradients, computed by the differentiable nodes of `syncbn.graph`."""
    n, creates_graph = len(dys), torch.is_grad_enabled()
    with torch.enable_grad():
        # Differentiate by views. The hooks of the user's tensors run behind this node, and must
        # not run here as well.
        tensors = [tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        columns = zip(tensors[:n], tensors[n : 2 * n], tensors[2 * n :], strict=True)
        shards = [ShardInput(x, weight, bias, denominator) for x, weight, bias in columns]  # type: ignore[arg-type]
        replies: list[Any] = _one_by_one(shards)
    used = [(reply.y, dy) for reply, dy in zip(replies, dys, strict=True) if dy is not None]
    inputs: list[Any] = [t for t, is_needed in zip(tensors, needed, strict=True) if is_needed]
    grads = iter(
        torch.autograd.grad(
            [y for y, _ in used],
            inputs,
            [dy for _, dy in used],
            retain_graph=True,  # as (3) reads the tensors that (1) has saved
            create_graph=creates_graph,
            allow_unused=True,
        )
    )
    return [next(grads) if is_needed else None for is_needed in needed]
