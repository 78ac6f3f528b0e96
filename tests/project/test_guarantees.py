"""Each guarantee has tests, which name it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/guarantees.md").read_text("utf-8")
GUARANTEES = re.findall(r"^(\d)\. \*\*", PAGE.split("\n## ")[0], re.M)


@cache
def named_by_tests() -> list[str]:
    """The numbers in the first lines of the docstrings of tests."""
    found = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            is_test = isinstance(node, ast.ClassDef) or getattr(node, "name", "").startswith(
                "test"
            )
            if is_test and (text := ast.get_docstring(node)):
                found += re.findall(r"Guarantee (\d+): ", text.splitlines()[0])
    return found


@pytest.mark.parametrize("number", GUARANTEES)
def test_guarantee_has_tests(number):
    assert number in named_by_tests()


def test_tests_name_guarantees_of_the_page():
    assert len(GUARANTEES) == 8
    assert set(named_by_tests()) <= set(GUARANTEES)
