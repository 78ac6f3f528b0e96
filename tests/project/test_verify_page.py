"""The page about `verify` shows what the command prints."""

from __future__ import annotations

import re

import pytest

from replication.verify.command import main
from tests.kit.programs import ROOT
from tests.kit.ranks import needs_gloo

pytestmark = [needs_gloo, pytest.mark.slow]

PAGE = (ROOT / "docs" / "verify.md").read_text("utf-8")
PROGRAM = "\n".join(re.findall(r"^```py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
#: What is printed for the function that is defined last before it, or the end of that.
OUTPUTS = {
    re.findall(r"^def (?!test)(\w+)\(\):", PAGE[: found.start()], re.MULTILINE)[-1]: found[1]
    for found in re.finditer(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
}


def words(text: str) -> list[str]:
    """The words of a text, without numbers that torch draws or rounds."""
    return re.sub(r"\d\.\d+e[-+]\d+|\d+\.\d{2,}", "#", text).split()


def test_the_page_shows_a_difference_of_each_kind():
    assert len(OUTPUTS) == 8


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_page_shows_what_the_command_prints(name, tmp_path, capsys):
    file = tmp_path / "checks.py"
    file.write_text(PROGRAM)
    assert main([f"{file}:{name}"]) == 1
    _, printed = capsys.readouterr().out.split(" ...\n", 1)
    shown = words(OUTPUTS[name])
    assert words(printed)[-len(shown) :] == shown


def test_the_test_of_the_page_is_a_program():
    names: dict[str, object] = {}
    (test,) = re.findall(r"```py\n(# test_checks.*?)```", PAGE, re.DOTALL)
    exec(test, names)
    assert callable(names["test_two_ranks_are_one_device"])
