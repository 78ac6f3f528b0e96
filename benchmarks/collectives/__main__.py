"""Compare collectives with derivatives of several packages with one device, on 2 and 3 ranks.

    python -m benchmarks.collectives
    python -m benchmarks.collectives --write

Each group of figures is found in new processes, which gloo connects, because some of them end in
an abort. ``--write`` writes the table into ``docs/collectives-compared.md``, and needs all
packages of the extra ``audit``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.__main__ import replaced
from benchmarks.collectives.peers import PEERS, Peer
from benchmarks.collectives.probes import NONE, PROBES, in_replicas, run
from benchmarks.measuring import line
from benchmarks.started import Ended, started

PAGE = Path(__file__).parent.parent.parent / "docs" / "collectives-compared.md"
SIZES = (2, 3)
#: Seconds in which the ranks of a group of figures must end.
PATIENCE = 60

#: Columns in the order of the table, with their headings.
COLUMNS = {
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "gather": "gather",
    "uneven": "uneven gather",
    "empty": "empty gather",
    "ignored": "weights",
    "second": "second derivative",
    "bytes": "sent in backward",
    "warnings": "warnings",
    "graph": "one graph",
    "mismatch": "mismatch",
    "replicas": "replicas",
}


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


def row(peer: Peer) -> str:
    if peer.version is None:
        known = peer.by_reading
        cells = [known.get(heading, NONE) for heading in COLUMNS]
        return line([f"{peer.name}, by reading (not installed)", *cells])
    name = f"{peer.name} {peer.version}".strip()
    found = results(peer)
    return line([name, *(found[heading] for heading in COLUMNS)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    missing = [peer.library for peer in PEERS if peer.version is None]
    if options.write and missing:
        parser.error(f"--write needs all packages: install {', '.join(missing)}")
    headings = ["", *COLUMNS.values()]
    texts = [
        f"Found with torch {torch.__version__}.\n",
        line(headings),
        line(["---"] * len(headings)),
    ]
    print("\n".join(texts), flush=True)
    for peer in PEERS:
        texts.append(row(peer))
        print(texts[-1], flush=True)
    if options.write:
        page = replaced(PAGE.read_text("utf-8"), "collectives", "\n".join(texts))
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
