"""Parametrizes a test by few combinations of many options: every two values meet in some case."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Like one ``parametrize`` per argument, but with pairs of values instead of all combinations.

    Defects that take three particular values at once are rare. Where all combinations of two
    arguments must meet every value of a third, stack an ordinary ``parametrize``.
    """
    values = [list(factor) for factor in factors.values()]
    rows = covering([len(factor) for factor in values])
    cases = [tuple(factor[i] for factor, i in zip(values, row, strict=True)) for row in rows]
    return pytest.mark.parametrize(tuple(factors), cases)


def covering(lengths: list[int]) -> list[tuple[int, ...]]:
    """Rows of indices below ``lengths``, in which every pair of indices of two columns occurs."""
    rows = list(product(*map(range, lengths)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.append(row)
        missing -= pairs[row]
    return chosen
