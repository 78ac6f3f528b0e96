"""The pictures of the site are as the script draws them, and described."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PATHS = sorted((ROOT / "docs" / "drawings").glob("*.svg"))


def by_name(path):
    return path.stem


def test_committed_pictures_are_as_the_script_draws_them():
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    assert {path: path.read_text("utf-8") for path in PATHS} == drawings.files()


@pytest.mark.parametrize("path", PATHS, ids=by_name)
def test_pictures_are_shown_with_a_description(path):
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert re.search(rf"!\[[^\]]{{20,}}\]\(drawings/{path.name}\)", pages)
