"""Tables of results."""

from __future__ import annotations

from replication.diagnosis.table import table


def test_text_is_aligned_and_numbers_are_aligned_to_the_right():
    text = table(["layer", "n"], [["`a`", "10"], ["`long.er`", "9"]], numbers_from=1)
    assert text.splitlines() == ["layer       n", "`a`        10", "`long.er`   9"]
