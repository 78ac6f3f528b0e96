"""What records exchanges and waits: reports of how long replicas wait, and profiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch.autograd.profiler import record_function

from replication._torch import is_profiling

#: Returns a context manager that records an exchange or a wait, given ``"exchange"`` or
#: ``"wait"``, the replica and the path.
Observe = Callable[[str, int, str], AbstractContextManager[object]]


#: Reports whose blocks are open. Adding and removing one are single operations.
open_reports: set[Any] = set()


def observer(size: int) -> Observe | None:
    """The observer of a forward of ``size`` replicas, or None if it is not observed."""
    reports, profiles = list(open_reports), is_profiling()
    if not reports and not profiles:
        return None
    for report in reports:
        report.add_forward(size)

    def observe(what: str, replica: int, path: str) -> AbstractContextManager[object]:
        # Not a `contextlib.contextmanager`, for the reason that `ForwardScope` gives.
        stack = ExitStack()
        if profiles:
            stack.enter_context(record_function(f"{what} {path}, replica {replica}"))
        begin = time.perf_counter()

        def end() -> None:
            # Only a part of an exchange is a wait.
            seconds = time.perf_counter() - begin if what == "wait" else 0.0
            for report in reports:
                report.add(path, replica, seconds, calls=int(what == "exchange"))

        stack.callback(end)
        return stack

    return observe
