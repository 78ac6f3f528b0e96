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
    head, *body = [
        "".join(
            f'<{tag} style="text-align: {"right" if index >= table.numbers_from else "left"}">'
            f"{_marked_up(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )
        for tag, cells in [("th", table.titles), *(("td", row) for row in table.rows)]
    ]
    rows = "".join(f"<tr>{row}</tr>" for row in body)
    shown = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if head else ""
    before, after = (
        "".join(f"<p>{_marked_up(line)}</p>" for line in lines)
        for lines in (table.before, table.after)
    )
    return f"<div>{before}{shown}{after}</div>"


def _marked_up(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


class ShownAsTable:
    """A result that prints as a table, and shows as a table in a notebook and in IPython."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self._table())

    def _repr_html_(self) -> str:
        return as_html(self._table())
