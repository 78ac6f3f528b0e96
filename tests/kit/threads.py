"""Calls in threads, and what each has returned or raised."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from replication.sync.lifecycle import this_thread
from tests.kit.deadlines import ends, soon


class Outcome(NamedTuple):
    """What a call has returned or raised."""

    value: Any = None
    error: BaseException | None = None


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=call())
    except BaseException as error:
        return Outcome(error=error)


#: Without it, messages do not say at which line another thread is.
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Starts and joins threads; fails where one of them hangs."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        assert ends(thread), f"{thread.name} hangs"


def together(*calls: Callable[[], Any]) -> list[Outcome]:
    """Runs each call in its own thread and returns what each returned or raised."""
    outcomes: list[Outcome] = [Outcome()] * len(calls)

    def run(index: int) -> None:
        outcomes[index] = outcome_of(calls[index])

    join_all([threading.Thread(target=run, args=(index,)) for index in range(len(calls))])
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values; raises the first error, by index."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def until_others_wait(count: int) -> None:
    """Returns, in a replica, when ``count`` other replicas wait for a message."""
    place = this_thread.current
    assert place is not None
    waits = place.rendezvous.waits
    assert soon(lambda: len(waits) >= count), "the others do not wait"


@contextmanager
def profiled(profiler: Callable[..., None]) -> Iterator[None]:
    """Calls a function at each call of a function in the block, in this thread."""
    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        yield
    finally:
        sys.setprofile(before)
