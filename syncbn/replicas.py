"""A call of a layer in the replicas of one forward, from top to bottom.

               (2)                         (4)                      (6)
    x_0, x_1, ..    ──▶ moments of each shard  ──▶ moments of the batch ──▶ y_0, y_1, ..
               (8)                         (9)                      (10)
    dy_0, dy_1, ..  ──▶ two sums of each shard ──▶ sums of the batch    ──▶ dx_0, dx_1, ..

Replicas run in threads. The code below has these numbers:

1.  A replica saves x in its own thread, if somebody there looks at what is saved.
2.  On the CPU it measures its shard.
3.  It sends its shard, and waits. The last to arrive does for all replicas what follows.
4.  It merges the moments.
5.  It connects all shards by one autograd node. Therefore no thread waits in backward, where a
    queue or a barrier would deadlock, because the engine may run all nodes of a device on one
    thread.
6.  Back in its own thread, on the CPU, each replica computes its output into the tensor that the
    node has made.
7.  The node's backward gets back what was saved, in the streams of the forward;
8.  reduces each shard to two sums;
9.  adds them in the order of the replicas;
10. and computes the gradient of each shard.

On accelerators the last to arrive also launches the kernels of steps 2 and 6 for all shards (see
`syncbn.kernels`): a launch costs the host more than a small layer takes to compute, and threads
that compete for the GIL launch more slowly. Small shards on the CPU take a shorter path, which
replaces steps 4 to 10 (see `joined`).

An activation checkpoint calls the layer again in backward, where no other replica would answer. So
each replica keeps the moments of its calls (see `PastCall`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from replication import ReplicaGroup, ReplicationError
from replication.extending import (
    Phase,
    apply_of,
    current_streams,
    hidden_from_hooks,
    phase,
    record_stream,
    sees_saved_tensors,
    to_device,
    use_streams,
)
from syncbn.channels import HALF, constant_tensor, in_format_of, memory_format, on_each
from syncbn.kernels import Kernels, in_one_dtype
from syncbn.statistics import Arguments, CountBatch, KernelMoments, check_count
from syncbn.textbook import differentiable_gradients

#: The largest shard, in values, that is joined with others. Above it, copying costs more than the
#: calls of the kernels; `benchmarks.layer` shows where.
LARGEST_JOINED = 2**18

#: The largest difference between moments of equal inputs, in standard deviations.
ROUNDING = 1e-3

#: The largest difference between moments, in standard deviations, with which outputs are the same.
SAME = 1e-6


def normalized_in_replica(
    arguments: Arguments,
    group: ReplicaGroup,
    kernels: Kernels,
    past_calls: list[PastCall],
    count_batch: CountBatch,
) -> Tensor:
    """Normalizes the shard of this replica with the moments of the whole batch."""
    shard = Shard(arguments, kernels)
    if phase() is Phase.REPLAYED:
        return recomputed(shard, past_calls, group.where)
    if not shard.may_be_joined:
        shard.save_in_this_thread()  # (1)
        if shard.is_on_host:
            shard.measure()  # (2) here, while other replicas measure theirs
    x, weight, bias, (eps, _) = arguments
    batch, y = group.exchange(  # (3)
        _name(eps, weight is not None, bias is not None, shard.is_on_host),
        shard,
        # The function of the first replica is called. If that is replica 0, the buffers are the
        # original module's.
        partial(replies, count_batch),
        layouts=((x.dtype, (x.size(1),)),),
        requires_grad=torch.is_grad_enabled(),  # tensors of other replicas may require gradients
    )
    if batch is None:  # joined shards: y is computed, and no checkpoint will call again
        return y
    past_calls.append(PastCall(shard.measure(), batch, shard.makes_graph, y.requires_grad))
    return shard.output(batch, y)  # (6)


@lru_cache(maxsize=1024)
def _name(eps: float, has_weight: bool, has_bias: bool, is_on_cpu: bool) -> str:
    """What must match in every replica, beside dtype and channels."""
    where = "on the CPU" if is_on_cpu else "on an accelerator"
    return f"batch_norm(eps={eps}, weight={has_weight}, bias={has_bias}, {where})"


class Shard:
    """What a replica sends."""

    #: The node that saves x, if it is not the joint one.
    holder: Any = None
    _moments: KernelMoments | None = None

    def __init__(self, arguments: Arguments, kernels: Kernels) -> None:
        self.kernels, self.is_on_host = kernels, kernels.are_on_host
        self.x, self.weight, self.bias, (self.eps, _) = arguments
        self.weight, self.bias = in_one_dtype(self.weight, self.bias)
        self.makes_graph = torch.is_grad_enabled()
        if not self.makes_graph:  # but other replicas may
            self.x = self.x.detach()
        self.may_be_joined = (
            self.is_on_host
            and 0 < self.x.numel() <= LARGEST_JOINED
            and self.x.dtype not in HALF
            and self.makes_graph
            and not sees_saved_tensors()  # an activation checkpoint needs the shard itself
        )

    def measure(self) -> KernelMoments:
        """Returns the moments of this shard, which the first call computes."""
        # Before Python 3.12 `functools.cached_property` has one lock for all instances, and the
        # replicas would compute one after the other.
        if self._moments is None:
            self._moments = self.kernels.measure(self.x.detach(), self.eps)
        return self._moments

    def save_in_this_thread(self) -> None:
        """Replaces x by a view that this thread has saved, if it has hooks on saved tensors.

        Usually it has none. Then the joint node saves x.
        """
        if self.makes_graph and sees_saved_tensors():
            self.x = Save.apply(self.x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            self.holder = self.x.grad_fn

    def output(self, batch: KernelMoments, y: Tensor) -> Tensor:
        """On the CPU, fills y, which the joint node left uninitialized.

        Returns y, detached if this replica makes no graph.
        """
        if self.is_on_host and self.x.numel():
            with torch.no_grad():
                args = self.x, self.weight, self.bias, batch.mean, batch.inverse, self.eps
                self.kernels.elemt(*args, out=y.detach())
        return y if self.makes_graph else y.detach()


def replies(
    count_batch: CountBatch, shards: Sequence[Shard]
) -> Sequence[tuple[KernelMoments | None, Tensor]]:
    """Returns the moments of the batch and the output for each replica.

    Runs in the thread of the last replica to arrive. Joined shards have no moments.
    """
    may_be_joined = all(map(attrgetter("may_be_joined"), shards))
    if may_be_joined and len({(s.x.shape[1:], memory_format(s.x)) for s in shards}) == 1:
        return [(None, y) for y in joined(shards, count_batch)]
    batches = merge_moments(shards, count_batch)  # (2) and (4)
    return list(zip(batches, connected(shards, batches), strict=True))  # (5)


def joined(shards: Sequence[Shard], count_batch: CountBatch) -> Sequence[Tensor]:
    """Returns the outputs of shards that differ only in length, by torch's own layer.

    The obvious synchronized layer, ``batch_norm(cat(shards))`` split again. For small shards on
    the CPU, where calling operations takes longer than computing them.
    """
    xs = [shard.x for shard in shards]
    weight, bias, eps = shards[0].weight, shards[0].bias, shards[0].eps
    if weight is not None:
        weight = weight.contiguous()  # torch's backward of (N, C) takes that for granted
    mean, var, momentum = count_batch()
    # Called without the Python of `functional.batch_norm`. The last argument is for CUDA only.
    args = weight, bias, mean, var, True, float(momentum), eps, False
    y = torch.batch_norm(torch.cat(xs), *args)
    # The results of `split` are views, which cannot be changed in place.
    return torch.unsafe_split_with_sizes(y, [x.size(0) for x in xs])


def merge_moments(shards: Sequence[Shard], count_batch: CountBatch) -> list[KernelMoments]:
    """Returns the moments of the batch for each replica, and updates the running statistics."""
    # Empty shards are left out, because the kernels of accelerators divide by counts.
    filled = [shard for shard in shards if shard.measure().n] or shards[:1]
    first, own = filled[0], [shard.measure() for shard in filled]
    n = sum([moments.n or 0 for moments in own])
    check_count(n, first.x)
    devices, dtype = [shard.x.device for shard in shards], own[0].mean.dtype
    counts = constant_tensor(tuple([max(1, m.n or 0) for m in own]), devices[0], dtype)
    rows = stacked([(moments.mean, moments.inverse) for moments in own], devices[0])
    means, inverses = rows.unbind(1)
    args = first.x, own[0], n, counts, means, inverses, count_batch()
    merged = first.kernels.merge_moments(*args)
    if len(set(devices)) == 1:
        return [KernelMoments(n, *merged, first.eps)] * len(shards)
    on_each_device = [both.unbind() for both in on_each(torch.stack(merged), devices)]
    return [KernelMoments(n, mean, inverse, first.eps) for mean, inverse in on_each_device]


def stacked(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Stacks two vectors of each of k shards to ``(k, 2, C)`` on a device.

    Those of another device travel together: a copy takes as long as several launches.
    """
    vectors: list[Tensor] = []
    for pair in pairs:
        is_here = pair[0].device == device
        vectors += pair if is_here else to_device(torch.stack(pair), device).unbind()
    return torch.stack(vectors).view(len(pairs), 2, vectors[0].size(0))


