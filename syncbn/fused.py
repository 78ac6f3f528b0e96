"""Fused: five kernels, in one autograd node for all shards. The usual way of replicas.

Problem: on accelerators each operation costs the host more than a small layer takes to compute,
above all while the threads of the replicas compete for the GIL. The textbook needs dozens for each
shard.

Idea: five kernels do all passes over a shard, and the merge (see `syncbn.kernels`), and one node
connects the results (see `syncbn.node`). On accelerators, the last replica to arrive launches them
for all shards, while the others wait. On the CPU each replica computes its own shard, before and
after the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replication._torch import sees_saved_tensors
from replication.groups.replicas import hidden_from_hooks
from syncbn.channels import HALF, constant_tensor, copied
from syncbn.joined import joined, joins
from syncbn.kernels import TINY, Kernels
from syncbn.node import Hold, normalized
from syncbn.recomputation import Record
from syncbn.statistics import (
    CountBatch,
    KernelMoments,
    LayerCall,
    RunningStatistics,
    is_single,
)


class Reply(NamedTuple):
    """The moments of the batch, and the output."""

    batch: KernelMoments
    y: Tensor
    #: Whether the replica still has to compute its output.
    is_unfilled: bool = False


class Fused:
    """A shard on a device that has the kernels."""

    def __init__(self, call: LayerCall, kernels: Kernels, recomputes: bool) -> None:
        self.call, self.kernels, self.records_graph = call, kernels, torch.is_grad_enabled()
        x, weight, bias, _ = call
        if x.dtype in HALF:
            weight = weight if weight is None else weight.float()
            bias = bias if bias is None else bias.float()
        self.weight, self.bias = weight, bias
        # Other replicas may record a graph where this one does not.
        self.x = x if self.records_graph else x.detach()
        #: The node that saves x, if it is not the joint one.
        self.holder: Any = None
        self.joins = not recomputes and joins(call)
        self._own: KernelMoments | None = None
        if not self.joins and kernels.are_on_host:
            self.measured()

    def measured(self) -> KernelMoments:
        """Returns the moments of the shard. Measures it at the first call."""
        if self._own is None:
            self._own = self.kernels.measured(self.x.detach(), self.call.denominator.eps)
        return self._own

    def connect(self) -> None:
        """Saves x in this thread, if it has hooks on saved tensors."""
        if self.records_graph and sees_saved_tensors():
            self.x = Hold.apply(self.x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            self.holder = self.x.grad_fn

    @staticmethod
    def merge(shards: Sequence[Fused], count_batch: CountBatch) -> Sequence[Reply | Tensor]:
        """Returns the replies to all replicas: outputs alone if the shards were joined."""
        calls, first = [shard.call for shard in shards], shards[0]
        if all(map(attrgetter("joins"), shards)):
            outputs = joined(calls, count_batch)
            if outputs is not None:
                return outputs
        own = [shard.measured() for shard in shards]
        home, tiny = calls[0].x.device, TINY[own[0].mean.dtype]
        counts = tuple([moments.n or tiny for moments in own])
        means = torch.stack([moments.mean.to(home) for moments in own])
        inverses = torch.stack([moments.inverse.to(home) for moments in own])
        n = sum([moments.n for moments in own])
        rows = constant_tensor(counts, home, means.dtype), means, inverses
        if is_single(n):
            count_batch = RunningStatistics  # without buffers
        merged = first.kernels.merged(first.x, own[0], n, *rows, count_batch)
        copies = copied(merged[1:3], [call.x.device for call in calls])
        batches = [merged._replace(mean=mean, inverse=inverse) for mean, inverse in copies]
        ys, is_unfilled = normalized(shards, batches), first.kernels.are_on_host
        return [Reply(batch, y, is_unfilled) for batch, y in zip(batches, ys, strict=True)]

    def reply(self, batch: KernelMoments) -> Reply:
        """Returns the reply to a single shard, given the moments of the batch."""
        return Reply(batch, normalized([self], [batch])[0])

    def output(self, reply: Reply) -> Tensor:
        if reply.is_unfilled and self.x.numel():
            (_, mean, inverse, eps), y = reply.batch, reply.y.detach()
            with torch.no_grad():
                self.kernels.elemt(self.x, self.weight, self.bias, mean, inverse, eps, out=y)
        return reply.y if self.records_graph else reply.y.detach()

    def record(self, reply: Reply) -> Record:
        return Record(self.measured(), reply.batch, self.records_graph, reply.y.requires_grad)

    def recomputed(self, record: Record) -> Reply:
        if record.requires_grad and not self.x.requires_grad:
            # Perhaps only the inputs of other replicas did.
            self.x = self.x.detach().requires_grad_()
        with hidden_from_hooks():
            return self.reply(record.batch)
