"""Verify losses and quantizers of other packages on two ranks, and print a table.

    pip install -c constraints.txt -e '.[audit]'
    python -m benchmarks.audit
    python -m benchmarks.audit lightly open_clip_torch
    python -m benchmarks.audit --write

``--write`` writes the tables into ``docs/audit.md``. A package that isn't installed is left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.audit import by_hand
from benchmarks.audit.common import Setting
from benchmarks.audit.settings import LIBRARIES, SETTINGS, made
from benchmarks.measuring import line, replaced
from replication import ReplicationError, Verification, verify_ranks

PAGE = Path(__file__).parent.parent.parent / "docs" / "audit.md"
#: Numbers of samples: shards of 4 and 4, and of 4 and 3.
EVEN, UNEVEN = 8, 7
#: Seconds that a setting may take.
PATIENCE = 120
#: What an explanation says of a factor 1/2.
HALF = re.compile(r"(every gradient is|gradients are) 1/2 of one device's")

#: What differs in uneven shards only because a wrapper averages over ranks, not over samples.
WEIGHTED = "weights of ranks"


class Result(NamedTuple):
    """What a row says of a setting."""

    even: str
    by_hand: str
    loss: str
    uneven: str


def verified(key: str, samples: int) -> tuple[str, str]:
    """What gradients and buffers are on two ranks, and the losses of one device and the ranks."""
    try:
        result = verify_ranks(partial(made, key, samples), 2, timeout=PATIENCE)
    except ValueError as error:
        if "random numbers" not in str(error):
            raise
        return "draws", ""
    except ReplicationError:  # gloo ends a process that gets fewer bytes than it expects
        return "refused", ""
    return kind_of(result), losses_of(result)


def kind_of(result: Verification) -> str:
    kinds = [kind for kind in result.differences if kind.startswith(("gradients", "buffers"))]
    wrong = [d for kind in kinds for d in result.differences[kind] if d.error > result.tolerance]
    if not wrong:
        return "equal"
    if half := HALF.search(result.explanation):
        return "1/2" if half[1] == "every gradient is" else "1/2, equal"
    _, *lines = result.explanation.splitlines()  # the first says where the difference begins
    is_weighted = bool(lines) and all("weighs the gradients" in text for text in lines)
    return WEIGHTED if is_weighted else "other"


def losses_of(result: Verification) -> str:
    """The loss on one device and on the ranks."""
    return shown(next(iter(result.losses.values())))


def shown(losses: Sequence[float]) -> str:
    alone, *ranks = (f"{value:.4g}" for value in losses)
    return f"{alone}: {', '.join(ranks)}"


def results(setting: Setting) -> Result:
    even, losses = verified(setting.key, EVEN)
    plain, values, _ = by_hand.compared(setting.key, EVEN)
    uneven, _ = verified(setting.key, UNEVEN)
    plain_uneven, *_ = by_hand.compared(setting.key, UNEVEN)
    agrees = plain_uneven == ("other" if uneven == WEIGHTED else uneven)
    return Result(
        even,
        plain,
        losses or shown(values),
        uneven if agrees else f"{uneven}; by hand {plain_uneven}",
    )


# -- tables --------------------------------------------------------------------------------------


def installed(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def lines_of(library: str, version: str, changed: bool) -> Iterator[str]:
    """The table of a library, line by line."""
    settings = [
        s for s in SETTINGS.values() if s.library == library and bool(s.changed) is changed
    ]
    if not settings:
        return
    last = "what was changed" if changed else "its documentation, in short"
    values = "loss on one device: on the ranks"
    headings = ["setting", "verify", "by hand", values, "uneven shards", last]
    yield from ("", f"### {library} {version}{', changed' * changed}", "")
    yield line(headings)
    yield line(["---"] * len(headings))
    for setting in settings:
        found = results(setting)
        about = setting.changed or setting.promise
        yield line([f"`{setting.name}`", *found, about])


def tables(libraries: Sequence[str]) -> Iterator[str]:
    yield f"Found with torch {torch.__version__}."
    for changed in (False, True):
        for library in libraries:
            version = installed(library)
            if version is None:
                yield from ("", f"{library} is not installed.")
            else:
                yield from lines_of(library, version, changed)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("libraries", nargs="*", metavar="library", help=", ".join(LIBRARIES))
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args()
    if unknown := {*options.libraries} - {*LIBRARIES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    if options.write and options.libraries:
        parser.error("--write needs all libraries: name none")
    if options.write and (missing := [name for name in LIBRARIES if installed(name) is None]):
        parser.error(f"--write needs all libraries: install {', '.join(missing)}")
    texts = []
    for text in tables(options.libraries or LIBRARIES):
        texts.append(text)
        print(text, flush=True)
    if options.write:
        PAGE.write_text(replaced(PAGE.read_text("utf-8"), "audit", "\n".join(texts)), "utf-8")


if __name__ == "__main__":
    main()
