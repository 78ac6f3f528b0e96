"""Tables of results, for a terminal and for a notebook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple


class Table(NamedTuple):
    """Rows of cells, and the lines before and after them. Names of layers are in backticks."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    #: The first column of numbers, which are aligned to the right. None if there is none.
    numbers_from: int | None = None

    def text(self) -> str:
        lines = [self.titles, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = (
            "  ".join(
                cell.rjust(width) if self._is_number(column) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )
        return "\n".join([*self.before, *map(str.rstrip, table), *self.after])

    def html(self) -> str:
        """Returns the table as HTML. It sets no colors, so that it suits light and dark pages."""
        table = ""
        if self.rows:
            head, body = self._row("th", self.titles), [self._row("td", row) for row in self.rows]
            table = f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
        return f"<div>{_paragraphs(self.before)}{table}{_paragraphs(self.after)}</div>"

    def _row(self, tag: str, cells: Sequence[str]) -> str:
        sides = ["right" if self._is_number(column) else "left" for column in range(len(cells))]
        columns = (
            f'<{tag} style="text-align: {side}">{_marked_up(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(columns)}</tr>"

    def _is_number(self, column: int) -> bool:
        return self.numbers_from is not None and column >= self.numbers_from


class ShownAsTable:
    """A result that prints as a table, and shows as a table in a notebook and in IPython."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Shows the text instead of the ``repr``, in IPython and where a page has no HTML."""
        return {"text/plain": str(self)}


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{_marked_up(line)}</p>" for line in lines)


def _marked_up(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
