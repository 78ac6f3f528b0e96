"""Fused: five kernels, in one autograd node for all shards of a process. The usual way.

Problem: on accelerators each operation costs the host more than a small layer takes to compute,
above all while the threads of the replicas compete for the GIL. The formula needs dozens for each
shard.

Idea: five kernels do all passes over a shard, and the merge (see `syncbn.kernels`). One node
connects the results:

    x_0, x_1, .., weight, bias ──▶ Normalize ──▶ y_0, y_1, ..

On accelerators, the last replica to arrive launches them for all shards, while the others wait. On
the CPU each replica computes its own shard, before and after the exchange. A process has one.

Backward, the engine calls the node once: one reduction per shard, sums added in replica order, and
one pass per shard. No thread waits in it: a queue or a barrier there would deadlock where the
engine runs all nodes on one thread. Between processes it adds the sums of all ranks by a
collective. The node saves x and vectors of length C, and keeps nothing else, so several backwards
of one graph may run at the same time. Gradients that need derivatives of their own are left to the
formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import is_batched, sees_saved_tensors
from replication.devices import current_streams, record_stream, to_device, use_streams
from replication.groups.replicas import hidden_from_hooks
from syncbn.channels import (
    accumulation_dtype,
    constant_tensor,
    in_float64,
    in_format_of,
    memory_format,
    values_per_channel,
    with_usual_strides,
)
from syncbn.formula import Formula
from syncbn.kernels import ON_CPU, TINY, Kernels, kernels_for
from syncbn.processes import Ranks
from syncbn.recomputation import Record
from syncbn.statistics import (
    Call,
    CountBatch,
    Denominator,
    Moments,
    RunningStatistics,
    all_match,
    with_derivatives,
)


class KernelMoments(NamedTuple):
    """Moments as the kernels have them, ``(C,)`` in the dtype that they return."""

    #: The number of values per channel, or the counts of all ranks where reading them would block.
    n: Any
    mean: Tensor
    #: ``1 / sqrt(var + eps)``
    inverse: Tensor
    eps: float

    def exact(self) -> Moments:
        """Returns mean and biased variance."""
        n = self.n if isinstance(self.n, int) else self.n.sum()
        var = in_float64(self.inverse).square().reciprocal().sub_(self.eps).clamp_(min=0)
        return Moments(n, in_float64(self.mean), var)


class Reply(NamedTuple):
    """The moments of the batch, and the output."""

    batch: KernelMoments
    y: Tensor
    #: Whether the replica has to compute its output itself.
    is_empty: bool = False


class Fused:
    """A shard on a device that has the kernels."""

    kernels: Kernels

    def __init__(self, call: Call) -> None:
        self.call, self.records_graph = call, torch.is_grad_enabled()
        x, weight, bias, _ = call
        dtype = accumulation_dtype(x.dtype)
        self.weight = weight if weight is None else weight.to(dtype)
        self.bias = bias if bias is None else bias.to(dtype)
        #: The input of the node, and the node that saves it, if that is another one.
        self.x, self.holder = with_usual_strides(x), cast(Any, None)
        self.kernels = kernels_for(x.device.type)  # type: ignore[assignment]
        self._own: KernelMoments | None = None
        if self.is_host:
            self.measured()

    @staticmethod
    def takes(call: Call) -> bool:
        """Whether this shard may go this way, as far as its replica knows."""
        return kernels_for(call.x.device.type) is not None and not call.denominator.clamps

    @property
    def is_host(self) -> bool:
        """Whether the kernels compute in the thread that calls them."""
        return self.kernels is ON_CPU

    def measured(self) -> KernelMoments:
        """Returns the moments of the shard. Measures it at the first call."""
        if self._own is None:
            x, eps = self.x.detach(), self.call.denominator.eps
            n = values_per_channel(x)
            if n:
                mean, inverse = self.kernels.stats(x, eps)
            else:
                dtype = torch.float64 if self.is_host else accumulation_dtype(x.dtype)
                mean = x.new_zeros(x.size(1), dtype=dtype)
                inverse = torch.full_like(mean, eps**-0.5)
            self._own = KernelMoments(n, mean, inverse, eps)
        return self._own

    def connect(self) -> None:
        """Saves x in this thread, if it has hooks on saved tensors."""
        if self.records_graph and sees_saved_tensors():
            self.x = _Hold.apply(self.x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            self.holder = self.x.grad_fn

    @staticmethod
    def merge(shards: Sequence[Fused], count_batch: CountBatch) -> list[Reply] | None:
        """Returns the replies, and updates the running statistics. None if shards don't match."""
        calls, first = [shard.call for shard in shards], shards[0]
        if not all_match(calls) or len({(s.kernels, s.records_graph) for s in shards}) > 1:
            return None
        own = [shard.measured() for shard in shards]
        home, counts = calls[0].x.device, tuple([moments.n or TINY for moments in own])
        means = torch.stack([moments.mean.to(home) for moments in own])
        inverses = torch.stack([moments.inverse.to(home) for moments in own])
        n = sum([moments.n for moments in own])
        rows = constant_tensor(counts, home, means.dtype), means, inverses
        merged = first._merged(n, *rows, count_batch)
        copies = _copied(merged[1:3], [call.x.device for call in calls])
        batches = [merged._replace(mean=mean, inverse=inverse) for mean, inverse in copies]
        ys, is_empty = _normalized(shards, batches), first.is_host
        return [Reply(batch, y, is_empty) for batch, y in zip(batches, ys, strict=True)]

    def merge_ranks(self, ranks: Ranks, count_batch: CountBatch) -> Reply:
        """Returns the reply to a process, and updates the running statistics."""
        own = self.measured()
        batch = self._merged(*ranks.gathered(own.n, own.mean, own.inverse), count_batch)
        return self.reply(batch, ranks)

    def _merged(
        self,
        n: int | Tensor,
        counts: Tensor,
        means: Tensor,
        inverses: Tensor,
        count_batch: CountBatch,
    ) -> KernelMoments:
        """Merges n moments, ``(n, C)`` each, and updates the running statistics."""
        own = self.measured()
        is_counted = not isinstance(n, int) or n != 1  # else the call raises
        running = count_batch() if is_counted else RunningStatistics()
        # The kernel needs 2 values, and numbers like its own. A count that the host does not know
        # is above 1 if its shard's is.
        is_usual = (n if isinstance(n, int) else own.n) > 1
        is_usual &= not isinstance(running.momentum, Tensor)
        if not self.is_host:
            is_usual &= {b.dtype for b in running[:2] if b is not None} <= {means.dtype}
        updated = running if is_usual else RunningStatistics()
        # The first argument gives the dtype only.
        like = self.x if self.is_host else means
        args: Any = like, means, inverses, *updated, own.eps, counts
        mean, inverse = self.kernels.gather_stats(*args)
        batch = KernelMoments(n, mean, inverse, own.eps)
        if not is_usual:
            running.update(batch.exact())
        return batch

    def reply(self, batch: KernelMoments, ranks: Ranks | None = None) -> Reply:
        """Returns the reply to a single shard, given the moments of the batch."""
        return Reply(batch, _normalized([self], [batch], ranks)[0])

    def output(self, reply: Reply) -> Tensor:
        if reply.is_empty and self.x.numel():
            (_, mean, inverse, eps), y = reply.batch, reply.y.detach()
            with torch.no_grad():
                self.kernels.elemt(self.x, self.weight, self.bias, mean, inverse, eps, out=y)
        return reply.y

    def record(self, reply: Reply) -> Record:
        return Record(self.measured(), reply.batch, self.records_graph, reply.y.requires_grad)

    def recomputed(self, record: Record) -> Reply:
        """Returns the reply to a call that a checkpoint recomputes."""
        if record.requires_grad and not self.x.requires_grad:
            # Perhaps only the inputs of other replicas did.
            self.x = self.x.detach().requires_grad_()
        with hidden_from_hooks():
            return self.reply(record.batch)


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
    """Computes the outputs. On the CPU, several replicas compute theirs in `Fused.output`."""
    are_empty = len(shards) > 1 and shards[0].is_host
    return [
        torch.empty_like(shard.x, memory_format=memory_format(shard.x))
        if are_empty or not shard.x.numel()
        else shard.kernels.elemt(shard.x, shard.weight, shard.bias, mean, inverse, eps)
        for shard, (_, mean, inverse, eps) in zip(shards, batches, strict=True)
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
        ctx.kernels, ctx.batches, ctx.ranks = shards[0].kernels, batches, ranks
        ctx.holders = [shard.holder for shard in shards]
        ctx.streams = current_streams([x.device for x in xs])
        saved = [x if h is None else None for x, h in zip(xs, ctx.holders, strict=True)]
        ctx.save_for_backward(*saved, weight, *[shard.weight for shard in shards[1:]])
        return tuple(_outputs(shards, batches))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        n, saved = len(dys), ctx.saved_tensors
        used = [dy for dy in dys if dy is not None]
        if not used and ctx.ranks is None:  # the other ranks would wait for the sums of this one
            return (None,) * (5 + n)  # called by the engine without any gradient
        xs = [
            x if holder is None else holder.saved_tensors[0]
            for x, holder in zip(saved, ctx.holders, strict=False)
        ]
        for dy in used:
            if dy.device in ctx.streams and not is_batched(dy):
                record_stream(dy, ctx.streams[dy.device])  # it may come from another stream
        dys = tuple(
            [torch.zeros_like(x) if dy is None else dy for dy, x in zip(dys, xs, strict=True)]
        )
        if torch.is_grad_enabled() or any(map(is_batched, used)):
            compute: Any = _gradients_by_formula
        else:
            compute = _gradients if ctx.ranks is None else _gradients_of_rank
        with use_streams(ctx.streams):
            return None, None, None, *compute(ctx, dys, xs, saved[n:])


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Callable[..., Any] = super(Function, Normalize).apply


def _gradients(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and all x, where they are needed."""
    needs_dweight, needs_dbias, *needs = ctx.needs_input_grad[3:]
    n, mean, inverse, _ = ctx.batches[0]
    dys = [in_format_of(dy, x) for dy, x in zip(dys, xs, strict=True)]
    sums = [
        torch.stack(_reduced(ctx.kernels, dy, x, batch, None)[:2]).to(mean.device)
        for dy, x, batch in zip(dys, xs, ctx.batches, strict=True)
    ]
    # Two kernels for any number, where that is less.
    total = torch.stack(sums).sum(0) if len(sums) > 3 else reduce(torch.add, sums)
    dbias, dweight = total[0], total[1] * inverse if needs_dweight else None
    if n >= 2**31:  # the kernel divides by an int32
        total, n = total / n, 1
    dxs: list[Tensor | None] = [None] * len(xs)
    for i, (total_here,) in enumerate(_copied([total], [x.device for x in xs])):
        if needs[i]:
            plain, along = total_here.unbind()
            args = dys[i], xs[i], ctx.batches[i], weights[i], plain, along, n
            dxs[i] = _gradient(ctx.kernels, *args)
    return [dweight, dbias if needs_dbias else None, *dxs]


def _gradients_of_rank(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns what `_gradients` returns, for the only shard of a process."""
    (x,), (dy,), (batch,), (weight,) = xs, dys, ctx.batches, weights
    dy = in_format_of(dy, x)
    # The kernel also computes the gradients of the parameters, if there is a weight.
    plain, along, dweight, dbias = _reduced(ctx.kernels, dy, x, batch, weight)
    dx = None
    if ctx.needs_input_grad[-1]:
        means = ctx.ranks.averaged(plain, along)
        dx = _gradient(ctx.kernels, dy, x, batch, weight, means[0], means[1], 1)
    return [dweight, plain if dbias is None else dbias, dx]


def _reduced(
    kernels: Kernels, dy: Tensor, x: Tensor, batch: KernelMoments, weight: Tensor | None
) -> Any:
    """Returns the two sums of a shard, and the gradients of weight and bias, if it has any."""
    if x.numel():
        args = dy, x, batch.mean, batch.inverse, weight, True, True, True
        return kernels.backward_reduce(*args)
    zeros = batch.mean.new_zeros(x.size(1), dtype=accumulation_dtype(x.dtype))
    return zeros, zeros, weight if weight is None else zeros, None


def _gradient(
    kernels: Kernels,
    dy: Tensor,
    x: Tensor,
    batch: KernelMoments,
    weight: Tensor | None,
    plain: Tensor,
    along: Tensor,
    n: int,
) -> Tensor:
    """Returns the gradient of a shard, given the sums of all."""
    if not x.numel():
        return torch.empty_like(x)
    count = constant_tensor((n,), x.device, torch.int32)
    return kernels.backward_elemt(dy, x, batch.mean, batch.inverse, weight, plain, along, count)  # type: ignore[no-any-return]


def _gradients_by_formula(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns what `_gradients` returns, with derivatives of any order."""
    needs = ctx.needs_input_grad[3:]
    moments = ctx.batches[0].exact()
    with torch.enable_grad():
        # As views, because several replicas may have the same tensor. Gradients do not depend on
        # the bias.
        tensors: list[Any] = [t if t is None else t.view_as(t) for t in (weights[0], *xs)]
        weight, *views = tensors
        for view, need in zip(views, needs[2:], strict=True):
            # A `_Hold` saves an input of the network as it is, which needs no gradient. But the
            # input of the node does, if the parameters do.
            view.requires_grad_(need or view.requires_grad)
        bias, of_ranks = torch.zeros_like(ctx.batches[0].mean).requires_grad_(), None
        if ctx.ranks is not None:
            weight = torch.ones_like(bias) if weight is None else weight
            # Not 0: the sums would be lost that the other ranks need.
            weight = weight + TINY * (weight.detach().abs() < TINY)
            of_ranks = partial(_summed_over, ctx.ranks, moments.var + ctx.batches[0].eps, weight)
        denominator = Denominator(ctx.batches[0].eps)
        shards = [Formula(Call(view, weight, bias, denominator)) for view in views]
        for shard in shards:
            shard.connect()
        batch = with_derivatives(moments, [s.own for s in shards], of_ranks)
        reply = shards[0].reply(batch)
        ys = [shard.output(reply) for shard in shards]
    inputs = [t for t, need in zip((tensors[0], bias, *views), needs, strict=True) if need]
    options: Any = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
    grads = iter(torch.autograd.grad(ys, inputs, dys, **options))
    return [next(grads) if need else None for need in needs]


def _summed_over(ranks: Ranks, denominator: Tensor, weight: Tensor, tensor: Tensor) -> Tensor:
    """Returns the same tensor, whose gradient is added over the ranks."""
    # The gradient are derivatives by mean and variance of the batch. What ranks add are the two
    # sums of `_gradients`, so that the others need not build a graph of their backward.
    scale = -in_float64(weight.detach()) * denominator.rsqrt()
    return ranks.with_summed_gradient(tensor, torch.stack((scale, scale / denominator / 2)))
