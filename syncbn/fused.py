"""Fused: torch's kernels for `torch.nn.SyncBatchNorm`, in one autograd node for all shards.

Problem: on accelerators each operation costs the host more than a small layer takes to compute,
above all while the threads of the replicas compete for the GIL. The formula needs dozens for each
shard.

Idea: five kernels do all passes over a shard, and the merge. The last replica to arrive launches
them for all shards, while the others wait, and one node connects the results:

    x_0, x_1, .., weight, bias ──▶ Normalize ──▶ y_0, y_1, ..

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
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)

#: Stands for a weight that is 0, by which `_summed` divides.
_TINY = 1e-20


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
    """The moments of the batch, and the output."""

    batch: KernelMoments
    y: Tensor


class Fused:
    """A shard on a device that has the kernels."""

    #: The moments of the shard, once they are measured.
    own: KernelMoments

    def __init__(self, call: Call) -> None:
        self.call, self.records_graph = call, torch.is_grad_enabled()
        x, weight, bias, _ = call
        dtype = accumulation_dtype(x.dtype)
        self.weight = weight if weight is None else weight.to(dtype)
        self.bias = bias if bias is None else bias.to(dtype)
        #: The input of the node, and the node that saves it, if that is another one.
        self.x, self.holder = with_usual_strides(x), cast(Any, None)

    @staticmethod
    def takes(call: Call) -> bool:
        """Whether this shard may go this way, as far as its replica knows."""
        has_values, clamps = call.x.numel() > 0, call.denominator.clamps
        return has_values and not clamps and has_kernels(call.x.device.type, *_KERNELS)

    def measured(self) -> KernelMoments:
        """Measures the shard."""
        x, eps = self.x, self.call.denominator.eps
        mean, inverse = torch.batch_norm_stats(x.detach(), eps)
        self.own = KernelMoments(values_per_channel(x), mean, inverse, eps)
        return self.own

    def connect(self) -> None:
        """Saves x in this thread, if it has hooks on saved tensors."""
        if self.records_graph and sees_saved_tensors():
            self.x = _Hold.apply(self.x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            self.holder = self.x.grad_fn

    @staticmethod
    def merge(shards: Sequence[Fused], count_batch: CountBatch) -> list[Reply] | None:
        """Returns the replies, and updates the running statistics. None if shards don't match."""
        calls = [shard.call for shard in shards]
        if len({shard.records_graph for shard in shards}) > 1 or not all_match(calls):
            return None
        own = [shard.measured() for shard in shards]
        home, (_, mean, _, eps) = calls[0].x.device, own[0]
        means = torch.stack([moments.mean.to(home) for moments in own])
        inverses = torch.stack([moments.inverse.to(home) for moments in own])
        counts: Any = tuple([moments.n for moments in own])
        running = count_batch()
        dtypes = {mean.dtype if buffer is None else buffer.dtype for buffer in running[:2]}
        updates = dtypes == {mean.dtype} and not isinstance(running.momentum, Tensor)
        args: Any = means, means, inverses, *(running if updates else (None, None, 0.0)), eps
        args += (constant_tensor(counts, home, mean.dtype),)
        merged = torch.batch_norm_gather_stats_with_counts(*args)  # the first gives the dtype only
        copies = _copied(merged, [call.x.device for call in calls])
        batches = [KernelMoments(sum(counts), mean, inverse, eps) for mean, inverse in copies]
        if not updates:
            running.update(batches[0].exact())
        return list(map(Reply, batches, _normalized(shards, batches)))

    def reply_of_ranks(self, batch: Moments, ranks: Ranks) -> Reply:
        """Returns the reply to a process, given the moments of all ranks."""
        _, like, _, eps = self.own
        vectors = batch.mean, (batch.var + eps).rsqrt()
        mean, inverse = (to_device(vector.to(like.dtype), like.device) for vector in vectors)
        of_kernel = KernelMoments(batch.n, mean, inverse, eps)
        return Reply(of_kernel, *_normalized([self], [of_kernel], ranks))

    def output(self, reply: Reply) -> Tensor:
        return reply.y

    def record(self, reply: Reply) -> Record:
        return Record(self.own, reply.batch, self.records_graph, reply.y.requires_grad)

    def recompute(self, record: Record) -> Tensor:
        """Returns the output of a call that a checkpoint recomputes."""
        if record.requires_grad and not self.x.requires_grad:
            # Perhaps only the inputs of other replicas did.
            self.x = self.x.detach().requires_grad_()
        with hidden_from_hooks():
            return _normalized([self], [record.batch])[0]


