"""Runs tests marked ``accelerator`` on simulated devices, in a separate process.

`.ci/run` runs all of them, which takes minutes. Here are the quick ones that are about devices.
"""

from __future__ import annotations

import pytest

from tests import accelerator
from tests.processes import ROOT, run_python

pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    accelerator.reason_to_skip() is not None, reason=accelerator.reason_to_skip() or ""
)
def test_replicas_run_on_simulated_accelerators():
    done = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--simulated-accelerator"),
        *("tests/accelerator", "tests/test_accelerators.py", "-m", "not slow"),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
