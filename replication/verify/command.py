"""Verifies that ranks of torch.distributed give the numbers of one device.

    python -m replication.verify checks.py:make --ranks 2,3

calls `make` of `checks.py` in two, and then in three, new processes on the CPU. It returns the
arguments of `verify`, for example dict(model=net, batch=x, loss=loss, targets=t, wrap=DDP).

    torchrun --nproc-per-node=2 -m replication.verify checks.py:make

verifies the ranks that torchrun starts, each on its accelerator if there is one.

The exit status is 0 if all are equal, 1 if one differs or raises, and 2 if the arguments are
wrong.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module, util
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import distributed

from replication._torch import destroy_group
from replication.verify.ranks import in_ranks, join_launched, verified
from replication.verify.results import Verification


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status, or exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m replication.verify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("checks", nargs="+", metavar="checks.py:make", help="a file, or module:function")
    add("--ranks", metavar="N,...", help="numbers of ranks to start, such as 2,3 (default 2)")
    add("--timeout", type=float, default=300, help="seconds that each may take (default 300)")
    options = parser.parse_args(arguments)
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_launched and options.ranks:
        parser.error("leave --ranks out under torchrun, which has started the ranks")
    try:
        numbers = [int(number) for number in (options.ranks or "2").split(",")]
        if min(numbers) < 2:
            raise ValueError(f"expected two or more ranks (got --ranks {options.ranks})")
        makes = {check: found(check) for check in options.checks}
    except Exception as error:  # such as an import of a check
        told = "".join(traceback.format_exception_only(error)).strip()
        parser.error(told.removeprefix("ValueError: "))
    if is_launched:
        return _launched(makes, options.timeout)
    return _started(options.checks, numbers, options.timeout)


def _started(checks: Sequence[str], numbers: Sequence[int], timeout: float) -> int:
    """Verifies each check in new ranks of this machine."""
    statuses = []
    for check in checks:
        for number in numbers:

            def run(check: str = check, number: int = number) -> Any:
                return in_ranks(number, verified_check, check, timeout=timeout)

            statuses.append(_shown(f"{check}, {number} ranks (cpu, gloo)", run))
    return max(statuses)


def _launched(makes: dict[str, Callable[[], Any]], timeout: float) -> int:
    """Verifies each check in the ranks of torchrun, of which this process is one."""
    devices, backends = join_launched(timeout)
    device, backend = devices[-1], backends[-1]
    where = f"{distributed.get_world_size()} ranks ({device.type}, {backend})"
    statuses = []
    with redirect_stdout(sys.stdout if distributed.get_rank() == 0 else io.StringIO()):
        for check, make in makes.items():

            def run(make: Callable[[], Any] = make) -> Verification:
                return verified(make, device)

            statuses.append(_shown(f"{check}, {where}", run))
    destroy_group(None)
    return max(statuses)


def _shown(what: str, run: Callable[[], Verification]) -> int:
    """Runs a check and prints what comes of it. Returns its status."""
    with _progress(what):
        try:
            result, text = run(), ""
        except Exception as error:
            result, text = None, "".join(traceback.format_exception(error))
    print(text or result, flush=True)
    return 0 if result else 1


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Prints what runs in a ``with`` block, and on a terminal since how many seconds."""
    is_terminal, begun, ended = sys.stdout.isatty(), time.monotonic(), threading.Event()
    print(f"\n{what} ...", end="" if is_terminal else "\n", flush=True)

    def count() -> None:
        while not ended.wait(1):
            print(f"\r{what} ... {time.monotonic() - begun:.0f} s", end="", flush=True)

    counting = threading.Thread(target=count, daemon=True)
    if is_terminal:
        counting.start()
    try:
        yield
    finally:
        ended.set()
        if is_terminal:
            counting.join()
            print(f"\r{what}: {time.monotonic() - begun:.1f} s", flush=True)


def verified_check(check: str) -> Verification:
    """Runs in each rank that this command has started."""
    with redirect_stdout(sys.stdout if distributed.get_rank() == 0 else io.StringIO()):
        return verified(found(check))


def found(check: str) -> Callable[[], Any]:
    """The function of ``module:function``, or of ``path/to/file.py:function``.

    Raises:
        ValueError: It has another form, or is no function.
        Exception: The import fails.
    """
    place, colon, name = check.rpartition(":")
    if not (colon and place and name):
        raise ValueError(f"expected checks.py:make or module:make (got {check!r})")
    module = _loaded(Path(place)) if place.endswith(".py") else import_module(place)
    function = attrgetter(name)(module)
    if not callable(function):
        raise ValueError(f"expected a function (got {type(function).__name__} for {check!r})")
    return function  # type: ignore[no-any-return]


def _loaded(path: Path) -> Any:
    """Runs a file as a module, which finds others in its folder."""
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        # Behind the others: a folder of tests may have subfolders named like installed packages.
        sys.path.append(folder)
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of replication.verify"
    spec: Any = util.spec_from_file_location(name, path)
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
