"""What the README and the pages of the site say can be run, and leads somewhere."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import replication
import syncbn

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def fenced(page):
    """The language and the text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def blocks(language):
    """All blocks of one language, each a test."""
    return [
        pytest.param(text, f"{name_of(page)}, block {number}", id=f"{name_of(page)}-{number}")
        for page in PAGES
        for number, (found, text) in enumerate(fenced(page))
        if found == language
    ]


def headings(page):
    """What the headings of a page are called in links to them."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("text", "where"), blocks("python"))
def test_examples_run(text, where):
    exec(compile(text, where, "exec"), {"__name__": "example"})


@pytest.mark.parametrize(("text", "where"), blocks("pycon"))
def test_examples_print_what_they_show(text, where):
    test = doctest.DocTestParser().get_doctest(text, {}, where, None, 0)
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_first_example_is_seven_lines_long():
    first = next(text for language, text in fenced(README) if language == "python")
    assert len(first.split("\n\n")) == 2
    assert len([line for line in first.splitlines() if line]) == 7


def test_there_are_two_commands_to_set_up_each_of_one_line():
    commands = [text for _, text in fenced(README) if "venv" in text]
    assert [command.count("\n") for command in commands] == [1, 1]
    assert all(command.startswith("python3 -m venv .venv && ") for command in commands)


def test_the_difference_of_three_lines_synchronizes():
    (diff,) = [text for language, text in fenced(README) if language == "diff"]
    lines = diff.splitlines()
    assert [line[:2] for line in lines] == ["- ", "+ ", "+ "]
    before, after = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
    before, after = before.replace("[0, 1]", "[0]"), after.replace("[0, 1]", '["cpu"] * 2')
    for code, kind in ((before, nn.DataParallel), (after, syncbn.DataParallel)):
        names = {"nn": nn, "net": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))}
        exec(code, names)
        assert type(names["model"]) is kind
    assert syncbn.verify(names["model"], torch.randn(8, 3))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]*)\)", page.read_text("utf-8")):
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.is_file(), target
        assert not heading or heading in headings(there), target


def test_the_page_of_the_examples_lists_all_of_them():
    page = ROOT / "examples" / "README.md"
    programs = {path.name for path in page.parent.iterdir() if path.suffix in (".py", ".ipynb")}
    assert set(re.findall(r"\[`(.*)`\]\(\1\)", page.read_text("utf-8"))) == programs


@pytest.mark.parametrize("package", [replication, syncbn], ids=lambda package: package.__name__)
def test_the_reference_has_all_names(package):
    page = (ROOT / "docs" / f"{package.__name__}.md").read_text("utf-8")
    described = set(re.findall(r"^\.\. auto\w+:: (.*)$", page, re.MULTILINE))
    for name in package.__all__:
        assert name in described or f"`{name}`" in page, name
