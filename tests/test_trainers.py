"""Synchronized layers in the hands of other people's trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_python

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("package", "launcher"),
    [
        ("accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
        ("lightning", []),  # which launches the second process itself
    ],
)
def test_two_processes_train_the_network_of_one(package, launcher, tmp_path):
    pytest.importorskip(package, reason=f"pip install '.[{package}]'")
    done = run_python(*launcher, str(EXAMPLES / f"with_{package}.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # the example checks its weights itself
    assert done.stdout.count("2 processes: off by") == 1
