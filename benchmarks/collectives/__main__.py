"""Compare collectives with derivatives of several packages with one device, on 2 and 3 ranks.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --write

Each group of figures is found in new processes, which gloo connects, because some of them end in
an abort. ``--write`` writes the tables into ``docs/collectives-compared.md``, and needs all
packages of the extra ``audit``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.collectives.peers import PEERS, Peer
from benchmarks.collectives.probes import NONE, PROBES, in_replicas, run
from benchmarks.measuring import line, replaced
from benchmarks.started import Ended, started

PAGE = Path(__file__).parent.parent.parent / "docs" / "collectives-compared.md"
SIZES = (2, 3)
#: Seconds in which the ranks of a group of figures must end.
PATIENCE = 60

#: Columns of the two tables, with their headings: of gradients, and of what else a user meets.
GRADIENTS = {
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "gather": "gather",
    "uneven": "uneven gather",
    "empty": "empty gather",
    "ignored": "weights",
    "second": "second derivative",
}
USE = {
    "bytes": "sent in backward",
    "warnings": "warnings",
    "graph": "one graph",
    "mismatch": "mismatch",
    "replicas": "replicas",
}
COLUMNS = GRADIENTS | USE


def merged(ranks: Sequence[Ended], headings: Sequence[str]) -> dict[str, str]:
    """One result of all ranks. A rank that does not return decides."""
    for how in ("hangs", "dies"):
        if any(rank.how == how for rank in ranks):
            return dict.fromkeys(headings, how)
    texts: dict[str, list[str]] = {h: [rank.value[h] for rank in ranks] for h in headings}
    return {h: " or ".join(dict.fromkeys(found)) for h, found in texts.items()}


def results(peer: Peer) -> dict[str, str]:
    """The figures of a peer. Where they depend on the number of ranks, both are told."""
    number, found = PEERS.index(peer), dict[str, list[str]]()
    for size in SIZES:
        for index, group in enumerate(PROBES):
            headings = [*group]
            ranks = started(size, run, number, index, seconds=PATIENCE)
            for heading, text in merged(ranks, headings).items():
                found.setdefault(heading, []).append(text)
        found.setdefault("replicas", []).append(in_replicas(peer, size))
    return {heading: " and ".join(dict.fromkeys(texts)) for heading, texts in found.items()}


def row(peer: Peer) -> dict[str, str]:
    """The cells of a peer, by column. Its name has the key ``""``."""
    if peer.version is None:
        name = f"{peer.name}, by reading (not installed)"
        return {"": name, **dict.fromkeys(COLUMNS, NONE), **peer.by_reading}
    return {"": f"{peer.name} {peer.version}".strip(), **results(peer)}


def table(rows: Sequence[dict[str, str]], columns: dict[str, str]) -> str:
    lines = [["", *columns.values()], ["---"] * (1 + len(columns))]
    lines += [[cells[key] for key in ("", *columns)] for cells in rows]
    return "\n".join(line(cells) for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args()
    missing = [peer.library for peer in PEERS if peer.version is None]
    if options.write and missing:
        parser.error(f"--write needs all packages: install {', '.join(missing)}")
    rows = []
    for peer in PEERS:
        print(f"{peer.name} ...", file=sys.stderr, flush=True)
        rows.append(row(peer))
    found = [f"Found with torch {torch.__version__}.", table(rows, GRADIENTS), table(rows, USE)]
    text = "\n\n".join(found)
    print(text)
    if options.write:
        page = replaced(PAGE.read_text("utf-8"), "collectives", text)
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
