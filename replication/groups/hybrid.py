"""`HybridGroup`: collectives between all copies of a layer, in replicas times processes.

    process 0   replica 0 ──┐
                replica 1 ──┼─▶ merge ──┐
    process 1   replica 0 ──┼─▶ merge ──┼─▶ one collective ──▶ one reply for each replica
                replica 1 ──┘           ┘

The replicas of a process exchange as in a `ReplicaGroup`. The last to arrive combines their
tensors and makes the collective between processes, for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from replication._torch import count_nodes_up_to, device_of_group, keeps_graph, nodes_made
from replication.devices import current_stream, is_int, to_device, use_device
from replication.errors import ReplicationError
from replication.groups.base import Group, ReduceOp, SoloGroup, reduce_tensors
from replication.groups.call_header import check_lengths
from replication.groups.membership import state_of
from replication.groups.processes import ProcessGroup
from replication.groups.replicas import ReplicaGroup, Tensors, copies
from replication.sync.rendezvous import Rendezvous

__all__: list[str] = []

T = TypeVar("T")

#: More nodes than the replicas of a forward make. To make as many takes a tenth of a second.
_MANY_NODES = 100_000


class Forward:
    """The state that the groups of one forward share.

    All processes must call the collectives of a backward in one order, the reverse of the order in
    the forward. Autograd orders nodes by numbers that each thread counts for itself, and the
    threads of replicas are new in every forward. If a backward goes through several forwards, the
    later ones must have the larger numbers.
    """

    def __init__(self) -> None:
        #: The number of members in each process, by the group of `torch.distributed`.
        self.counts: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
        #: The largest number of a node in the latest collective.
        self.last_node = 0
        with _lock:
            last = max((forward.last_node for forward in _unfinished), default=0)
            _unfinished.add(self)
        #: The nodes of this forward's collectives have larger numbers. A caller's thread, in which
        #: a single replica runs, may have made too many nodes to catch up with.
        self.first_node = last if last <= _MANY_NODES else 0

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Encloses a collective of a backward through this forward.

        Later forwards may count from 0, unless the graph is kept for another backward. The graph
        of a backward (``create_graph=True``) is a part of this forward's graph.
        """
        with _lock:
            if not keeps_graph():
                _unfinished.discard(self)
        if not torch.is_grad_enabled() or torch.is_anomaly_enabled():
            yield
            return
        count_nodes_up_to(self.last_node if self.last_node <= _MANY_NODES else 0)
        yield
        self.made_nodes()

    def made_nodes(self) -> None:
        """Notes that this thread has made nodes of the forward."""
        with _lock:
            self.last_node = max(self.last_node, nodes_made())


_lock = threading.RLock()
#: The forwards through whose graphs a backward may still go.
_unfinished: WeakSet[Forward] = WeakSet()
_forwards: WeakKeyDictionary[Rendezvous, Forward] = WeakKeyDictionary()


