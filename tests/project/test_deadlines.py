"""A hang is told apart from a slow machine (`deadlines`, `conftest`)."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit import deadlines
from tests.kit.deadlines import Deadline, ends, soon
from tests.kit.programs import ROOT, completed, run_pythons

COMPUTES = "sum(i * i for i in range(10**7))"


def test_a_deadline_passes_without_progress_and_is_extended_by_it(monkeypatch):
    wall, computed = [100.0], [7.0]
    monkeypatch.setattr(deadlines, "_computed", lambda: computed[0])
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: wall[0]))
    deadline = Deadline(5)
    wall[0] += 4.9
    assert not deadline.has_passed()
    wall[0] += 0.2
    computed[0] += 0.5  # a tenth of the time
    assert not deadline.has_passed()
    wall[0] += 4.8
    assert not deadline.has_passed()
    wall[0] += 0.2
    assert deadline.has_passed()


def test_what_descendants_compute_is_progress():
    if not Path("/proc/self/stat").exists():
        pytest.skip("processor time of other processes needs /proc")
    seen = [0.0]

    def look() -> None:
        while seen[-1] < 0.1:
            seen.append(deadlines._computed_by_descendants())
            time.sleep(0.01)  # so that looking takes little of what it measures

    # A grandchild, which still runs.
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{COMPUTES}'])"
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    completed([sys.executable, "-c", code])
    assert ends(thread)


def test_a_condition_that_stays_false_is_given_up_even_if_it_computes(monkeypatch):
    monkeypatch.setattr(deadlines, "Deadline", lambda: Deadline(0.05))
    looks = iter(range(100))
    assert not soon(lambda: next(looks) < 0 or sum(range(10**6)) < 0)
    assert soon(lambda: True)


HANGING_TEST = """
import threading

def test_before():
    pass

def test_that_hangs():
    while True:
        try:
            print("captured")
            threading.Event().wait()
        except {caught}:
            pass

def test_after():
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_a_test_that_hangs_ends_with_its_stack_and_the_others_are_reported(tmp_path):
    """Long before ``faulthandler_timeout``. Where nothing ends the test, the run ends."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    folder = tmp_path / "tests"
    kit = folder / "kit"
    kit.mkdir(parents=True)
    unused = "accelerator", "kit/properties", "kit/stand_in_kernels"
    for name in ("__init__", "kit/__init__", *unused):
        (folder / f"{name}.py").touch()
    (kit / "deadlines.py").write_text(
        (ROOT / "tests" / "kit" / "deadlines.py")
        .read_text()
        .replace("TEST_STALLED = 60.0", "TEST_STALLED = 0.5")
    )
    (folder / "conftest.py").write_text(conftest)
    last_lines = {"Exception": "1 failed, 2 passed", "BaseException": "1 passed"}
    for caught in last_lines:
        (folder / f"test_{caught}.py").write_text(HANGING_TEST.format(caught=caught))
    options = ["-m", "pytest", "-p", "no:cacheprovider"]
    runs = run_pythons(*([*options, f"tests/test_{each}.py"] for each in last_lines), cwd=tmp_path)
    for done, (caught, last_line) in zip(runs, last_lines.items(), strict=True):
        assert done.returncode == 1
        printed = done.stdout + done.stderr
        assert f"test_{caught}.py::test_that_hangs hangs" in printed
        assert "in test_that_hangs" in printed
        assert last_line in done.stdout.splitlines()[-1]