def _copied(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Returns copies of tensors for each of some devices, the same for equal devices."""
    made = {device: [to_device(t, device) for t in tensors] for device in dict.fromkeys(devices)}
    return [made[device] for device in devices]


def _normalized(
    shards: Sequence[Fused], batches: Sequence[KernelMoments], ranks: Ranks | None = None
) -> Sequence[Tensor]:
    """Returns the outputs. They depend on all inputs, and on the parameters of the first shard."""
    # All have copies of one parameter, so the first may take the sum of their gradients.
    first, xs = shards[0], [shard.x for shard in shards]
    if torch.is_grad_enabled():
        args = shards, batches, ranks, first.weight, first.bias, *xs
        return _normalize(*args)  # type: ignore[no-any-return]
    return _outputs(shards, batches)


def _outputs(shards: Sequence[Fused], batches: Sequence[KernelMoments]) -> list[Tensor]:
    return [
        # The last argument is eps, which only some kernels use.
        torch.batch_norm_elemt(shard.x, shard.weight, shard.bias, mean, inverse, 0.0)
        for shard, (_, mean, inverse, _) in zip(shards, batches, strict=True)
    ]


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
    """The joint node."""

    @staticmethod
    def forward(
        ctx: Any,
        shards: Sequence[Fused],
        batches: Sequence[KernelMoments],
        ranks: Ranks | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batches, ctx.ranks = batches, ranks
        ctx.holders = [shard.holder for shard in shards]
        ctx.streams = current_streams([x.device for x in xs])
        saved = [x if h is None else None for x, h in zip(xs, ctx.holders, strict=True)]
        ctx.save_for_backward(*saved, weight, *[shard.weight for shard in shards[1:]])
        return tuple(_outputs(shards, batches))

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
            return (None,) * (5 + n)  # called by the engine without any gradient
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
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and all x, where they are needed."""
    needs_dweight, needs_dbias, *needs = ctx.needs_input_grad[3:]
    n, mean, inverse, _ = ctx.batches[0]
    dys, sums = [in_format_of(dy, x) for dy, x in zip(dys, xs, strict=True)], []
    for dy, x, batch in zip(dys, xs, ctx.batches, strict=True):
        args: Any = dy, x, batch.mean, batch.inverse, None, True, False, False
        reduced = torch.batch_norm_backward_reduce(*args)
        sums.append(torch.stack(reduced[:2]).to(mean.device))  # of dy and of dy * (x - mean)
    # Two kernels for any number, where that is less.
    total = torch.stack(sums).sum(0) if len(sums) > 3 else reduce(torch.add, sums)
    dbias, dweight = total[0], total[1] * inverse if needs_dweight else None
    if ctx.ranks is not None and needs[0]:
        total, weights = _summed(ctx.ranks, total, inverse, weights[0])
    if isinstance(n, Tensor) or n >= 2**31:  # the kernel divides by an int32
        total, n = total / n, 1
    dxs: list[Tensor | None] = [None] * len(xs)
    for i, (total_here,) in enumerate(_copied([total], [x.device for x in xs])):
        if needs[i]:
            batch, counts = ctx.batches[i], constant_tensor((n,), xs[i].device, torch.int32)
            args = dys[i], xs[i], batch.mean, batch.inverse, weights[i]
            args += *total_here.unbind(), counts
            dxs[i] = torch.batch_norm_backward_elemt(*args)
    return [dweight, dbias if needs_dbias else None, *dxs]


def _summed(
    ranks: Ranks, sums: Tensor, inverse: Tensor, weight: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
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
    ctx: Any, dys: Sequence[Tensor | None], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns what `_gradients` returns, with derivatives of any order."""
    needs = ctx.needs_input_grad[3:]
    of_ranks = None if ctx.ranks is None else ctx.ranks.with_summed_gradient
    with torch.enable_grad():
        # As views, because several replicas may have the same tensor. Gradients do not depend on
        # the bias.
        tensors: list[Any] = [t if t is None else t.view_as(t) for t in (weights[0], *xs)]
        weight, *views = tensors
        for view, need in zip(views, needs[2:], strict=True):
            # A `_Hold` saves an input of the network as it is, which needs no gradient. But the
            # input of the node does, if the parameters do.
            view.requires_grad_(need or view.requires_grad)
        bias = torch.zeros_like(ctx.batches[0].mean).requires_grad_()
        denominator = Denominator(ctx.batches[0].eps)
        shards = [Formula(Call(view, weight, bias, denominator)) for view in views]
        for shard in shards:
            shard.connect()
        batch = with_derivatives(ctx.batches[0].exact(), [s.own for s in shards], of_ranks)
        reply = shards[0].reply(batch)
        used = [i for i, dy in enumerate(dys) if dy is not None]
        ys = [shards[i].output(reply) for i in used]
    inputs = [t for t, need in zip((weight, bias, *views), needs, strict=True) if need]
    options: Any = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
    grads = iter(torch.autograd.grad(ys, inputs, [dys[i] for i in used], **options))
    return [next(grads) if need else None for need in needs]
