"""Python in another process, the programs in ``examples/``, and other people's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kit.deadlines import Deadline

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

needs_cpp_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``python`` with these arguments to its end.

    Raises:
        AssertionError: It hangs.
    """
    return run_pythons(arguments, cwd=cwd)[0]


def run_pythons(
    *calls: Sequence[str], cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Runs ``python`` with each of these arguments, at once, which saves time on several cores."""
    # torch warns when it is imported where NumPy is not installed.
    command = [sys.executable, "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    return completed(*([*command, *call] for call in calls), cwd=cwd, env=environment())


def program(name: str) -> str:
    """The path of a program in ``tests/programs``."""
    return str(ROOT / "tests" / "programs" / f"{name}.py")


def completed(
    *commands: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Runs commands at once to their ends.

    Raises:
        AssertionError: One of them hangs.
    """
    piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=cwd, env=env, **piped) for command in commands]
    try:
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process in processes
            for output in [_output_of(process)]
        ]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    deadline = Deadline()
    while True:
        try:
            return process.communicate(timeout=1)
        except subprocess.TimeoutExpired as error:
            assert not deadline.has_passed(), f"hangs: {process.args}: {error.stderr!r}"


def environment() -> dict[str, str]:
    """An environment in which Python finds the packages of this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A pytest that a test runs does not take over the options of the one that runs now.
    return {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns a new module for each test."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def load_with_progress(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As `load`, of one that shows a progress bar, whose own thread would outlive the test."""
    module = load(name, monkeypatch)
    monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
    return module


def package(name: str, extra: str = "models") -> Any:
    """Imports a package, which takes seconds, or skips the test."""
    _import_torchvision()
    return pytest.importorskip(name, reason=f"pip install '.[{extra}]'")


@lru_cache
def _import_torchvision() -> None:
    """Imports it before the packages that use it, if it is there."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:  # of the torchvision for CUDA, which lacks operators beside a CPU torch
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        import_module("torchvision")
