"""Runs each test file in a separate process, so that no test depends on what another file did.

`python -m tests.alone -m "not slow"` passes its arguments to pytest.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  # once, before the forks, because that takes seconds


def main(arguments: list[str]) -> int:
    failed = []
    for path in sorted(Path("tests").rglob("test_*.py")):
        print(path, flush=True)
        if (process := os.fork()) == 0:
            status = pytest.main(["-q", *arguments, str(path)])
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            failed.append(str(path))
    print("failed alone:", ", ".join(failed) or "none")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
