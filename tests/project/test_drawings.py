"""The pictures of the site are described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PATHS = sorted((ROOT / "docs" / "drawings").glob("*.svg"))


def by_name(path):
    return path.stem


@pytest.mark.parametrize("path", PATHS, ids=by_name)
def test_pictures_are_shown_with_a_description(path):
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert re.search(rf"!\[[^\]]{{20,}}\]\(drawings/{path.name}\)", pages)
