"""Tables of results."""

from __future__ import annotations

from replication.diagnosis.table import Table


def test_text_is_aligned_and_numbers_are_aligned_to_the_right():
    table = Table(["layer", "n"], [["`a`", "10"], ["`long.er`", "9"]], ["head"], ["end"], 1)
    expected = ["head", "layer       n", "`a`        10", "`long.er`   9", "end"]
    assert str(table).splitlines() == expected
