"""Trains models on replicas for long, among faults and delays, and counts what is left over.

    python -m tests.soak --steps 10000

Each step takes 1 to 8 replicas and a batch of any size. In some an error strikes somewhere,
replicas go different ways, threads share a model, or the caller drops what it has got. A step that
nothing has struck gives the numbers of torch's layers on one device; what has struck is the error
that arrives. Threads, tensors, queues and rendezvous do not grow in number.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import threading
import time
from collections import Counter
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicasDiverged, patch_replication_callback
from replication.sync.rendezvous import Rendezvous
from syncbn import SynchronizedBatchNorm1d
from tests.deadlines import soon
from tests.faults import Fault, assert_next_step_is_exact, faulty, twin_of
from tests.layers import AsTorchDoes, Repeat, outcome_of, together, values

#: At most so many replicas.
MOST = 8

#: Where an error may strike; see `faults.faulty`.
PLACES = [
    *("before", "pre-hook", "in", "hook", "between", "after", "master"),
    *(f"{when}, {where}" for when in ("callback", "backward") for where in ("before", "after")),
]

#: Seconds after which a step counts as hung.
HANG = 600


class Struck(Exception):
    """That of a fault."""


class Strike(Fault):
    """Says whether it has."""

    has_struck = False

    def act(self) -> None:
        self.has_struck = True
        super().act()


class Soak:
    """Some models and what happens to them."""

    def __init__(self, seed: int = 0, models: int = 3) -> None:
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._nets = [self._delayed(faulty(Strike("nowhere", 0))) for _ in range(models)]
        for net in range(models):  # what the first use makes, once and for all
            self.threads(net, 2, 4)
            self.step(net, MOST, MOST, ours=True)
        self.counts.clear()
        self._least = self.census()

    def _delayed(self, net: nn.Module) -> nn.Module:
        for layer in net.modules():
            layer.register_forward_pre_hook(lambda *_: self._delay())
        return net

    def _delay(self) -> None:
        if self._chance.random() < 0.05:
            time.sleep(self._chance.random() / 5000)

    def _model(self, net: nn.Module, replicas: int, ours: bool) -> nn.Module:
        if ours:
            return DataParallel(net, ["cpu"] * replicas)
        model = AsTorchDoes(net, replicas)
        patch_replication_callback(model)
        return model

    def _batch(self, samples: int) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.randn(samples, size, generator=self._generator, dtype=torch.float64)
            for size in (3, 2)
        )

    # -- what may happen -----------------------------------------------------------------------

    def step(self, net: int, replicas: int, samples: int, ours: bool) -> None:
        """A forward and a backward; exact."""
        model = self._nets[net]
        run = self._model(model, replicas, ours)
        assert_next_step_is_exact(run, model, twin_of(model), self._batch(samples))
        self.counts["exact steps"] += 1

    def strike(
        self, net: int, replicas: int, samples: int, ours: bool, place: str, replica: int
    ) -> None:
        """The same with an error somewhere, if that replica runs."""
        model = self._nets[net]
        fault = Strike(place, replica, Struck(place))
        self._set(model, fault)
        run = self._model(model, replicas, ours)
        twin = twin_of(model)
        batch = self._batch(samples)
        error = outcome_of(lambda: assert_next_step_is_exact(run, model, twin, batch)).error
        assert error is (fault.error if fault.has_struck else None)
        self.counts["errors that have arrived" if fault.has_struck else "exact steps"] += 1
        fault.active = False
        del error, fault.error

    def _set(self, model: nn.Module, fault: Fault) -> None:
        for layer in model.modules():
            if hasattr(layer, "fault"):
                layer.fault = fault

    def diverge(self, replicas: int, samples: int, calls: list[int]) -> None:
        """Replicas call a layer so many times each; that is an error unless all agree."""
        net = nn.Sequential(nn.Linear(3, 3), Repeat(SynchronizedBatchNorm1d(3), calls)).double()
        x, _ = self._batch(samples)
        outcome = outcome_of(lambda: DataParallel(net, ["cpu"] * replicas)(x))
        running = len(x.chunk(replicas))
        if running > 1 and len({*calls[:running]}) > 1:
            assert isinstance(outcome.error, ReplicasDiverged), outcome
            self.counts["divergences named"] += 1
        else:
            values([outcome])
            self.counts["forwards"] += 1

    def threads(self, net: int, callers: int, samples: int) -> None:
        """Several threads share one model; each gets its own numbers."""
        model = self._nets[net]
        shared, twin = self._model(model, 3, ours=True), twin_of(model)
        batches = [self._batch(samples) for _ in range(callers)]

        def numbers(run: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            x = x.clone().requires_grad_()
            y = run(x)
            return y.detach(), *torch.autograd.grad(y, x, dy)

        found = values(together(*(lambda b=b: numbers(shared, *b) for b in batches)))
        for batch, ours in zip(batches, found, strict=True):
            torch.testing.assert_close(ours, numbers(twin, *batch), rtol=1e-10, atol=1e-12)
        self.counts["exact steps"] += callers

    def drop(self, net: int, replicas: int, samples: int) -> None:
        """A graph is dropped without a backward."""
        x, _ = self._batch(samples)
        self._model(self._nets[net], replicas, ours=True)(x.requires_grad_())
        self.counts["graphs dropped"] += 1

    # -- what is left --------------------------------------------------------------------------

    def census(self) -> Counter[str]:
        """How many there are of what could be left over."""
        # The engine keeps what a failed backward has left to do until the next one.
        torch.ones((), requires_grad=True).backward()
        gc.collect()
        kinds = (Rendezvous, SimpleQueue, Tensor)
        found: Counter[str] = Counter(threads=threading.active_count())
        for thing in gc.get_objects():
            for kind in kinds:
                if issubclass(type(thing), kind):
                    found[kind.__name__] += 1
        return found

    def assert_nothing_is_left(self) -> None:
        """Waits, as workers let go of a call right after it has ended."""
        assert soon(lambda: not self.left()), f"left: {dict(self.left())}"

    def left(self) -> Counter[str]:
        """How many more things there are than before the first step."""
        return self.census() - self._least

    def at_random(self) -> None:
        """One of the above."""
        chance = self._chance
        net, replicas = chance.randrange(len(self._nets)), chance.randint(1, MOST)
        samples, ours = chance.randint(2, 2 * MOST), chance.random() < 0.8
        kind = chance.random()
        if kind < 0.45:
            self.step(net, replicas, samples, ours)
        elif kind < 0.8:
            place, replica = chance.choice(PLACES), chance.randrange(replicas)
            self.strike(net, replicas, samples, ours, place, replica)
        elif kind < 0.9:
            self.diverge(replicas, samples, [chance.choice((1, 1, 1, 2, 0)) for _ in range(MOST)])
        elif kind < 0.95:
            self.threads(net, chance.randint(2, 4), samples)
        else:
            self.drop(net, replicas, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(options.seed)
    for step in range(1, options.steps + 1):
        faulthandler.dump_traceback_later(HANG, exit=True)
        soak.at_random()
        if step % 500 == 0 or step == options.steps:
            soak.assert_nothing_is_left()
            counts = ", ".join(f"{count} {what}" for what, count in sorted(soak.counts.items()))
            print(f"step {step}: {counts}; left: {dict(soak.census())}", flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
