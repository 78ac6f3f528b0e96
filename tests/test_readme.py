"""What the README says can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SNIPPETS = [text for language, text in FENCED if language == "python"]


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_its_examples_run(number):
    exec(compile(SNIPPETS[number], f"README.md, example {number}", "exec"), {})


def test_the_first_example_is_eight_lines_long():
    assert len(SNIPPETS[0].split("\n\n")) == 2
    assert len([line for line in SNIPPETS[0].splitlines() if line]) == 8


def test_there_are_two_commands_to_set_up_each_of_one_line():
    commands = [text for _, text in FENCED if "pip install" in text]
    assert [command.count("\n") for command in commands] == [1, 1]
    assert all(command.startswith("python3 -m venv .venv && ") for command in commands)


def test_the_files_it_shows_exist():
    for target in re.findall(r"!\[[^]]*\]\(([^)]*)\)", README):
        assert (Path(__file__).parent.parent / target).is_file()
