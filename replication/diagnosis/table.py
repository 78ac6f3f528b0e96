"""Tables of results, as text with aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = sys.maxsize
) -> str:
    """Aligns cells under their titles: to the right from column ``numbers_from`` on."""
    columns = []
    for index, column in enumerate(zip(titles, *rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index >= numbers_from else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
