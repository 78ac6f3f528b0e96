"""Writes `docs/syncbn.md` and `docs/replication.md` from the docstrings: `python docs/api.py`.

In Markdown the API can be read on the hosting page as well as on the site.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # a clone needs no installation

import replication  # noqa: E402
import syncbn  # noqa: E402

PACKAGES = {"syncbn": syncbn, "replication": replication}
#: The names of each page by task, in the order in which readers need them.
TASKS = {
    "syncbn": {
        "Convert a network": [
            "convert_model",
            "revert_model",
            "summary",
            "Summary",
            "patch_sync_batchnorm",
        ],
        "Check it": ["verify", "verify_ranks", "Verification", "Difference"],
        "Layers": [
            "SynchronizedBatchNorm2d",
            "SynchronizedBatchNorm1d",
            "SynchronizedBatchNorm3d",
            "SynchronizedBatchNormNd",
        ],
        "Older toolkits": ["stand_in_for", "set_sbn_eps_mode"],
    },
    "replication": {
        "Wrap a network": [
            "DataParallel",
            "data_parallel",
            "DataParallelCriterion",
            "patch_replication_callback",
            "JoinableStep",
        ],
        "Losses and collectives": [
            "global_mean",
            "functional.all_reduce",
            "functional.all_gather",
            "functional.reduce_scatter",
            "functional.broadcast",
            "functional.all_gather_object",
            "functional.barrier",
        ],
        "Write a layer": ["ReplicaAware", "Group", "SoloGroup", "ReplicaGroup", "ProcessGroup"],
        "Split and join": [
            "Scattered",
            "scatter",
            "scatter_kwargs",
            "gather",
            "replicate",
            "parallel_apply",
        ],
        "Errors and warnings": [
            "ReplicationError",
            "ReplicasDiverged",
            "ReplicaFailed",
            "UnsynchronizedWarning",
        ],
        "Callbacks and pipes of older toolkits": [
            "execute_replication_callbacks",
            "CallbackContext",
            "SyncMaster",
            "SlavePipe",
            "FutureResult",
        ],
    },
}
#: The page of each name, without the older names of an object. `replication` comes first.
HOMES = {
    name: page
    for page, package in PACKAGES.items()
    for name in package.__all__
    if getattr(package, name).__name__ == name
}
HOMES |= {
    name: page for page, tasks in TASKS.items() for names in tasks.values() for name in names
}
#: What the heading of each name is called in links. A page numbers headings that differ in case.
ANCHORS = {"Summary": "summary-1"}

#: For layers that have their own autograd nodes, as in `syncbn`, or described by the class.
INTERNAL = {
    "Group.where",
    "ProcessGroup.add",
    "ProcessGroup.gather",
    "ProcessGroup.refuse_exports",
    "ProcessGroup.sum",
    "ProcessGroup.where",
    "ReplicaAware.process_group",
    "ReplicaGroup.exchange",
    "ReplicaGroup.where",
}

#: Results and connections, which users never construct.
MADE = {"Difference", "ReplicaGroup", "SlavePipe", "Summary", "Verification"}


#: Characters of a line of code that fit a page.
WIDTH = 71


def anchor_of(name: str) -> str:
    """What links call the heading of a public name."""
    return ANCHORS.get(name, name.lower().replace(".", ""))


def linked(line: str) -> str:
    """Replaces double backticks, and links the public names in single ones."""

    def link(found: re.Match[str]) -> str:
        name = found[1].removeprefix("replication.").removeprefix("syncbn.")
        return f"[{found[0]}]({HOMES[name]}.md#{anchor_of(name)})" if name in HOMES else found[0]

    return re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, line).replace("``", "`")


def translated(docstring: str) -> Iterator[str]:
    """Yields the lines in Markdown: sections become lists, and code becomes blocks."""
    section = False
    for block in docstring.split("\n\n"):
        lines = block.split("\n")
        if title := re.fullmatch(r"([A-Z]\w+):", lines[0]):
            section = True
            yield from (f"**{title[1]}**", "")
            del lines[0]
        indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
        is_example = lines[0].lstrip().startswith(">>> ")
        if is_example or (indent and not section):
            code = textwrap.dedent("\n".join(lines)).splitlines()
            block = "\n".join(["```pycon" if is_example else "```", *code, "```"])
            yield from textwrap.indent(block, "  " * (indent > 4)).splitlines()
        elif block.strip() != "::":
            for line in lines:
                line = line[4:] if section else line
                line = re.sub(r"^(\w+): ", r"- `\1`: ", line) if section else line
                yield linked(re.sub("::$", ":", line.replace("    ", "  ", 1)))
        yield ""


class Annotation:
    """The text of an annotation, as the code has it."""

    def __init__(self, text: Any) -> None:
        self.text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self.text


def signature(kind: Any) -> list[str]:
    """The lines of the signature, on one line if that is short."""
    found = inspect.signature(kind)
    parameters = [
        p if p.annotation is p.empty else p.replace(annotation=Annotation(p.annotation))
        for p in found.parameters.values()
        if p.name != "self"
    ]
    returned = "" if inspect.isclass(kind) else f" -> {Annotation(found.return_annotation)}"
    line = f"{kind.__name__}{inspect.Signature(parameters)}{returned}"
    if len(line) <= WIDTH:
        return [line]
    # `*` and `/` are no parameters, but stand between them.
    text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    bare = text.startswith("(*, ") or ", *, " in text
    first = next((p for p in parameters if p.kind is p.KEYWORD_ONLY), None)
    lines = [f"{kind.__name__}("]
    for parameter in parameters:
        if parameter is first and bare:
            lines.append("    *,")
        lines.append(f"    {parameter},")
    return [*lines, f"){returned}"]


def described(title: str, kind: Any) -> Iterator[str]:
    """Yields the title, the signature, and the docstring."""
    yield from (title, "")
    text = inspect.getdoc(kind) or ""
    is_error = inspect.isclass(kind) and issubclass(kind, BaseException)
    is_elsewhere = "It takes the arguments" in text  # of another class
    if callable(kind) and not (is_error or is_elsewhere or kind.__name__ in MADE):
        yield from ("```py", *signature(kind), "```", "")
    yield from translated(text)


def page(name: str) -> str:
    """The text of a page."""
    lines = [f"# API of `{name}`", "", "[All names](api-index.md) of both packages by task."]
    for task, names in TASKS[name].items():
        lines += ["", f"## {task}", ""]
        for public in names:
            kind = attrgetter(public)(PACKAGES[name])
            lines += described(f"### {public}", kind)
            for key, member in vars(kind).items() if inspect.isclass(kind) else ():
                inherited = any(key in vars(base) for base in kind.__mro__[1:])
                documented = inspect.isfunction(member) or isinstance(member, property)
                is_public = not key.startswith("_") and f"{public}.{key}" not in INTERNAL
                if documented and is_public and not inherited and member.__doc__:
                    lines += described(f"#### `{public}.{key}`", member)
    lines += ["", "## Other names", "", "| name | the same as |", "| --- | --- |"]
    for public in PACKAGES[name].__all__:
        if HOMES.get(public) != name:
            kind = getattr(PACKAGES[name], public)
            same = kind.__name__
            home = HOMES.get(same, kind.__module__.split(".")[0])
            lines += [f"| `{public}` | [`{home}.{same}`]({home}.md#{anchor_of(same)}) |"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def files() -> dict[Path, str]:
    """All pages, by path."""
    return {FOLDER / f"{name}.md": page(name) for name in PACKAGES}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
