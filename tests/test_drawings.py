"""The pictures of the site are as the script draws them, and legible on a phone."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "docs" / "drawings").glob("*.svg"))


def by_name(path):
    return path.stem


def numbers(element, *names):
    return [float(element.get(name, "0")) for name in names]


def test_committed_pictures_are_as_the_script_draws_them():
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    assert {path: path.read_text("utf-8") for path in PATHS} == drawings.files()


@pytest.mark.parametrize("path", PATHS, ids=by_name)
def test_text_is_legible_at_a_width_of_360_pixels(path):
    picture = ElementTree.parse(path).getroot()
    scale = 360 / float(picture.get("viewBox").split()[2])
    sizes = [float(e.get("font-size")) for e in picture.iter() if e.get("font-size")]
    assert sizes
    assert min(sizes) * scale >= 11


@pytest.mark.parametrize("path", PATHS, ids=by_name)
def test_everything_is_on_the_background(path):
    picture = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, picture.get("viewBox").split())
    background, *rectangles = picture.findall(".//{*}rect")
    assert background.get("fill") == "#ffffff"
    assert numbers(background, "x", "y", "width", "height") == [0, 0, width, height]
    points = [
        tuple(map(float, point.split(",")))
        for line in picture.findall(".//{*}polyline")
        for point in line.get("points").split()
    ]
    for rectangle in rectangles:
        x, y, across, down = numbers(rectangle, "x", "y", "width", "height")
        points += [(x, y), (x + across, y + down)]
    for text in picture.findall(".//{*}text"):
        x, y = numbers(text, "x", "y")
        # Letters of the widest usual fonts are 0.65 times as wide as high.
        across = 0.65 * 12 * len(text.text)
        start = x if text.get("text-anchor") == "start" else x - across / 2
        points += [(start, y - 12), (start + across, y + 4)]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


@pytest.mark.parametrize("path", PATHS, ids=by_name)
def test_pictures_are_shown_with_a_description(path):
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert re.search(rf"!\[[^\]]{{20,}}\]\(drawings/{path.name}\)", pages)
