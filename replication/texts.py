"""Words and tables of messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence


def path_or_root(path: str) -> str:
    return path or "(root)"


def listed(numbers: Iterable[int], kind: str = "replica") -> str:
    """Returns ``"replicas 0, 2"`` for ``[0, 2]``."""
    texts = [str(number) for number in numbers]
    return f"{kind}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


def first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


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
