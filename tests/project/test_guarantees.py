"""Each clause of a guarantee has tests. The page names them, and they name the clause."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/guarantees.md").read_text("utf-8")
GUARANTEES = re.findall(r"^(\d)\. \*\*", PAGE, re.M)
ROWS = re.findall(r"^\| (\d[a-z]) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
#: Each clause with the files and names of its tests, as the page has them.
CLAUSES = {
    clause: {(path, name) for name, path in re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+)\)", tests)}
    for clause, _, tests in ROWS
}


def named_clauses() -> Iterator[tuple[str, tuple[str, str]]]:
    """A clause, and the file and name of a test, by the first lines of docstrings."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                first, *_ = (ast.get_docstring(node) or "").splitlines() or [""]
                for clause in re.findall(r"Clause (\w+): ", first):
                    yield clause, (path.relative_to(ROOT).as_posix(), node.name)


NAMED = list(named_clauses())


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_tests_of_a_clause_name_it(clause):
    assert CLAUSES[clause] == {test for named, test in NAMED if named == clause}


def test_each_guarantee_has_clauses_and_tests_name_no_others():
    assert len(GUARANTEES) == 8 and sorted(CLAUSES) == [clause for clause, *_ in ROWS]
    assert {clause[0] for clause in CLAUSES} == set(GUARANTEES)
    assert {clause for clause, _ in NAMED} == set(CLAUSES) and all(CLAUSES.values())
