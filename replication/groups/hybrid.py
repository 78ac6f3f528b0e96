"""`HybridGroup`: collectives between all copies of a layer, in replicas times processes.

    process 0   replica 0 ──┐
                replica 1 ──┼─▶ merge ──┐
    process 1   replica 0 ──┼─▶ merge ──┼─▶ one collective ──▶ one reply for each replica
                replica 1 ──┘           ┘

The replicas of a process exchange as in a `ReplicaGroup`. The last to arrive combines their
tensors and makes the collective between processes, for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from replication._torch import device_of_group
from replication.devices import to_device
from replication.errors import ReplicationError
from replication.groups.base import Group, ReduceOp, reduce_tensors
from replication.groups.call_header import check_lengths
from replication.groups.membership import state_of
from replication.groups.processes import ProcessGroup
from replication.groups.replicas import ReplicaGroup, Tensors, copies
from replication.sync.rendezvous import Rendezvous

__all__: list[str] = []

T = TypeVar("T")

#: The number of replicas in each process, by the forward and the group of `torch.distributed`.
_counts: WeakKeyDictionary[Rendezvous, WeakKeyDictionary[Any, tuple[int, ...]]] = (
    WeakKeyDictionary()
)


class HybridGroup(ReplicaGroup):
    """The copies of one layer in the replicas of several processes.

    Ranks are ordered by process, then by replica. The number of replicas may differ between
    processes, and from forward to forward. The processes therefore tell each other these numbers,
    once per forward, in the first call that needs them: reading `rank` or `size`, `split`, a
    ``"mean"``, `reduce_scatter` or `broadcast`. Such a call is a collective: all members must make
    it.

    Between processes the rules of `ProcessGroup` apply: a backward through a result is a
    collective of the processes. In each process at least one replica must take part in it.

    The collectives use a group of `torch.distributed` of their own, made in the first call. The
    collectives of DistributedDataParallel would otherwise come between them in an order that
    depends on the number of replicas.

    Args:
        local: The group of this process's replicas.
        processes: The processes.
        counts: The number of members in each process, if it is known.
    """

    def __init__(
        self, local: ReplicaGroup, processes: ProcessGroup, counts: Sequence[int] | None = None
    ) -> None:
        # Not super().__init__, which sets `rank` and `size`.
        self._local = local
        self._communicator = local._communicator
        self._rendezvous = local._rendezvous
        self._replica = local._replica
        self._given = processes
        outer = local._rendezvous and local._rendezvous.outer
        if outer is not None and (outer.size or 0) > 1:
            raise ReplicationError(
                f"{self._where()}: a DataParallel inside a replica of another one, in several "
                "processes, has no group; replicate once, on the outside"
            )
        if counts is not None:
            vars(self).update(_all_counts=tuple(counts), processes=processes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process={self._given.rank}, replica={self._replica})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HybridGroup cannot be copied: it connects the replicas of one forward")

    def _where(self) -> str:
        path = self._communicator.path if self._communicator else ""
        return f"`{path}`, process {self._given.rank}, replica {self._replica}"

    @cached_property
    def processes(self) -> ProcessGroup:
        """The processes. The first use is a collective, in the thread that merges."""
        return self._given.twin()

    @property
    def _home(self) -> torch.device:
        """The device for numbers that travel between processes."""
        return device_of_group(self._given.process_group)

    # -- ranks ---------------------------------------------------------------------------------

    @cached_property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of this member."""
        return sum(self._known_counts[: self._given.rank]) + self._local.rank

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        """The number of members."""
        return sum(self._known_counts)

    @property
    def _known_counts(self) -> tuple[int, ...]:
        """The number of members in each process. Every replica may ask for it."""
        if "_all_counts" not in vars(self):
            known = self._counts_of_forward.get(self._given.process_group)
            if known is None:
                known = self.exchange("size", None, self._reply_with_counts)
            vars(self)["_all_counts"] = known
        return self._all_counts

    def _reply_with_counts(self, messages: list[None]) -> list[tuple[int, ...]]:
        return [self._all_counts] * len(messages)

    @cached_property
    def _all_counts(self) -> tuple[int, ...]:
        """The number of members in each process. Asked for in the thread that merges."""
        known, process_group = self._counts_of_forward, self._given.process_group
        if process_group not in known:
            own = torch.tensor([self._local.size], device=self._home)
            counts = self.processes.exchange("size", own, stack=True).flatten().tolist()
            check_lengths(counts, 1, self._where())
            known[process_group] = tuple(counts)
        return known[process_group]

    @property
    def _counts_of_forward(self) -> WeakKeyDictionary[Any, tuple[int, ...]]:
        rendezvous = self._rendezvous or self._refuse_copy()
        return _counts.setdefault(rendezvous, WeakKeyDictionary())

    # -- collectives ---------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when all members have called it."""

        def merge(messages: list[None]) -> list[None]:
            self.processes.barrier()
            return messages

        self.exchange("barrier", None, merge)

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns copies of the objects of all members, in the order of their ranks.

        The objects are pickled (see `ProcessGroup.all_gather_object`), and the copies are the same
        for all replicas of a process.
        """

        def merge(objects: list[T]) -> list[tuple[T, ...]]:
            gathered = tuple(chain(*self.processes.all_gather_object(tuple(objects))))
            return [gathered] * len(objects)

        return self.exchange("all_gather_object", obj, merge)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            tensors = [shard for (shard,) in shards]
            home = tensors[0].device
            members = [to_device(t, home) for t in tensors]
            if op in ("sum", "mean"):
                reduced = self._averaged(members, op, self.processes.all_reduce)
            else:
                reduced = reduce_tensors(self._rows(members), op)
            return copies([reduced], [t.device for t in tensors])

        return self._join("all_reduce", (tensor,), merge, f"op={op!r}")[0]

    def _all_gather(self, tensor: Tensor) -> Tensors:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            devices = [shard.device for (shard,) in shards]
            tensors = [to_device(shard, devices[0]) for (shard,) in shards]
            if tensor.dim() == 0:
                return copies(self._rows(tensors), devices)
            lengths = torch.tensor(list(map(len, tensors)), device=self._home)
            sizes = [own.tolist() for own in self.processes.all_gather(lengths)]
            joined = self.processes.all_gather(torch.cat(tensors))
            return copies([*chain(*map(torch.split, joined, sizes))], devices)

        return self._join("all_gather", (tensor,), merge, any_length=True)

    def _reduce_scatter(self, tensors: Tensors, op: ReduceOp) -> Tensor:
        def merge(lists: list[Tensors]) -> Iterable[Tensors]:
            home, shapes = lists[0][0].device, [t.shape for t in lists[0]]
            # The tensors of each member in one vector.
            members = [torch.cat([to_device(t, home).reshape(-1) for t in own]) for own in lists]
            sizes = [shape.numel() for shape in shapes]
            ranks = self._ranks_by_process(self._all_counts)
            to_process = [sum(sizes[r.start : r.stop]) for r in ranks]
            own = ranks[self._given.rank]
            if op in ("sum", "mean"):
                reduced = self._averaged(
                    members,
                    op,
                    lambda total: self.processes.reduce_scatter(total.split(to_process)),
                )
            else:
                own_values = [
                    row.split(to_process)[self._given.rank] for row in self._rows(members)
                ]
                reduced = reduce_tensors(own_values, op)
            parts = reduced.split(sizes[own.start : own.stop])
            for part, shape, given in zip(parts, shapes[own.start : own.stop], lists, strict=True):
                # A copy, because the parts share storage.
                yield (to_device(part.view(shape).clone(), given[0].device),)

        return self._join("reduce_scatter", tensors, merge, f"op={op!r}")[0]

    def _broadcast(self, tensor: Tensor, src: int) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            ranks = self._ranks_by_process(self._all_counts)
            process = next(p for p, own in enumerate(ranks) if src in own)
            index = ranks[process].index(src) if process == self._given.rank else 0
            received = self.processes.broadcast(shards[index][0], process)
            return copies([received], [shard.device for (shard,) in shards])

        return self._join("broadcast", (tensor,), merge, f"src={src}")[0]

    def _averaged(
        self, members: list[Tensor], op: ReduceOp, collective: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns the sum or the mean of all members' tensors, given those of this process."""
        if op == "sum":
            return collective(reduce_tensors(members, "sum"))
        size = sum(self._all_counts)
        if members[0].dtype is torch.float16:  # a sum may overflow
            return collective(reduce_tensors([member / size for member in members], "sum"))
        return collective(reduce_tensors(members, "sum")) / size

    def _rows(self, members: list[Tensor]) -> Tensors:
        """Gathers tensors of one shape from all members, given the tensors of this process."""
        return torch.cat(self.processes.all_gather(torch.stack(members))).unbind()

    # -- parts ---------------------------------------------------------------------------------

    def _split(self, size: int) -> Group:
        ranks = self._ranks_by_process(self._known_counts)
        starts = range(0, self.size, size)
        parts = [range(start, min(start + size, self.size)) for start in starts]
        key, state = (self._known_counts, size), state_of(self._given.process_group)

        def merge(messages: list[None]) -> list[None]:
            with state.lock:
                if key not in state.parts:
                    spans = [_span(part, ranks) for part in parts]
                    wide = [span for span in spans if len(span) > 1]
                    state.parts[key] = self._given.new_groups(wide)
            return messages

        if key not in state.parts:
            self.exchange("split", None, merge, option=str(size))
        part, own = parts[self.rank // size], ranks[self._given.rank]
        span = _span(part, ranks)
        members = _common(part, own)
        local = (self._communicator or self._refuse_copy()).part(
            members.start - own.start, members.stop - own.start
        )
        index = members.index(self.rank)
        if len(span) == 1:
            return local.group(index)
        name = f"{self._given._name}, ranks {part[0]}-{part[-1]}"
        return HybridGroup(
            local.member(index),
            ProcessGroup(state.parts[key][span], name),
            [len(_common(part, ranks[process])) for process in span],
        )

    @staticmethod
    def _ranks_by_process(counts: tuple[int, ...]) -> list[range]:
        ends = accumulate(counts)
        return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _span(part: range, ranks: list[range]) -> range:
    """Returns the processes that have members in a part, given the ranks of each process."""
    processes = [process for process, own in enumerate(ranks) if _common(part, own)]
    return range(processes[0], processes[-1] + 1)
