"""The programs in ``examples/``, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns a new module for each test."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def load_with_progress(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As `load`, of one that shows a progress bar, whose own thread would outlive the test."""
    module = load(name, monkeypatch)
    monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
    return module
