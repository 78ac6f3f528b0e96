"""The autograd graph of a synchronized layer: one node for all replicas of a call.

    replica i:  moments of x_i ──┐                                          ┌──▶ y_i, filled by i
    replica j:  moments of x_j ──┼─▶ Normalize(x_i, x_j, .., weights, ..) ──┼──▶ y_j, filled by j
                                 │       made by the last to arrive         │
                                 └──────────────────────────────────────────┘

Small shards on the CPU take another way: `syncbn.joined` computes them together, without a node
of ours.

Passes over a shard run in the thread of its replica: the moments before the exchange, normalizing
after it, into the output that the node already has. So nothing of the size of the input is
computed while the others wait.

Backward, the engine calls the node once: one reduction per shard, sums added in replica order, one
pass per shard. No thread waits in it. A queue or a barrier there would deadlock, because the
engine runs all nodes of the CPU on one thread. Between processes each rank has a node for its own
shard, with one collective in backward if its input needs a gradient.

Saved for backward: each x_i, and vectors of length C. The node keeps nothing else, so that several
backwards of one graph, of any kind, may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import has_other_derivatives, is_batched, sees_saved_tensors
from replication.devices import Streams, current_streams, use_streams
from replication.errors import lost_derivatives
from replication.groups.base import Group, Layouts
from replication.groups.replicas import ReplicaGroup, hidden_from_hooks
from syncbn.channels import empty_output, in_float64, per_channel, reduced_dims
from syncbn.joined import can_be_joined, join, may_join
from syncbn.kernels import DIFFERENTIABLE, Fused, Statistics
from syncbn.merge import (
    Arguments,
    CountBatch,
    Shard,
    all_match,
    kernel_statistics,
    merge_moments,
    set_statistics,
)
from syncbn.processes import RankExchange
from syncbn.recomputation import RecordedCalls

#: One entry for each shard.
Tensors = Sequence[Tensor | None]


def synchronized_batch_norm(
    arguments: Arguments,
    group: Group,
    calls: RecordedCalls | None,
    count_batch: CountBatch,
) -> Tensor:
    """Normalizes a shard ``(N, C, ...)``, maybe empty, with the moments of the whole batch."""
    # `calls` records the calls of a replica. It is None between processes, and for a layer that
    # makes its replica group itself.
    x, weight, bias, denominator = arguments
    if has_other_derivatives((x, weight, bias)):
        raise lost_derivatives("a synchronized layer")
    layouts = ((x.dtype, (x.size(1),)),)  # must match on every copy
    if not isinstance(group, ReplicaGroup):
        shard, output = merge_ranks(group, layouts, held(Part.of(arguments)), count_batch)
    elif group.in_later_backward:
        assert calls is not None  # set together with the group
        shard, output = recomputed(calls, Part.of(arguments))
    else:
        joins = not denominator.clamps and may_join(x)
        part = None if joins else held(Part.of(arguments))
        reply = group.exchange(
            "batch_norm",
            (arguments, part),
            partial(merge_replicas, group, count_batch),
            layouts=layouts,
            requires_grad=torch.is_grad_enabled(),  # tensors of other replicas may
        )
        if isinstance(reply, Tensor):  # joined
            return reply
        shard, output = reply
        shard.output_requires_grad = output.requires_grad
        if calls is not None:
            calls.shards.append(shard)
    total = shard.stats.total
    # Every rank raises, because no other process hears of it.
    if (
        isinstance(total, int)
        and total == 1
        and (shard.values or not isinstance(group, ReplicaGroup))
    ):
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} and "
            "1 value in all of its group; take a larger batch, or call the layer in eval()"
        )
    if shard.values:
        with torch.no_grad():
            shard.kernels.normalize(x, shard.stats, shard.weight, shard.bias, output)
    # A subclass of Tensor decides what its operations return, as MONAI's MetaTensor does.
    return output if type(x) is Tensor else output.view_as(x)


class Part(NamedTuple):
    """A shard that is not joined, before its call has a node."""

    shard: Shard
    x: Tensor
    #: The output, to be filled.
    y: Tensor
    #: The node that saves the input, if the joint node must not. Not an attribute of the shard: a
    #: replica records shards, and a checkpoint that it kept may refer to it.
    holder: Any = None

    @classmethod
    def of(cls, arguments: Arguments) -> Part:
        x = arguments[0]
        return cls(Shard(arguments), x, empty_output(x))


#: What a replica sends: its arguments, and its `Part` unless it may be joined.
Message = tuple[Arguments, Part | None]

#: What it gets back, unless it was joined: its `Shard`, and its output, to be filled.
Reply = tuple[Shard, Tensor]


def merge_replicas(
    group: ReplicaGroup, count_batch: CountBatch, messages: Sequence[Message]
) -> Iterable[Reply | Tensor]:
    """Returns the replies in replica order, or the outputs if the shards were joined."""
    # `group` and `count_batch` belong to the first replica. Its buffers are the original module's.
    arguments, known = zip(*messages, strict=True)
    match = all_match(arguments)
    if match and not any(known) and can_be_joined(arguments):
        return group.commit(partial(join, arguments, count_batch))
    parts = [part or Part.of(own) for own, part in messages]
    shards = [part.shard for part in parts]
    differ = not match or len({shard.kernels for shard in shards}) > 1
    group.commit(partial(merge_moments, shards, differ, count_batch))
    return zip(shards, connect(parts, differ), strict=True)


def merge_ranks(group: Group, layouts: Layouts, part: Part, count_batch: CountBatch) -> Reply:
    """Returns the reply to this rank."""
    shard = part.shard
    ranks = RankExchange(group, layouts, shard.needs_dx)
    set_statistics([shard], *ranks.merge(shard), count_batch)
    return shard, connect([part], ranks=ranks)[0]


def recomputed(calls: RecordedCalls, part: Part) -> Reply:
    """Returns the reply to a call that a checkpoint recomputes, from the recorded statistics."""
    shard = part.shard
    recorded = calls.recall(shard, part.x.dtype)
    # Not before, because a checkpoint ends the recomputation when all is saved.
    part = held(part)
    if recorded.output_requires_grad and not part.x.requires_grad:
        # Perhaps only the inputs of other replicas did.
        part = part._replace(x=part.x.detach().requires_grad_())
    shard.stats = recorded.stats
    with hidden_from_hooks():
        return shard, connect([part])[0]


# Hooks on saved tensors belong to a thread: an activation checkpoint must see what its replica
# saves. The parameters only make the result require gradients.
class Hold(Function):
    """Saves the input of a replica in its own thread, for the joint node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None, None]:
        return dx, None, None


