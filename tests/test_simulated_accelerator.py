"""Runs the tests marked ``accelerator`` on simulated devices, in a process of their own."""

from __future__ import annotations

import pytest

from tests import accelerator
from tests.processes import ROOT, run_python


@pytest.mark.skipif(
    accelerator.reason_to_skip() is not None, reason=accelerator.reason_to_skip() or ""
)
def test_replicas_run_on_simulated_accelerators():
    done = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--simulated-accelerator", "tests"),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