def _forward_of(rendezvous: Rendezvous) -> Forward:
    with _lock:
        if rendezvous not in _forwards:
            _forwards[rendezvous] = Forward()
        return _forwards[rendezvous]


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
        self, local: ReplicaGroup, processes: ProcessGroup, counts: tuple[int, ...] | None = None
    ) -> None:
        # Not super().__init__, which sets `rank` and `size`.
        self._local = local
        self._communicator = local._communicator
        self._rendezvous = local._rendezvous
        self._replica = local._replica
        #: The processes that the layer is limited to, and this one's rank among them.
        self._all, self._process = processes, processes.rank
        self._connected = None if counts is None else processes
        self._counts = counts
        outer = local._rendezvous and local._rendezvous.outer
        if outer is not None and (outer.size or 0) > 1:
            raise ReplicationError(
                f"{self._where()}: a DataParallel inside a replica of another one, in several "
                "processes, has no group; replicate once, on the outside"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process={self._process}, replica={self._replica})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HybridGroup cannot be copied: it connects the replicas of one forward")

    def _where(self) -> str:
        path = self._communicator.path if self._communicator else ""
        return f"`{path}`, process {self._process}, replica {self._replica}"

    @property
    def processes(self) -> ProcessGroup:
        """The processes, for the thread that merges. The first use is a collective."""
        if torch.is_grad_enabled() and not torch.is_anomaly_enabled():
            count_nodes_up_to(self._forward.first_node)
        if self._connected is None:
            self._connected = self._all.twin()
        self._connected.around_backward = self._forward.in_backward
        return self._connected

    @property
    def _forward(self) -> Forward:
        return _forward_of(self._rendezvous or self._refuse_copy())

    def exchange(self, *args: Any, requires_grad: bool = False, **options: Any) -> Any:
        """Sends a message and returns the reply (see `ReplicaGroup.exchange`).

        ``merge`` gets the messages of this process's replicas and may call `processes`.
        """
        reply = super().exchange(*args, requires_grad=requires_grad, **options)
        if requires_grad:
            self._forward.made_nodes()
        return reply

    # -- ranks ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Finds ``rank`` and ``size`` when they are first read."""
        if name not in ("rank", "size"):
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
        counts = self._known_counts()
        first = sum(counts[: self._process])
        vars(self).update(rank=first + self._local.rank, size=sum(counts))
        return vars(self)[name]

    def _known_counts(self) -> tuple[int, ...]:
        """Returns the number of members in each process. All replicas call it."""
        if self._counts is None:
            self._counts = self._forward.counts.get(self._all.process_group)
        if self._counts is None:
            self._counts = self.exchange(
                "size", self._home(), lambda homes: [self._exchanged_counts(homes[0])] * len(homes)
            )
        return self._counts

    def _exchanged_counts(self, home: torch.device) -> tuple[int, ...]:
        """Returns the number of members in each process. The thread that merges calls it."""
        if self._counts is None:
            known, process_group = self._forward.counts, self._all.process_group
            if process_group not in known:
                own = torch.tensor([self._local.size], device=self._home(home))
                counts = self.processes.exchange("size", own, stack=True).flatten().tolist()
                check_lengths(counts, 1, self._where())
                known[process_group] = tuple(counts)
            self._counts = known[process_group]
        return self._counts

    def _home(self, of_first: torch.device | None = None) -> torch.device:
        """Returns the device for numbers that travel between processes.

        It is the CPU or, with a backend that has none, the device of the first replica. NCCL must
        not see another device in each call, depending on which replica merges.
        """
        own = device_of_group(self._all.process_group)
        return own if of_first is None or own.type == "cpu" else of_first

    # -- collectives ---------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when all members have called it."""

        def merge(homes: list[torch.device]) -> list[torch.device]:
            with use_device(homes[0], current_stream(homes[0])):
                self.processes.barrier()
            return homes

        self.exchange("barrier", self._home(), merge)

    def all_gather_object(self, obj: T) -> tuple[T, ...]:
        """Returns copies of the objects of all members, in the order of their ranks.

        The objects are pickled (see `ProcessGroup.all_gather_object`), and the copies are the same
        for all replicas of a process.
        """

        def merge(messages: list[tuple[torch.device, T]]) -> list[tuple[T, ...]]:
            home = messages[0][0]
            with use_device(home, current_stream(home)):
                lists = self.processes.all_gather_object([own for _, own in messages])
            return [tuple(chain(*lists))] * len(messages)

        gathered: tuple[T, ...] = self.exchange("all_gather_object", (self._home(), obj), merge)
        return gathered

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
            lengths = torch.tensor(list(map(len, tensors)), device=self._home(devices[0]))
            sizes = [own.tolist() for own in self.processes.all_gather(lengths)]
            if is_vector := tensor.dim() == 1:  # torch.cat drops empty vectors from the graph
                tensors = [vector.unsqueeze(1) for vector in tensors]
            joined = self.processes.all_gather(torch.cat(tensors))
            entries = [*chain(*(rows.split(own) for rows, own in zip(joined, sizes, strict=True)))]
            return copies([e.squeeze(1) for e in entries] if is_vector else entries, devices)

        return self._join("all_gather", (tensor,), merge, any_length=True)

    def _reduce_scatter(self, tensors: Tensors, op: ReduceOp) -> Tensor:
        def merge(lists: list[Tensors]) -> Iterable[Tensors]:
            home, shapes = lists[0][0].device, [t.shape for t in lists[0]]
            # The tensors of each member in one vector.
            members = [torch.cat([to_device(t, home).reshape(-1) for t in own]) for own in lists]
            sizes = [shape.numel() for shape in shapes]
            ranks = self._ranks_by_process(self._exchanged_counts(home))
            to_process = [sum(sizes[r.start : r.stop]) for r in ranks]
            own = ranks[self._process]
            if op in ("sum", "mean"):
                reduced = self._averaged(
                    members,
                    op,
                    lambda total: self.processes.reduce_scatter(total.split(to_process)),
                )
            else:
                own_values = [row.split(to_process)[self._process] for row in self._rows(members)]
                reduced = reduce_tensors(own_values, op)
            parts = reduced.split(sizes[own.start : own.stop])
            for part, shape, given in zip(parts, shapes[own.start : own.stop], lists, strict=True):
                # A copy, because the parts share storage.
                yield (to_device(part.view(shape).clone(), given[0].device),)

        return self._join("reduce_scatter", tensors, merge, f"op={op!r}")[0]

    def _broadcast(self, tensor: Tensor, src: int) -> Tensor:
        def merge(shards: list[Tensors]) -> Iterable[Tensors]:
            ranks = self._ranks_by_process(self._exchanged_counts(shards[0][0].device))
            process = next(p for p, own in enumerate(ranks) if src in own)
            index = ranks[process].index(src) if process == self._process else 0
            received = self.processes.broadcast(shards[index][0], process)
            return copies([received], [shard.device for (shard,) in shards])

        return self._join("broadcast", (tensor,), merge, f"src={src}")[0]

    def _averaged(
        self, members: list[Tensor], op: ReduceOp, collective: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns the sum or the mean of all members' tensors, given those of this process."""
        if op == "sum":
            return collective(reduce_tensors(members, "sum"))
        size = sum(self._exchanged_counts(members[0].device))
        if members[0].dtype is torch.float16:  # a sum may overflow
            return collective(reduce_tensors([member / size for member in members], "sum"))
        return collective(reduce_tensors(members, "sum")) / size

    def _rows(self, members: list[Tensor]) -> Tensors:
        """Gathers tensors of one shape from all members, given the tensors of this process."""
        return torch.cat(self.processes.all_gather(torch.stack(members))).unbind()

    # -- parts ---------------------------------------------------------------------------------

    def split(self, size: int) -> Group:
        """Divides the group into parts of ``size`` ranks, which may span processes.

        All members must pass the same ``size``. With 1 it waits for no other member.
        """
        return SoloGroup() if is_int(size) and size == 1 else super().split(size)

    def _split(self, size: int) -> Group:
        ranks = self._ranks_by_process(self._known_counts())
        starts = range(0, self.size, size)
        parts = [range(start, min(start + size, self.size)) for start in starts]
        key, state = (self._known_counts(), size), state_of(self._all.process_group)

        def merge(messages: list[None]) -> list[None]:
            with state.lock:
                if key not in state.parts:
                    spans = [_span(part, ranks) for part in parts]
                    wide = [span for span in spans if len(span) > 1]
                    # Only neighbors have a process in common.
                    groups = self._all.new_groups(wide[::2]) | self._all.new_groups(wide[1::2])
                    state.parts[key] = groups
            return messages

        if key not in state.parts:
            self.exchange("split", None, merge, option=str(size))
        part, own = parts[self.rank // size], ranks[self._process]
        span = _span(part, ranks)
        members = _common(part, own)
        local = (self._communicator or self._refuse_copy()).part(
            members.start - own.start, members.stop - own.start
        )
        index = members.index(self.rank)
        if len(span) == 1:
            return local.group(index)
        name = f"{self._all._name}, ranks {part[0]}-{part[-1]}"
        return HybridGroup(
            local.member(index),
            ProcessGroup(state.parts[key][span], name),
            tuple(len(_common(part, ranks[process])) for process in span),
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
