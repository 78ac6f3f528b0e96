"""Fused: torch's kernels for `torch.nn.SyncBatchNorm`, in one autograd node for all shards.

Problem: on accelerators each operation costs the host more than a small layer takes to compute,
and the formula needs dozens for each shard.

Idea: five kernels do all passes over a shard, and the merge. The last replica to arrive makes one
node, whose outputs are still empty:

    replica i:  moments of x_i ──┐                                          ┌──▶ y_i, filled by i
    replica j:  moments of x_j ──┼─▶ Normalize(x_i, x_j, .., weights, ..) ──┼──▶ y_j, filled by j
                                 └──────────────────────────────────────────┘

Backward, the engine calls the node once: one reduction per shard, sums added in replica order, and
one pass per shard. No thread waits in it: a queue or a barrier there would deadlock where the
engine runs all nodes on one thread. Between processes the node has one shard, and adds the sums of
all ranks by a collective. It saves x and vectors of length C, and keeps nothing else, so several
backwards of one graph may run at the same time. What is unusual, and gradients that need
derivatives of their own, are left to the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import has_kernels, is_batched, sees_saved_tensors
from replication.devices import current_streams, record_stream, to_device, use_streams
from replication.groups.replicas import hidden_from_hooks
from syncbn.channels import (
    accumulation_dtype,
    constant_tensor,
    in_float64,
    in_format_of,
    values_per_channel,
    with_usual_strides,
)
from syncbn.formula import Formula
from syncbn.processes import Ranks
from syncbn.recomputation import Record
from syncbn.statistics import Call, CountBatch, Denominator, Moments, all_match, with_derivatives

#: The operators of torch that are called here.
_KERNELS = (
    "batch_norm_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_elemt.out",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)

#: Stands for a weight that is 0, by which `_summed` divides.
_TINY = 1e-20

#: Optional tensors, one for each shard.
Tensors = Sequence[Tensor | None]


class KernelMoments(NamedTuple):
    """Moments as the kernels have them, ``(C,)`` in the accumulation dtype."""

    n: int | Tensor
    mean: Tensor
    #: ``1 / sqrt(var + eps)``
    inverse: Tensor
    eps: float

    def exact(self) -> Moments:
        """Returns mean and biased variance."""
        var = in_float64(self.inverse).square().reciprocal().sub_(self.eps).clamp_(min=0)
        return Moments(self.n, in_float64(self.mean), var)


class Reply(NamedTuple):
    """The moments of the batch, and the output, to be filled."""

    batch: KernelMoments
    y: Tensor


class Fused:
    """A shard on a device that has the kernels."""

    def __init__(self, call: Call) -> None:
        x, weight, bias, (eps, _) = self.call = call
        dtype = accumulation_dtype(x.dtype)
        self.weight = weight if weight is None else weight.to(dtype)
        self.bias = bias if bias is None else bias.to(dtype)
        #: The input of the node, and the node that saves it, if that is another one.
        self.x, self.holder = x, cast(Any, None)
        self.y = torch.empty_like(with_usual_strides(x))
        self.records_graph = torch.is_grad_enabled()
        with torch.no_grad():
            mean, inverse = torch.batch_norm_stats(x, eps)
        self.own = KernelMoments(values_per_channel(x), mean, inverse, eps)

    @staticmethod
    def takes(call: Call) -> bool:
        """Whether this shard may go this way, as far as its replica knows."""
        has_values, clamps = call.x.numel() > 0, call.denominator.clamps
        return has_values and not clamps and has_kernels(call.x.device.type, *_KERNELS)

    def connect(self) -> None:
        """Saves x in this thread, if it has hooks on saved tensors."""
        if self.records_graph and sees_saved_tensors():
            self.x = _Hold.apply(self.x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            self.holder = self.x.grad_fn

    @staticmethod
    def merge(shards: Sequence[Fused], count_batch: CountBatch) -> list[Reply] | None:
        """Returns the replies, and updates the running statistics. None if shards don't match."""
        if len({shard.records_graph for shard in shards}) > 1 or not all_match(
            [shard.call for shard in shards]
        ):
            return None
        home, (*_, eps) = shards[0].x.device, shards[0].own
        means = torch.stack([shard.own.mean.to(home) for shard in shards])
        inverses = torch.stack([shard.own.inverse.to(home) for shard in shards])
        counts: Any = tuple([shard.own.n for shard in shards])
        running = count_batch()
        dtypes = {means.dtype if buffer is None else buffer.dtype for buffer in running[:2]}
        updates = dtypes == {means.dtype} and not isinstance(running.momentum, Tensor)
        args: Any = means, means, inverses, *(running if updates else (None, None, 0.0)), eps
        args += (constant_tensor(counts, home, means.dtype),)
        merged = torch.batch_norm_gather_stats_with_counts(*args)
        copies = _copied(merged, [shard.x.device for shard in shards])
        batches = [KernelMoments(sum(counts), mean, inverse, eps) for mean, inverse in copies]
        if not updates:
            running.update(batches[0].exact())
        return _connected(shards, batches)

    def reply_of_ranks(self, batch: Moments, ranks: Ranks) -> Reply:
        """Returns the reply to a process, given the moments of all ranks."""
        _, like, _, eps = self.own
        vectors = batch.mean, (batch.var + eps).rsqrt()
        mean, inverse = (to_device(vector.to(like.dtype), like.device) for vector in vectors)
        return _connected([self], [KernelMoments(batch.n, mean, inverse, eps)], ranks)[0]

    def output(self, reply: Reply) -> Tensor:
        """Fills the output, in the thread of its replica."""
        args = self.call.x, self.weight, self.bias, reply.batch.mean, reply.batch.inverse
        with torch.no_grad():
            # The last argument is eps, which only some kernels use.
            torch.batch_norm_elemt(*args, 0.0, out=reply.y)
        return reply.y

    def record(self, reply: Reply) -> Record:
        return Record(self.own, reply.batch, self.records_graph, reply.y.requires_grad)

    def recompute(self, record: Record) -> Tensor:
        """Returns the output of a call that a checkpoint recomputes."""
        if record.requires_grad and not self.x.requires_grad:
            # Perhaps only the inputs of other replicas did.
            self.x = self.x.detach().requires_grad_()
        with hidden_from_hooks():
            (reply,) = _connected([self], [record.batch])
        return self.output(reply)


