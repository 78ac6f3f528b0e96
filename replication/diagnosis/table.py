"""Tables of results, for a terminal and for a notebook."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of cells, and the lines before and after them. Names of layers are in backticks."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    #: The first column of numbers, which are aligned to the right.
    numbers_from: int = sys.maxsize


def as_text(table: Table) -> str:
    """Returns the table as text, with aligned columns."""
    columns = []
    for index, column in enumerate(zip(table.titles, *table.rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index >= table.numbers_from else str.ljust
        columns.append([align(cell, width) for cell in column])
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    return "\n".join([*table.before, *lines, *table.after])


def as_html(table: Table) -> str:
    """Returns the table as HTML. It sets no colors, so that it suits light and dark pages."""
    lines = []
    for tag, cells in [("th", table.titles), *(("td", row) for row in table.rows)]:
        sides = ["right" if i >= table.numbers_from else "left" for i in range(len(cells))]
        marked = [
            f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        ]
        lines.append(f"<tr>{''.join(marked)}</tr>")
    rows = f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>"
    before, after = ([f"<p>{escape(x)}</p>" for x in part] for part in (table.before, table.after))
    html = "".join(["<div>", *before, rows if table.titles else "", *after, "</div>"])
    return re.sub("`([^`]*)`", r"<code>\1</code>", html)


class ShownAsTable:
    """A result that prints as a table, and shows as a table in a notebook and in IPython."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self._table())

    def _repr_html_(self) -> str:
        return as_html(self._table())
