"""Verifies that ranks of torch.distributed give the numbers of one device.

    python -m replication.verify checks:make --ranks 2,3

calls `make` of `checks.py` in two, and then in three, new processes on the CPU. It returns the
arguments of `verify`, for example dict(model=net, batch=x, loss=loss, targets=t, wrap=DDP).

    torchrun --nproc-per-node=2 -m replication.verify checks:make

verifies the ranks that torchrun starts, each on its accelerator if there is one.

The exit status is 0 if all are equal, 1 if one differs or raises, and 2 if the arguments are
wrong.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module, util
from operator import attrgetter
from typing import Any

from torch import distributed

from replication._torch import destroy_group
from replication.verify.ranks import in_ranks, join_launched, verified
from replication.verify.results import Verification


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m replication.verify", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("checks", nargs="+", metavar="module:function", help="or path/to/file.py:function")
    add("--ranks", default="", help="numbers of ranks to start, such as 2,3 (default 2)")
    add("--timeout", type=float, default=300, help="seconds that each may take (default 300)")
    options = parser.parse_args(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if options.ranks:
            parser.error("leave --ranks out under torchrun, which has started the ranks")
        return _launched(options.checks, options.timeout)
    try:
        numbers = [int(number) for number in (options.ranks or "2").split(",")]
        for check in options.checks:
            found(check)
    except (ValueError, ImportError, AttributeError, OSError) as error:
        parser.error(str(error))
    if min(numbers) < 2:
        parser.error(f"--ranks must be 2 or more (got {options.ranks})")
    statuses = []
    for check in options.checks:
        for number in numbers:
            what = f"{check}, {number} ranks (cpu, gloo)"
            run = lambda: in_ranks(number, verified_check, check, timeout=options.timeout)  # noqa: B023, E731
            statuses.append(_shown(what, run))
    return max(statuses)


def _launched(checks: Sequence[str], timeout: float) -> int:
    devices, backends = join_launched(timeout)
    device, backend = devices[-1], backends[-1]
    first = distributed.get_rank() == 0
    with redirect_stdout(sys.stdout if first else io.StringIO()):
        statuses = [
            _shown(
                f"{check}, {distributed.get_world_size()} ranks ({device.type}, {backend})",
                lambda: verified(found(check), device),  # noqa: B023
            )
            for check in checks
        ]
    destroy_group(None)
    return max(statuses)


def _shown(what: str, run: Callable[[], Verification]) -> int:
    print(f"\n{what}:", flush=True)
    try:
        result = run()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1
    print(result, flush=True)
    return 0 if result else 1


def verified_check(check: str) -> Verification:
    """Runs in each rank that this command has started."""
    hidden = io.StringIO()
    with redirect_stdout(sys.stdout if distributed.get_rank() == 0 else hidden):
        return verified(found(check))


def found(check: str) -> Callable[[], Any]:
    """The function of ``module:function``, or of ``path/to/file.py:function``."""
    place, colon, name = check.rpartition(":")
    if not (colon and place and name):
        raise ValueError(f"expected module:function (got {check!r})")
    if place.endswith(".py"):
        spec: Any = util.spec_from_file_location(os.path.basename(place)[:-3], place)
        module = util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = import_module(place)
    function = attrgetter(name)(module)
    if not callable(function):
        raise ValueError(f"expected a function (got {type(function).__name__} for {check!r})")
    return function  # type: ignore[no-any-return]
