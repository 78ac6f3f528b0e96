"""Makes Markdown of what docstrings have that is none: doctests, literal blocks, our names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent

#: From a prompt to the next empty line.
DOCTEST = re.compile(r"(?m)^( *)(>>> .*(?:\n *\S.*)*)")
#: A line that ends in ``::``, and what is indented below it.
LITERAL = re.compile(r"(?m)^( *)(\S.*?)(\.? ?)::\n((?:\n|\1    .*(?:\n|$))+)")
#: In single backticks; of a package as it is imported, or a name that a package has.
NAME = re.compile(r"(?<!`)`(?:replication\.|syncbn\.)?(\w+)((?:\.\w+)*)`(?!`)")


class Docstrings(griffe.Extension):
    """Changes each docstring of a package that has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring with fences around its code, and links for its names."""
    text = NAME.sub(_link, text)
    text = LITERAL.sub(_fenced, text)
    return DOCTEST.sub(r"\n\1```pycon\n\1\2\n\1```", text)


def _fenced(match: re.Match[str]) -> str:
    margin, line, end, code = match.groups()
    block = indent(f"```python\n{dedent(code).strip()}\n```\n\n", margin)
    return f"{margin}{line}{end.strip() or ':'}\n\n{block}"


def _link(match: re.Match[str]) -> str:
    path = _paths().get(match[1])
    return f"[{match[0]}][{path}{match[2]}]" if path else match[0]


def _is_file(package: griffe.Object | griffe.Alias, name: str) -> bool:
    return isinstance(package.members[name], griffe.Module)


@cache
def _paths() -> dict[str, str]:
    """Of each public name; of those that both packages have, that in the one it is from."""
    packages = [griffe.load(name, search_paths=[ROOT]) for name in ("syncbn", "replication")]
    return {
        # Where a function has the name of the file it is in, griffe sees the file.
        str(name): f"{package.path}.{name}" + f".{name}" * _is_file(package, str(name))
        for package in packages
        for name in package.exports or ()
    }
