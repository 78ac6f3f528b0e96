"""How everything here is measured: ways that take turns, medians, and tables of their ratios."""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import tee
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from replication import UnsynchronizedWarning

# Plain BatchNorm in replicas is what several figures are relative to.
warnings.filterwarnings("ignore", category=UnsynchronizedWarning)

#: Rounds that are left out of the medians.
WARM_UP = 2

#: Rounds that count, at least, unless they take `PATIENCE` times as long as they should.
ROUNDS = 5
PATIENCE = 5

#: Numbers of torch threads; 0 is torch's default.
THREADS = (1, 0)

#: Lets the C library keep freed memory. Page faults would drown small differences.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "100000000",
}

#: What one run of a way takes: the whole, then its parts, if any.
Figures = tuple[float, ...]


class Row(NamedTuple):
    """What each way takes on the same work. Other ways are shown as multiples of the first."""

    case: str
    #: Replicas or processes.
    count: int
    threads: int
    figures: dict[str, Figures]


class Table(NamedTuple):
    """Rows with the same ways, and what a reader must know about them."""

    title: str
    about: str
    rows: Iterable[Row]
    unit: str = "ms"
    counted: str = "replicas"


def now() -> float:
    """Seconds, after an accelerator in use has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(function: Callable[[], object]) -> Figures:
    """Milliseconds that a call takes. Its result is freed afterwards."""
    begin = now()
    result = function()
    end = now()
    del result
    return (1e3 * (end - begin),)


def alternating(
    ways: Mapping[str, Callable[[], Figures]],
    seconds: float,
    agree: Callable[[bool], bool] = bool,
) -> dict[str, Figures]:
    """Return the medians of each way.

    The ways take turns, so that all see the same machine. Rounds go on for ``seconds``, and for
    `ROUNDS` at least. A busy machine, on which a step may take many times as long, ends them at
    `PATIENCE` times ``seconds``. With 0 seconds there is a single round, which shows that
    everything runs. Processes that measure together pass ``agree``, which makes them stop in the
    same round.
    """
    taken: dict[str, list[Figures]] = {name: [] for name in ways}
    begin, rounds = time.perf_counter(), 0

    def goes_on() -> bool:
        passed = time.perf_counter() - begin
        is_short = rounds < WARM_UP + ROUNDS and passed < PATIENCE * seconds
        return rounds == 0 or passed < seconds or is_short

    while agree(goes_on()):
        for name, way in ways.items():
            taken[name].append(way())
        rounds += 1
    first = min(WARM_UP, rounds - 1)
    return {
        name: tuple(map(statistics.median, zip(*own[first:], strict=True)))
        for name, own in taken.items()
    }


def in_processes(
    count: int,
    threads: int,
    function: Callable[..., Any],
    *arguments: Any,
    keeps_memory: bool = True,
) -> Any:
    """Call ``function(rank, *arguments)`` in new processes, and return what rank 0 returns.

    ``keeps_memory`` is whether their C library keeps freed memory, which is not its default.
    """
    with (
        environment(KEEP_MEMORY if keeps_memory else {}),
        ProcessPoolExecutor(
            count, get_context("spawn"), initializer=_begin, initargs=(threads,)
        ) as pool,
    ):
        calls = [pool.submit(function, rank, *arguments) for rank in range(count)]
        # Of every rank: an error in any of them is raised here.
        first, *_ = [call.result() for call in calls]
        return first


@contextmanager
def environment(added: dict[str, str]) -> Iterator[None]:
    """Adds variables to the environment of processes that a block starts."""
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _begin(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)


def columns(table: Table, ways: Iterable[str]) -> list[str]:
    """The headings of a table."""
    unit, *others = ways
    return ["case", table.counted, "torch threads", f"{unit}, {table.unit}", *others]


def ratio(row: Row, way: str, phase: int = 0) -> str:
    """What a way takes, in multiples of the first, as it is printed."""
    unit = next(iter(row.figures.values()))
    return f"{row.figures[way][phase] / unit[phase]:.2f}"


def cells(row: Row) -> list[str]:
    """A row as text. ``1.31 (1.40, 1.20)`` is the whole and its parts."""
    (_, unit), *others = row.figures.items()
    texts = []
    for way, figures in others:
        whole, *parts = (ratio(row, way, phase) for phase in range(len(figures)))
        texts.append(f"{whole} ({', '.join(parts)})" if parts else whole)
    return [row.case, str(row.count), str(row.threads), f"{unit[0]:.2f}", *texts]


def lines(table: Table) -> Iterator[str]:
    """The table in Markdown, line by line as the rows come."""
    yield from ("", f"### {table.title}", "", table.about, "")
    for number, row in enumerate(table.rows):
        if number == 0:
            headings = columns(table, row.figures)
            yield line(headings)
            yield line(["---"] * len(headings))
        yield line(cells(row))


def line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def parser(description: str | None, seconds: float = 3) -> argparse.ArgumentParser:
    """The options that all programs here have."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="per row, warm-up included (default %(default)s)",
    )
    return made


def show(table: Table) -> Table:
    """Print a table row by row, as the rows come, and return it with all of them."""
    rows, printed = tee(table.rows)
    for line in lines(table._replace(rows=printed)):
        print(line, flush=True)
    return table._replace(rows=list(rows))


# -- pages -------------------------------------------------------------------------------------


def marked(page: str, name: str) -> tuple[str, str, str]:
    """What comes before the text between the marks of a name, this text, and what comes after."""
    before, begin, rest = page.partition(f"<!-- {name}: begin -->\n\n")
    text, end, after = rest.partition(f"\n\n<!-- {name}: end -->")
    assert begin and end, f"the page has no marks of {name}"
    return before + begin, text, end + after


def replaced(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of a name, which a run replaces."""
    before, _, after = marked(page, name)
    return before + text + after
