"""Fused: five kernels, in one autograd node for all shards of a process. The usual way.

Problem: on accelerators each operation costs the host more than a small layer takes to compute,
above all while the threads of the replicas compete for the GIL. The formula needs dozens for each
shard.

Idea: five kernels do all passes over a shard, and the merge (see `syncbn.kernels`), and one node
connects the results (see `syncbn.node`). On accelerators, the last replica to arrive launches them
for all shards, while the others wait. On the CPU each replica computes its own shard, before and
after the exchange. A process has one shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replication._torch import sees_saved_tensors
from replication.groups.replicas import hidden_from_hooks
from syncbn.channels import (
    accumulation_dtype,
    constant_tensor,
    copied,
    values_per_channel,
)
from syncbn.kernels import ON_CPU, TINY, Kernels, kernels_for
from syncbn.node import Hold, normalized
from syncbn.processes import Ranks
from syncbn.recomputation import Record
from syncbn.statistics import (
    CountBatch,
    KernelMoments,
    LayerCall,
    RunningStatistics,
    all_match,
    is_single,
)


class Reply(NamedTuple):
    """The moments of the batch, and the output."""

    batch: KernelMoments
    y: Tensor
    #: Whether the replica still has to compute its output.
    is_unfilled: bool = False


class Fused:
    """A shard on a device that has the kernels. `syncbn.ways` explains the methods."""

    kernels: Kernels

    def __init__(self, call: LayerCall) -> None:
        self.call, self.records_graph = call, torch.is_grad_enabled()
        x, weight, bias, _ = call
        dtype = accumulation_dtype(x.dtype)
        self.weight = weight if weight is None else weight.to(dtype)
        self.bias = bias if bias is None else bias.to(dtype)
        self.x = x
        #: The node that saves x, if it is not the joint one.
        self.holder: Any = None
        self.kernels = kernels_for(x.device.type)  # type: ignore[assignment]
        self._own: KernelMoments | None = None
        if self.is_host:
            self.measured()

    @staticmethod
    def takes(call: LayerCall) -> bool:
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
            if n or self.is_host:
                mean, inverse = self.kernels.stats(x, eps)
            else:
                mean = x.new_zeros(x.size(1), dtype=accumulation_dtype(x.dtype))
                inverse = torch.full_like(mean, eps**-0.5)
            self._own = KernelMoments(n, mean, inverse, eps)
        return self._own

    def connect(self) -> None:
        """Saves x in this thread, if it has hooks on saved tensors."""
        if self.records_graph and sees_saved_tensors():
            self.x = Hold.apply(self.x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            self.holder = self.x.grad_fn

    @staticmethod
    def merge(shards: Sequence[Fused], count_batch: CountBatch) -> list[Reply] | None:
        calls, first = [shard.call for shard in shards], shards[0]
        if not all_match(calls) or len({(s.kernels, s.records_graph) for s in shards}) > 1:
            return None
        own = [shard.measured() for shard in shards]
        home, tiny = calls[0].x.device, TINY[own[0].mean.dtype]
        counts = tuple([moments.n or tiny for moments in own])
        means = torch.stack([moments.mean.to(home) for moments in own])
        inverses = torch.stack([moments.inverse.to(home) for moments in own])
        n = sum([moments.n for moments in own])
        rows = constant_tensor(counts, home, means.dtype), means, inverses
        merged = first._merged(n, *rows, count_batch)
        copies = copied(merged[1:3], [call.x.device for call in calls])
        batches = [merged._replace(mean=mean, inverse=inverse) for mean, inverse in copies]
        ys, is_unfilled = normalized(shards, batches), first.is_host
        return [Reply(batch, y, is_unfilled) for batch, y in zip(batches, ys, strict=True)]

    def merge_ranks(self, ranks: Ranks, count_batch: CountBatch) -> Reply:
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
        """Merges the moments of k shards, ``(k, C)`` each, and updates the running statistics."""
        own = self.measured()
        running = RunningStatistics() if is_single(n) else count_batch()
        # The kernel updates buffers if n is above 1, and torch's only buffers of its own dtype, by
        # a momentum that is a number. An n that the host does not know is above 1 if the shard has
        # several values.
        kernel_updates = (n if isinstance(n, int) else own.n) > 1
        if self.is_host:
            running = running._replace(momentum=float(running.momentum))
        else:
            kernel_updates &= not isinstance(running.momentum, Tensor)
            kernel_updates &= {b.dtype for b in running[:2] if b is not None} <= {means.dtype}
        updated = running if kernel_updates else RunningStatistics()
        # The first argument gives the dtype only.
        like = self.x if self.is_host else means
        args: Any = like, means, inverses, *updated, own.eps, counts
        mean, inverse = self.kernels.gather_stats(*args)
        batch = KernelMoments(n, mean, inverse, own.eps)
        if not kernel_updates:
            running.update(batch.exact())
        return batch

    def reply(self, batch: KernelMoments, ranks: Ranks | None = None) -> Reply:
        """Returns the reply to a single shard, given the moments of the batch."""
        return Reply(batch, normalized([self], [batch], ranks)[0])

    def output(self, reply: Reply) -> Tensor:
        if reply.is_unfilled and self.x.numel():
            (_, mean, inverse, eps), y = reply.batch, reply.y.detach()
            with torch.no_grad():
                self.kernels.elemt(self.x, self.weight, self.bias, mean, inverse, eps, out=y)
        return reply.y

    def record(self, reply: Reply) -> Record:
        return Record(self.measured(), reply.batch, self.records_graph, reply.y.requires_grad)

    def recomputed(self, record: Record) -> Reply:
        if record.requires_grad and not self.x.requires_grad:
            # Perhaps only the inputs of other replicas did.
            self.x = self.x.detach().requires_grad_()
        with hidden_from_hooks():
            return self.reply(record.batch)
