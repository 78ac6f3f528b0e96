"""The checks on every supported Python and torch. `nox -l` lists them, `nox -s lint` runs one.

`.ci/check` has their commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

# A Python that this machine lacks is skipped, with a message.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

ROOT = Path(__file__).parent
CONSTRAINTS = (ROOT / "constraints.txt").read_text("utf-8")
(NEWEST,) = re.findall(r"^torch==(.*)$", CONSTRAINTS, re.MULTILINE)

#: The Pythons for which each torch is published.
PYTHONS = {
    "2.6.0": ["3.11", "3.12", "3.13"],
    "2.9.1": ["3.11", "3.12", "3.13", "3.14"],
    NEWEST: ["3.11", "3.12", "3.13", "3.14", "3.14t"],
}


@nox.session
@nox.parametrize(
    ("python", "torch"), [(python, torch) for torch in PYTHONS for python in PYTHONS[torch]]
)
def tests(session: nox.Session, torch: str) -> None:
    """The suite, with this torch and otherwise the versions in constraints.txt."""
    constraints = Path(session.create_tmp()).resolve() / "constraints.txt"
    constraints.write_text(CONSTRAINTS.replace(f"torch=={NEWEST}", f"torch=={torch}"), "utf-8")
    session.run(".ci/check", "tests", external=True, env={"CONSTRAINTS": str(constraints)})


@nox.session
@nox.parametrize(
    "check",
    [
        nox.param(name, id=name)
        for name in re.findall(r"^ {8}(\w+)\)", (ROOT / ".ci/check").read_text("utf-8"), re.M)
        if name != "tests"
    ],
)
def check(session: nox.Session, check: str) -> None:
    """A check of `.ci/check`, with the Python that runs nox."""
    session.run(".ci/check", check, external=True)
