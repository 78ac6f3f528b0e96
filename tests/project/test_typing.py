"""What type checkers say of programs that use the packages."""

from __future__ import annotations

import ast
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import replication
import syncbn
from tests.kit.programs import ROOT, completed

pytestmark = pytest.mark.slow

USES, MISUSES = (ROOT / "tests" / "project" / f"typed_{name}.py" for name in ("uses", "misuses"))

#: Errors in one file: the line and the kind of each.
Errors = set[tuple[int, str]]


def mypy_errors(path: Path) -> Errors:
    # `silent`, because users see no errors in installed packages. torch's own functions are
    # partly untyped, such as `Tensor.backward`.
    options = ("--strict", "--config-file=", "--follow-imports=silent")
    options += ("--untyped-calls-exclude=torch", "--no-error-summary", "--hide-error-context")
    (done,) = completed([sys.executable, "-m", "mypy", *options, str(path)], cwd=ROOT)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    found = re.findall(r"^.*?:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert bool(found) == done.returncode, done.stdout
    return {(int(line), code) for line, code in found}


def pyright_errors(path: Path) -> Errors:
    options = ("--outputjson", "--pythonpath", sys.executable)
    (done,) = completed([sys.executable, "-m", "pyright", *options, str(path)], cwd=ROOT)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {(error["range"]["start"]["line"] + 1, error["rule"]) for error in found}


CHECKERS = pytest.mark.parametrize(
    ("errors_in", "column"),
    [
        pytest.param(mypy_errors, 0, id="mypy"),
        pytest.param(
            pyright_errors,
            1,
            id="pyright",
            marks=pytest.mark.skipif(
                find_spec("pyright") is None, reason="pyright is not installed (extra: dev)"
            ),
        ),
    ],
)


@CHECKERS
def test_uses_pass(errors_in, column):
    assert errors_in(USES) == set()


@CHECKERS
def test_misuses_fail_where_they_are(errors_in, column):
    expected = {
        (number, line.split("  # ")[1].split()[column])
        for number, line in enumerate(MISUSES.read_text("utf-8").splitlines(), 1)
        if "  # " in line
    }
    assert expected and errors_in(MISUSES) == expected


def test_uses_have_every_public_name():
    names = {n.id for n in ast.walk(ast.parse(USES.read_text("utf-8"))) if isinstance(n, ast.Name)}
    assert {*replication.__all__, *syncbn.__all__} <= names