def connected(shards: Sequence[Shard], batches: Sequence[KernelMoments]) -> tuple[Tensor, ...]:
    """Connects some shards by the joint node. On the CPU its outputs still have no values."""
    # Replicas have copies of the same parameters, so the first may get the sum of the gradients.
    args = shards, batches, shards[0].weight, shards[0].bias, *[shard.x for shard in shards]
    return _connect(*args)  # type: ignore[no-any-return]


class NormalizeReplicas(Function):
    """The joint node: x_0, x_1, .., weight, bias ──▶ y_0, y_1, ..

    The engine calls its backward once. It saves x and vectors of length C, and changes nothing
    that it keeps, so several backwards of one graph may run at the same time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        shards: Sequence[Shard],
        batches: Sequence[KernelMoments],
        weight: Tensor | None,
        bias: Tensor | None,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kernels, ctx.batches = shards[0].kernels, batches
        ctx.holders = [shard.holder for shard in shards]
        ctx.streams = current_streams([x.device for x in xs])
        unsaved = [x for x, holder in zip(xs, ctx.holders, strict=True) if holder is None]
        ctx.save_for_backward(weight, *[shard.weight for shard in shards[1:]], *unsaved)
        if ctx.kernels.are_on_host:  # each replica computes its own (6)
            return tuple([torch.empty_like(x, memory_format=memory_format(x)) for x in xs])
        pairs = zip(shards, batches, strict=True)
        return tuple([s.kernels.normalize(s.x, s.weight, s.bias, batch) for s, batch in pairs])

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        k, saved = len(dys), ctx.saved_tensors
        used = [dy for dy in dys if dy is not None]
        if not used:  # the engine cannot know that no gradient comes
            return (None, None, None, None, *[None] * k)
        for dy in used:
            if dy.device in ctx.streams:
                record_stream(dy, ctx.streams[dy.device])  # it may come from another stream
        weights, own = saved[:k], iter(saved[k:])
        with use_streams(ctx.streams):
            # (7) From the nodes of `Save`, or from this one. In these streams, because a
            # checkpoint computes what it unpacks.
            xs = [next(own) if h is None else h.saved_tensors[0] for h in ctx.holders]
            pairs = zip(dys, xs, strict=True)
            all_dys = [torch.zeros_like(x) if dy is None else dy for dy, x in pairs]
            if torch.is_grad_enabled():  # the gradients need derivatives
                needs = ctx.needs_input_grad[2:]
                grads = differentiable_gradients(needs, ctx.batches[0], all_dys, xs, weights[0])
            else:
                grads = _gradients(ctx, all_dys, xs, weights)
        return None, None, *grads


_connect = apply_of(NormalizeReplicas)


def _gradients(
    ctx: Any, dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of weight, bias and all x, where they are needed."""
    needs_dweight, needs_dbias, *needs = ctx.needs_input_grad[2:]
    kernels, batches = ctx.kernels, ctx.batches
    inverse = batches[0].inverse
    dys = [in_format_of(dy, x) for dy, x in zip(dys, xs, strict=True)]
    sums = [  # (8)
        kernels.reduce_gradient(dy, x, batch, None)[:2]
        for dy, x, batch in zip(dys, xs, batches, strict=True)
    ]
    total = stacked(sums, inverse.device).sum(0)  # (9)
    dbias, dweight = total[0], total[1] * inverse if needs_dweight else None
    totals = on_each(total, [x.device for x in xs])
    dxs = [  # (10)
        kernels.gradient(dy, x, batch, weight, total_here.unbind()) if need else None
        for need, dy, x, batch, weight, total_here in zip(
            needs, dys, xs, batches, weights, totals, strict=True
        )
    ]
    return [dweight, dbias if needs_dbias else None, *dxs]