def held(part: Part) -> Part:
    """Returns the part with an input whose node saves it, if this replica has hooks."""
    if not sees_saved_tensors():
        return part
    x = Hold.apply(part.x, part.shard.weight, part.shard.bias)  # type: ignore[no-untyped-call]
    return part._replace(x=x, holder=x.grad_fn)


class Batch(NamedTuple):
    """The data that the node of a call keeps for backward."""

    #: Those that record a graph.
    shards: Sequence[Shard]
    #: Whether weight, bias, denominator or kernels differ between replicas.
    differ: bool
    ranks: RankExchange | None
    #: See `Part.holder`.
    holders: Sequence[Any]
    #: The forward's streams on the devices of all replicas, if there are several.
    streams: Streams


def connect(
    parts: Sequence[Part], differ: bool = False, ranks: RankExchange | None = None
) -> Sequence[Tensor]:
    """Returns the outputs of all replicas, connected with their inputs and parameters."""
    outputs = [part.y for part in parts]
    if torch.is_grad_enabled():
        # To the others, the shard of a replica that records no graph is a constant.
        connected = [i for i, part in enumerate(parts) if part.shard.records_graph]
        shards, xs, ys, holders = zip(*[parts[i] for i in connected], strict=True)
        streams = current_streams([part.shard.device for part in parts])
        batch = Batch(shards, differ, ranks, holders, streams)
        parameters = *[s.weight for s in shards], *[s.bias for s in shards]
        for i, y in zip(connected, _normalize(batch, ys, *xs, *parameters), strict=True):
            outputs[i] = y
    return outputs


