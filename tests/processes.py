"""Runs Python in a process of its own, with the packages of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``python`` with these arguments; a hang ends after a while."""
    return subprocess.run(
        # The warning of an import of torch where NumPy is not installed.
        [sys.executable, "-W", "ignore:Failed to initialize NumPy:UserWarning", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=cwd,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """That of a process which finds the packages of this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