class Save(Function):
    """Saves the input of a replica in its own thread, for the joint node.

    Hooks on saved tensors belong to a thread, and an activation checkpoint must see what its
    replica saves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        # Because of the parameters the result requires gradients when the output does.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None, None]:
        return dx, None, None


# -- activation checkpoints --------------------------------------------------------------------


class PastCall(NamedTuple):
    """A call of one copy of a layer in one forward, from which a checkpoint recomputes it.

    A recomputation runs in backward, in any order and thread, often for one replica only. All that
    it needs from other replicas are the moments of the batch, vectors of length C. The input is
    not kept, because checkpoints are there to free it.
    """

    #: The moments of the shard and of the batch.
    own: KernelMoments
    batch: KernelMoments
    #: Whether the replica made a graph.
    makes_graph: bool
    #: Whether the output required gradients.
    requires_grad: bool


def recall(past_calls: Sequence[PastCall], own: KernelMoments, x: Tensor, where: str) -> PastCall:
    """Returns the call that is recomputed, given the moments of x, or raises ReplicationError.

    Joined calls are not among them. Errors name the copy by ``where``.

    torch does not say which call that is. It is the one whose moments are nearest. They need
    not be equal, because some devices are not deterministic. This is the most fragile idea of the
    path: it is a guess, from a distance. It errs loudly, where two calls are equally near.
    """
    # A call that made no graph, as in a checkpoint with use_reentrant=True, gives none later.
    makes_graph = torch.is_grad_enabled()
    calls = [c for c in past_calls if c.own.n == own.n and (c.makes_graph or not makes_graph)]
    if calls and (not own.n or (len(calls) == 1 and not x.is_cpu)):
        return calls[0]  # a comparison would be empty, or make the host wait for a GPU
    # There is no limit in half precision: if few values are close to 0, for example because
    # larger ones cancel, rounding may move their mean by many standard deviations.
    nearest = _nearest(calls, own, math.inf if x.dtype in HALF else ROUNDING)
    if not nearest:
        raise ReplicationError(
            f"{where}: an activation checkpoint recomputed this layer with an input that differs "
            f"from the one in forward ({own.n} values per channel). Check that: (1) checkpoint() "
            "has use_reentrant=False; (2) the checkpointed code does the same thing both times; "
            "(3) it contains no dropout if replicas share a device; (4) parameters did not change "
            "since the forward."
        )
    call, *others = nearest
    if any(_distance(call.batch, other.batch) > SAME for other in others):
        raise ReplicationError(
            f"{where}: this layer was called {len(nearest)} times in forward with the same input "
            "on this replica but different inputs on others, so a checkpoint can't tell which "
            "call it is recomputing. Use a separate layer for each call, or move this layer out "
            "of the checkpoint."
        )
    return call


def _nearest(calls: Sequence[PastCall], own: KernelMoments, limit: float) -> list[PastCall]:
    """Returns the calls of least distance, several for equal inputs, if it is within the limit."""
    found = [_distance(call.own, own) for call in calls]
    distances: list[float] = torch.stack(found).tolist() if found else []
    least = min(distances, default=math.inf)
    return [c for c, d in zip(calls, distances, strict=True) if d == least <= limit]


def _distance(one: KernelMoments, other: KernelMoments) -> Tensor:
    """Returns the largest difference between two means or variances, in standard deviations."""
    first, second = one.mean_and_variance(), other.mean_and_variance()
    deviation = first.var.sqrt() + torch.finfo(torch.float32).eps * first.mean.abs()
    scale = torch.stack((deviation, deviation.square()))
    a, b = (torch.stack((moments.mean, moments.var)) for moments in (first, second))
    equal = (a == b) | (a.isnan() & b.isnan())
    return torch.where(equal, 0.0, (a - b).abs() / scale).nan_to_num(nan=math.inf).amax()


def recomputed(shard: Shard, past_calls: Sequence[PastCall], where: str) -> Tensor:
    """Normalizes a shard once more, with the moments of the batch that its call had in forward."""
    call = recall(past_calls, shard.measure(), shard.x, where)
    # Saved after the comparison, because a checkpoint ends the recomputation when all is saved.
    shard.save_in_this_thread()
    if call.requires_grad and not shard.x.requires_grad:
        # The output must require gradients, as in forward, where perhaps only the input of another
        # replica did.
        shard.x = shard.x.detach().requires_grad_()
    with hidden_from_hooks():
        (y,) = connected([shard], [call.batch])
    return shard.output(call.batch, y)