class Normalize(Function):
    """Its inputs are x of all shards, then weights, then biases; its outputs their y."""

    @staticmethod
    def forward(
        ctx: Any, batch: Batch, outputs: Sequence[Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batch = batch
        n = len(batch.shards)
        xs = [x if h is None else None for h, x in zip(batch.holders, tensors, strict=False)]
        ctx.save_for_backward(*xs, *tensors[n : 2 * n])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        batch: Batch = ctx.batch
        n = len(batch.shards)
        saved = ctx.saved_tensors
        xs = [
            x if holder is None else holder.saved_tensors[0]
            for x, holder in zip(saved, batch.holders, strict=False)
        ]
        if all(dy is None for dy in dys) and batch.ranks is None:
            return (None,) * (2 + 3 * n)  # called by the engine without any gradient
        for dy in dys:
            # It may come from another stream. torch cannot tell this of batched gradients.
            if dy is not None and dy.device in batch.streams and not is_batched(dy):
                dy.record_stream(batch.streams[dy.device])
        with use_streams(batch.streams):
            grads = gradients(batch, dys, xs, saved[n:])
        needs = ctx.needs_input_grad[2:]
        return None, None, *[g if need else None for g, need in zip(grads, needs, strict=True)]


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Callable[..., Any] = super(Function, Normalize).apply


def gradients(
    batch: Batch, dys: Tensors, xs: Sequence[Tensor], weights: Tensors
) -> list[Tensor | None]:
    """Returns the gradients of all x, then weights, then biases."""
    shards, ranks, n = batch.shards, batch.ranks, len(batch.shards)
    kernels = [shard.kernels for shard in shards]
    stats = [shard.stats for shard in shards]
    if torch.is_grad_enabled():
        # In one place, so that derivatives of the gradients are rounded once.
        xs = [x.to(shards[0].dtype) for x in xs]
        dys = [dy if dy is None else dy.to(shards[0].dtype) for dy in dys]
        stats = differentiable_statistics(batch, xs)
    if torch.is_grad_enabled() or any(dy is not None and is_batched(dy) for dy in dys):
        kernels = [DIFFERENTIABLE] * n
    # Plain operations for empty shards, which the kernels of a device may refuse.
    sums = [
        of_batch.mean.new_zeros(2, len(of_batch.mean))  # the output is unused
        if dy is None
        else (kernel if x.numel() else DIFFERENTIABLE).reduce(dy, x, of_batch)
        for kernel, dy, x, of_batch in zip(kernels, dys, xs, stats, strict=True)
    ]
    if not batch.differ:
        # All have copies of one parameter, so the first may take the sum of their gradients.
        sums = [added(sums)]
    grads: list[Tensor | None] = [None] * (3 * n)
    for i, (of_bias, along_x) in enumerate(sums):
        grads[n + i], grads[2 * n + i] = kernels[i].weight_gradient(sums[i], stats[i]), of_bias
        denominator = shards[i].denominator
        if denominator.clamps:  # a clamped variance has no derivative
            _, var = shards[i].batch_mean_and_var()
            sums[i] = torch.stack((of_bias, along_x * (var >= denominator.eps).to(along_x)))
    fused = kernels[0] if isinstance(kernels[0], Fused) else None
    if batch.differ or ranks is not None:
        fused, sums = None, [in_float64(own) for own in sums]
    if fused is not None:
        shared = sums[0]
    else:
        derivatives = [
            kernels[i].derivatives(own, stats[i], weights[i]) for i, own in enumerate(sums)
        ]
        shared = added(derivatives)
    if ranks is not None and shards[0].needs_dx:
        shared = ranks.summed(shared)
    for i, (shard, dy, x) in enumerate(zip(shards, dys, xs, strict=True)):
        if shard.needs_dx:
            if dy is None:
                dy = x.new_zeros(()).expand_as(x)
            compute = fused.input_gradient_by_sums if fused else kernels[i].input_gradient
            if not x.numel():
                compute = DIFFERENTIABLE.input_gradient
            on_device = shared.to(shard.device, shard.dtype)
            grads[i] = compute(dy, x, stats[i], weights[i], on_device)
    return grads


def added(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors, in order, on the device of the first."""
    tensors = [tensor.to(tensors[0].device) for tensor in tensors]
    if len(tensors) > 3:  # two kernels for any number
        return torch.stack(tensors).sum(0)
    return reduce(torch.add, tensors)


def differentiable_statistics(batch: Batch, xs: Sequence[Tensor]) -> list[Statistics]:
    """Returns the statistics for each shard, with derivatives of any order by every x."""
    shards, first = batch.shards, batch.shards[0]
    mean, var = first.batch_mean_and_var()
    # Inputs are centered by a value of their own precision, before they are summed.
    center = mean.to(first.dtype)
    sums = []
    for x in xs:
        centered, dims = x - per_channel(center, x), reduced_dims(x)
        sums.append(in_float64(torch.stack((centered.sum(dims), centered.square().sum(dims)))))
    # Zeros, which have the derivatives of the means of all centered x and their squares.
    means = added(sums).to(mean.device) / first.stats.divisor
    zeros = means - means.detach()
    if batch.ranks is not None and zeros.requires_grad:
        # The forward knows the sums of all ranks. So a backward that builds a graph makes the same
        # calls as one that does not.
        zeros.register_hook(batch.ranks.summed)
    drift, square = zeros.unbind()
    var = var + square - drift * (drift + 2 * (mean - center))
    return [kernel_statistics(first.stats.total, mean + drift, var, shard) for shard in shards]
