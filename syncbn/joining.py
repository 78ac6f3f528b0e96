"""Small shards on the CPU: one node of the graph, made by the first replica, normalizes them all.

    replica i        ShardInput: x_i, weight_i, bias_i ──▶ first replica
    first replica    Joined, of the inputs of all replicas
    replica i        ShardOutput: y_i                  ◀──

For small tensors the time of a layer is that of its many operations, for which the replicas'
threads stand in line. Here one thread makes them, some of them for all replicas at once, and the
graph has one node instead of 2 n + 1. What it computes, and what it saves, is what the nodes of
`syncbn.graph` do.
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
    Begun,
    Denominator,
    GlobalMoments,
    LocalMoments,
    begin,
    finish,
    merge_shards,
    moment_gradients,
    stacked,
)

__all__: list[str] = []

#: Values of a shard, up to which it pays: to normalize them takes a core as long as the operations
#: take that each replica makes otherwise, one replica after the other in Python's eyes.
SMALL = 2**17


class ShardInput(NamedTuple):
    """A replica's message."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    denominator: Denominator


class ShardOutput(NamedTuple):
    """The reply: the output, and the moments that it was made with; None if there are none."""

    y: Tensor | None
    whole: GlobalMoments


def is_small(x: Tensor) -> bool:
    """Whether a shard may be sent as it is.

    Not where a replica looks at what is saved for backward, or computed: there each has its own.
    """
    return (
        x.numel() <= SMALL
        and x.device.type == "cpu"
        and not x.is_inference()
        and torch.is_grad_enabled()
        and not sees_saved_tensors()
    )


def replies_to(messages: Sequence[LocalMoments | ShardInput]) -> list[GlobalMoments | ShardOutput]:
    """What the first replica replies to the messages of all."""
    parts = [message for message in messages if isinstance(message, ShardInput)]
    total = sum(channels.values_per_channel(part.x) for part in parts)
    if (
        len(parts) == len(messages)
        and total > 1
        and len(set(map(_what_is_alike, parts))) == 1
        # Else the graphs of the replicas have nothing in common, and are used one by one.
        and any(part.x.requires_grad for part in parts)
    ):
        return list(_joined(parts, total))
    return _one_by_one(messages)


def _what_is_alike(part: ShardInput) -> tuple[object, ...]:
    _, weight, bias, denominator = part
    return denominator, *(None if p is None else p.dtype for p in (weight, bias))


def _joined(parts: Sequence[ShardInput], total: int) -> list[ShardOutput]:
    xs, weights, biases, (denominator, *_) = zip(*parts, strict=True)
    *ys, merged = Joined.apply(denominator, *xs, *weights, *biases)  # type: ignore[no-untyped-call]
    whole = GlobalMoments(BatchContext(total), merged)
    return [ShardOutput(y, whole) for y in ys]


def _one_by_one(
    messages: Sequence[LocalMoments | ShardInput],
) -> list[GlobalMoments | ShardOutput]:
    """With the nodes of `syncbn.graph`, for those who have sent parts."""
    begun = [begin(m.x) if isinstance(m, ShardInput) else m for m in messages]
    wholes = merge_shards([b.shard if isinstance(b, Begun) else b for b in begun])
    replies: list[GlobalMoments | ShardOutput] = []
    for message, one, whole in zip(messages, begun, wholes, strict=True):
        if isinstance(message, ShardInput) and isinstance(one, Begun):
            y = None if whole.moments is None else finish(one, whole, *message)
            replies.append(ShardOutput(y, whole))
        else:
            replies.append(whole)
    return replies


class Joined(Function):
    """Normalizes all shards; see `syncbn.graph` for the formulas.

    Its inputs are the shards, the weights and the biases of all replicas; its outputs their
    outputs, and the merged moments, which have no derivative.
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
        ctx.biases = biases  # of which the values do not matter
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
        if all(dy is None for dy in dys):  # the engine asks, though no gradient has come
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
    """The moments of the whole batch, and its values per channel."""
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
    """The gradients, by the nodes that know their own derivatives."""
    n, creates_graph = len(dys), torch.is_grad_enabled()
    with torch.enable_grad():
        # Of tensors of their own: a derivative by those of the user would run their hooks, which
        # run again behind this node, and would count what is there twice for each.
        tensors = [tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        columns = zip(tensors[:n], tensors[n : 2 * n], tensors[2 * n :], strict=True)
        parts = [ShardInput(x, weight, bias, denominator) for x, weight, bias in columns]  # type: ignore[arg-type]
        replies: list[Any] = _one_by_one(parts)
    used = [(reply.y, dy) for reply, dy in zip(replies, dys, strict=True) if dy is not None]
    inputs: list[Any] = [t for t, is_needed in zip(tensors, needed, strict=True) if is_needed]
    grads = iter(
        torch.autograd.grad(
            [y for y, _ in used],
            inputs,
            [dy for _, dy in used],
            retain_graph=True,  # as a node looks into what another one has saved
            create_graph=creates_graph,
            allow_unused=True,
        )
    )
    return [next(grads) if is_needed else None for is_needed in needed]
