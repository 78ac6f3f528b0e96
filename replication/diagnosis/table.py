"""Tables of results, as text with aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of cells, and the lines before and after them."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    #: The first column of numbers, which are aligned to the right.
    numbers_from: int = sys.maxsize

    def __str__(self) -> str:
        columns = []
        for index, column in enumerate(zip(self.titles, *self.rows, strict=True)):
            width = max(map(len, column))
            align = str.rjust if index >= self.numbers_from else str.ljust
            columns.append([align(cell, width) for cell in column])
        lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
        return "\n".join([*self.before, *lines, *self.after])