def _copied(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Returns copies of tensors for each of some devices, the same for equal devices."""
    made = {device: [to_device(t, device) for t in tensors] for device in dict.fromkeys(devices)}
    return [made[device] for device in devices]


def _connected(
    shards: Sequence[Fused], batches: Sequence[KernelMoments], ranks: Ranks | None = None
) -> list[Reply]:
    """Returns the replies, with outputs that depend on the inputs and parameters of all shards."""
    ys = [shard.y for shard in shards]
    if torch.is_grad_enabled():
        tensors = *[s.x for s in shards], *[s.weight for s in shards], *[s.bias for s in shards]
        ys = _normalize(shards, batches, ranks, *tensors)
    return list(map(Reply, batches, ys))


# Hooks on saved tensors belong to a thread: an activation checkpoint must see what its replica
# saves. The parameters only make the result require gradients.
class _Hold(Function):
    """Saves the input of a replica in its own thread, for the joint node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None, None]:
        return dx, None, None


class Normalize(Function):
    """The joint node. It gets x of all shards, then weights, then biases, and gives their y."""

    @staticmethod
    def forward(
        ctx: Any,
        shards: Sequence[Fused],
        batches: Sequence[KernelMoments],
        ranks: Ranks | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batches, ctx.ranks = batches, ranks
        ctx.holders = [shard.holder for shard in shards]
        ctx.streams = current_streams([shard.x.device for shard in shards])
        n = len(shards)
        xs = [x if h is None else None for x, h in zip(tensors, ctx.holders, strict=False)]
        ctx.save_for_backward(*xs, *tensors[n : 2 * n])
        return tuple([shard.y for shard in shards])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        n, saved = len(dys), ctx.saved_tensors
        xs = [
            x if holder is None else holder.saved_tensors[0]
            for x, holder in zip(saved, ctx.holders, strict=False)
        ]
        if ctx.ranks is not None and dys[0] is None:
            dys = (torch.zeros_like(xs[0]),)  # the other ranks wait for the sums of this one
        used = [dy for dy in dys if dy is not None]
        if not used:
            return (None,) * (3 + 3 * n)  # called by the engine without any gradient
        is_usual = len(used) == n and not torch.is_grad_enabled()
        for dy in used:
            if is_batched(dy):
                is_usual = False
            elif dy.device in ctx.streams:
                record_stream(dy, ctx.streams[dy.device])  # it may come from another stream
        with use_streams(ctx.streams):
            compute: Any = _gradients if is_usual else _gradients_by_formula
            return None, None, None, *compute(ctx, dys, xs, saved[n:])


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Callable[..., Any] = super(Function, Normalize).apply


def _gradients(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Tensors
) -> list[Tensor | None]:
    """Returns the gradients of all x, then weights, then biases, where they are needed."""
    n, needs = len(xs), ctx.needs_input_grad[3:]
    grads: list[Tensor | None] = [None] * len(needs)
    count, mean, inverse, _ = ctx.batches[0]
    dys, sums = [in_format_of(dy, x) for dy, x in zip(dys, xs, strict=True)], []
    for dy, x, batch in zip(dys, xs, ctx.batches, strict=True):
        args: Any = dy, x, batch.mean, batch.inverse, None, True, False, False
        reduced = torch.batch_norm_backward_reduce(*args)
        sums.append(torch.stack(reduced[:2]).to(mean.device))  # of dy and of dy * (x - mean)
    # Two kernels for any number, where that is less.
    total = torch.stack(sums).sum(0) if n > 3 else reduce(torch.add, sums)
    # All have copies of one parameter, so the first may take the sum of their gradients.
    if needs[n]:
        grads[n] = total[1] * inverse
    if needs[2 * n]:
        grads[2 * n] = total[0]
    if ctx.ranks is not None and needs[0]:
        total, weights = _summed(ctx.ranks, total, inverse, weights[0])
    if isinstance(count, Tensor) or count >= 2**31:  # the kernel divides by an int32
        total, count = total / count, 1
    for i, (total_here,) in enumerate(_copied([total], [x.device for x in xs])):
        if needs[i]:
            batch, counts = ctx.batches[i], constant_tensor((count,), xs[i].device, torch.int32)
            args = dys[i], xs[i], batch.mean, batch.inverse, weights[i], *total_here.unbind(), counts
            grads[i] = torch.batch_norm_backward_elemt(*args)
    return grads


def _summed(
    ranks: Ranks, sums: Tensor, inverse: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensors]:
    """Adds the sums of all ranks. Returns them with a weight by which the kernel multiplies."""
    # What ranks add are derivatives by mean and variance of the batch, as in the formula, so some
    # ranks may build a graph of their backward and others not. In float64, because the product of
    # a tiny weight may be too small for float32.
    weight = torch.ones_like(inverse) if weight is None else weight
    weight = weight.masked_fill(weight.abs() < _TINY, _TINY)
    scale = -in_float64(inverse) * in_float64(weight)
    factors = torch.stack((scale, scale * in_float64(inverse).square() / 2))
    total = ranks.summed(in_float64(sums) * factors) / factors
    return to_device(total.to(sums.dtype), sums.device), [weight]


def _gradients_by_formula(
    ctx: Any, dys: Tensors, xs: Sequence[Tensor], weights: Tensors
) -> list[Tensor | None]:
    """Returns what `_gradients` returns, with derivatives of any order."""
    n, needs = len(xs), ctx.needs_input_grad[3:]
    of_ranks = None if ctx.ranks is None else ctx.ranks.with_summed_gradient
    with torch.enable_grad():
        # As views, because several replicas may have the same tensor. Gradients do not depend on
        # the bias.
        tensors: list[Any] = [t if t is None else t.view_as(t) for t in (*xs, *weights)]
        tensors += [torch.zeros_like(batch.mean).requires_grad_() for batch in ctx.batches]
        calls = [(*tensors[i::n], Denominator(batch.eps)) for i, batch in enumerate(ctx.batches)]
        shards = [Formula(Call(*call)) for call in calls]
        for shard in shards:
            shard.connect()
        batch = with_derivatives(ctx.batches[0].exact(), [s.own for s in shards], of_ranks)
        used = [i for i, dy in enumerate(dys) if dy is not None]
        ys = [shards[i].output(shards[i].reply(batch)) for i in used]
    inputs = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
    options: Any = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
    grads = iter(torch.autograd.grad(ys, inputs, [dys[i] for i in used], **options))
    return [next(grads) if need else None for need in needs]
