"""How long replicas wait for each other: one exchange of ours to one of an acknowledged kind.

In an exchange each slave sends a message, the master makes the replies, and each slave gets its
own. Its latency is the time from the last message, when all replicas have come, to the reply: to
the master's own, or to the last of all. Between exchanges replicas have work to do, as those of a
network have, or else («back to back») nothing at all.

The other kind is that of older toolkits: all messages go through one queue, each reply through a
condition of its slave, and then each slave acknowledges through the queue that it has its reply.
(So each layer has a queue of its own, and exchanges once in a forward: else the next message of
one slave may overtake the acknowledgement of another.)

    SyncMaster   `replication.SyncMaster`, which has the interface of the other kind
    exchange     `replication.ReplicaGroup.exchange`, which collectives and layers are made of

The replicas of all ways run in fresh threads that start together.

    python -m benchmarks.rendezvous
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from queue import Queue
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.measuring import WARM_UP, Row, p99, replica_counts, run
from replication import (
    ReplicaAware,
    ReplicaGroup,
    SyncMaster,
    execute_replication_callbacks,
    replicate,
)

#: Of one start of the threads.
EXCHANGES = 50

#: Seconds that they may take.
DEADLINE = 30.0


class AcknowledgedResult:
    """One slot between two threads."""

    def __init__(self) -> None:
        self._result: Any = None
        self._lock = threading.Lock()
        self._has_come = threading.Condition(self._lock)

    def put(self, result: Any) -> None:
        with self._lock:
            assert self._result is None, "the previous result has not been fetched"
            self._result = result
            self._has_come.notify()

    def get(self) -> Any:
        with self._lock:
            if self._result is None:
                self._has_come.wait()
            result, self._result = self._result, None
            return result


class AcknowledgedMaster:
    """The other kind."""

    def __init__(self, callback: Callable[[Sequence[tuple[int, Any]]], Iterable[Any]]) -> None:
        self._callback = callback
        self._queue: Queue[Any] = Queue()
        self._results: dict[int, AcknowledgedResult] = {}

    def register_slave(self, identifier: int) -> AcknowledgedSlave:
        self._results[identifier] = AcknowledgedResult()
        return AcknowledgedSlave(identifier, self._queue, self._results[identifier])

    def run_master(self, message: Any) -> Any:
        messages = [(0, message)]
        messages.extend(self._queue.get() for _ in self._results)
        (_, own), *others = self._callback(messages)
        for identifier, reply in others:
            self._results[identifier].put(reply)
        for _ in self._results:
            assert self._queue.get() is True
        return own


class AcknowledgedSlave:
    """Its other end."""

    def __init__(self, identifier: int, queue: Queue[Any], result: AcknowledgedResult) -> None:
        self._identifier = identifier
        self._queue = queue
        self._result = result

    def run_slave(self, message: Any) -> Any:
        self._queue.put((self._identifier, message))
        reply = self._result.get()
        self._queue.put(True)
        return reply


def merge(messages: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Replies to each with its own message."""
    return list(messages)


class Piped(nn.Module):
    """Exchanges through a master and its slaves, which the callback connects."""

    def __init__(self, master: Callable[[Any], Any]) -> None:
        super().__init__()
        self._master = master

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.sync_master = self._master(merge)
            self.exchange = ctx.sync_master.run_master
        else:
            self.exchange = ctx.sync_master.register_slave(copy_id).run_slave


class Grouped(ReplicaAware, nn.Module):
    """Exchanges through the group of its copies."""

    def exchange(self, message: Any) -> Any:
        group = self.group
        assert isinstance(group, ReplicaGroup)
        return group.exchange("exchange", message, list)


class Network(nn.Module):
    """Many layers, each of which exchanges messages once."""

    def __init__(self, layer: Callable[[], nn.Module], works: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(WARM_UP + EXCHANGES))
        self.works = works

    def forward(self, barrier: threading.Barrier, stamps: list[tuple[float, float]]) -> None:
        ends: list[Any] = [layer.exchange for layer in self.layers]
        work = torch.zeros(200_000)  # for a tenth of a millisecond or so
        barrier.wait()
        for message, exchange in enumerate(ends):
            if self.works:
                work.exp()
            sent = time.perf_counter()
            exchange(message)
            stamps.append((sent, time.perf_counter()))


#: The other kind is the last.
WAYS: dict[str, Callable[[], nn.Module]] = {
    "SyncMaster": partial(Piped, SyncMaster),
    "exchange": Grouped,
    "acknowledged": partial(Piped, AcknowledgedMaster),
}


class Latency(NamedTuple):
    """Of one exchange, in seconds."""

    master: float
    all: float


def exchanges(layer: Callable[[], nn.Module], replicas: int, works: bool) -> list[Latency]:
    """The latencies of some exchanges."""
    copies = replicate(Network(layer, works), ["cpu"] * replicas)
    execute_replication_callbacks(copies)
    barrier = threading.Barrier(replicas)
    stamps: list[list[tuple[float, float]]] = [[] for _ in copies]
    threads = [
        threading.Thread(target=copy, args=(barrier, own), daemon=True)
        for copy, own in zip(copies, stamps, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a replica hangs"
    of_exchange = zip(*(own[WARM_UP:] for own in stamps), strict=True)
    return [
        Latency(
            *(
                last - max(sent for sent, _ in own)
                for last in (own[0][1], max(end for _, end in own))
            )
        )
        for own in of_exchange
    ]


def latencies(replicas: int, rounds: int, works: bool) -> dict[str, list[Latency]]:
    """Those of all exchanges of each way; the ways take turns."""
    times: dict[str, list[Latency]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, layer in WAYS.items():
            times[way].extend(exchanges(layer, replicas, works))
    return times


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    figures: dict[str, dict[int, float]] = {}
    for works, replicas in product((True, False), replica_counts(quick)):
        *ours, (_, theirs) = latencies(replicas, steps, works).items()
        for (way, times), where in product(ours, Latency._fields):
            own, other = ([getattr(t, where) for t in kind] for kind in (times, theirs))
            for name, of in (("p50", statistics.median), ("p99", p99)):
                case = f"{way}, {where}, {name}" + ("" if works else ", back to back")
                figures.setdefault(case, {})[replicas] = of(own) / of(other)
    for case, of_case in figures.items():
        yield Row("rendezvous", case, of_case, goal=0.33)


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
