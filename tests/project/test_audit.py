"""The comparisons with other packages run without them, and their pages hold what they found."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from benchmarks.audit.by_hand import relation
from benchmarks.audit.settings import LIBRARIES, SETTINGS
from benchmarks.collectives.__main__ import COLUMNS, merged, row
from benchmarks.collectives.peers import PEERS, Peer
from benchmarks.collectives.probes import PROBES, in_replicas, run
from benchmarks.started import Ended, started
from tests.kit.deadlines import DEADLINE
from tests.kit.ranks import needs_gloo

ROOT = Path(__file__).parent.parent.parent
OURS = PEERS[-1]


def rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page, without headings."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("| ---"):
            found.pop()  # the heading
        elif line.startswith("| "):
            found.append(line.strip("| ").split(" | "))
    return found


# -- published losses ----------------------------------------------------------------------------


def test_the_page_has_every_setting():
    found = [cells[0].strip("`") for cells in rows("audit.md")]
    expected = [
        setting.name
        for changed in (False, True)
        for library in LIBRARIES
        for setting in SETTINGS.values()
        if setting.library == library and bool(setting.changed) is changed
    ]
    assert found == expected and len(found) >= 30


def test_every_result_was_found_twice():
    for name, verified, by_hand, _, uneven, _ in rows("audit.md"):
        assert verified == by_hand or (verified, by_hand) == ("draws", "other"), name
        assert "by hand" not in uneven or uneven.startswith("draws"), name


def test_the_second_program_does_without_this_toolkit():
    check = (
        "import sys, benchmarks.audit.by_hand; print({'replication', 'syncbn'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_second_program_tells_factors_apart():
    alone = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    found = [relation(factor * alone, alone, 3.0, 1e-6) for factor in (1.0, 0.5, 0.9)]
    assert found == ["equal", "1/2", "other"]
    # What cancels except for rounding is equal, beside gradients a thousand times as large.
    assert relation(alone * 1e-10, alone * 0, 3.0, 1e-6) == "equal"


# -- collectives ---------------------------------------------------------------------------------


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_here_are_right_by_every_probe(size):
    found = {}
    for index, probes in enumerate(PROBES):
        found |= merged(started(size, run, len(PEERS) - 1, index, seconds=DEADLINE), [*probes])
    right = ["sum", "mean", "max", "gather", "uneven", "empty", "ignored", "second"]
    assert {name: found[name] for name in right} == dict.fromkeys(right, "right")
    assert (found["warnings"], found["mismatch"], found["graph"]) == ("0", "named", "yes")
    assert in_replicas(OURS, size) == "yes"


@needs_gloo
@pytest.mark.slow
def test_a_probe_finds_a_gather_without_a_derivative():
    """The functions of torch, whose gradients of a maximum are those of no maximum."""
    ranks = started(2, run, 0, 1, seconds=DEADLINE)
    assert [rank.value for rank in ranks] == [{"max": "wrong"}] * 2


def test_a_rank_that_does_not_return_decides():
    ranks = [Ended({"gather": "right"}), Ended(how="dies")]
    assert merged(ranks, ["gather"]) == {"gather": "dies"}
    assert merged([*ranks, Ended(how="hangs")], ["gather"]) == {"gather": "hangs"}
    ranks = [Ended({"gather": text}) for text in ("right", "1/n", "right")]
    assert merged(ranks, ["gather"]) == {"gather": "right or 1/n"}


def test_a_package_that_is_not_installed_has_a_row():
    peer = Peer(
        "x's `gather`", lambda: torch.clone, library="not-installed", by_reading={"gather": "1/n"}
    )
    cells = row(peer)
    assert cells[""].startswith("x's `gather`, by reading") and cells["gather"] == "1/n"
    assert cells.keys() == {"", *COLUMNS}


def test_the_page_compares_all_collectives():
    found = defaultdict[str, list[str]](list)  # of both tables
    for name, *cells in rows("collectives-compared.md"):
        found[name] += cells
    assert len(found) == len(PEERS)
    for peer in PEERS:
        assert any(name.startswith(peer.name) for name in found), peer.name
    ours = dict(zip(COLUMNS, found[OURS.name], strict=True))
    assert ours["uneven"] == ours["empty"] == ours["max"] == "right"
