"""The site. To build it: `sphinx-build -W --keep-going -c docs . site`."""

from __future__ import annotations

import os
import re
from configparser import ConfigParser
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

_config = ConfigParser()
_config.read(ROOT / "setup.cfg", "utf-8")
project, version = (_config["metadata"][key] for key in ("name", "version"))
html_title = f"{project} {version}"
#: Known where Read the Docs builds the site.
REPOSITORY = os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git")
extensions = ["myst_nb", "sphinx_copybutton"]

# The root of the repository is the source folder, so that links hold both there and on the site.
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "tests/**.md", "examples/*"]
exclude_patterns = [".*"]  # such as a virtual environment
source_suffix = dict.fromkeys([".md", ".ipynb", ".py"], "myst-nb")

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "html_image"]  # the README sets the width of its picture
nb_execution_mode = "off"  # notebooks are committed with their outputs

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # leads to the README
html_show_copyright = html_show_sourcelink = html_use_index = html_domain_indices = False
pygments_style = "default"  # the theme's own has no colours for diffs
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"  # prompts and outputs

#: Quotes that become boxes, by their first word, with the theme's class of the box.
BOXES = {"Warning": "warning", "Status": "note"}

#: Tables of so many columns don't fit a phone.
WIDE = 3

#: The groups of the navigation, by the page that lists them. Patterns stand for files.
NAVIGATION = {
    "README": {
        "Get started": ["docs/quick-start.md", "docs/choosing.md"],
        "Guides": [
            "docs/verify.md",
            "docs/losses.md",
            "docs/processes.md",
            "docs/replicas.md",
            "docs/layers.md",
            "docs/masks.md",
            "docs/detection.md",
            "docs/performance.md",
            "docs/recipes.md",
            "docs/libraries.md",
            "examples/README.md",
        ],
        "Switch": [
            "docs/migration.md",
            "docs/porting.md",
            "docs/from-torch-distributed.md",
        ],
        "Reference": [
            "docs/troubleshooting.md",
            "docs/limits.md",
            "docs/guarantees.md",
            "docs/mutations.md",
            "docs/audit.md",
            "docs/collectives-compared.md",
            "docs/stability.md",
            "docs/api-index.md",
            "docs/syncbn.md",
            "docs/replication.md",
        ],
        "Developers": [
            "docs/how-it-works.md",
            "benchmarks/README.md",
            "benchmarks/details.md",
            "CONTRIBUTING.md",
            "tests/README.md",
            "tests/cuda/README.md",
            "CHANGELOG.md",
            "SECURITY.md",
        ],
    },
    "examples/README": {"Examples": ["examples/*.ipynb", "examples/*.py"]},
}


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the groups of a page to its end, where they don't show."""
    for caption, patterns in NAVIGATION.get(docname, {}).items():
        files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        pages = "\n".join(f"/{path.relative_to(ROOT).as_posix()}" for path in files)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
    if REPOSITORY.startswith("https://") and docname == root_doc:
        pages = f"Repository <{REPOSITORY}>\nIssues <{REPOSITORY}/issues>"
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: Contribute\n\n{pages}\n```\n"


def show_programs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turns a program into a page."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".py":
        source[0] = f"# {path.name}\n\n~~~~python\n{source[0]}~~~~\n"


def link_to_code(app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes files of the tests and benchmarks downloads, because they are no pages."""
    link = r"\[`?([^]`]*)`?\]\(((?:\.\./)*(?:tests|benchmarks)/[^)]*\.py)\)"
    source[0] = re.sub(link, r"{download}`\1 <\2>`", source[0])


def show_warnings(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turns quotes such as `> **Warning:** ...` into coloured boxes."""

    def box(found: re.Match[str]) -> str:
        indent, name, text = found.groups()
        lines = re.sub("^ *> ?", "", text, flags=re.MULTILINE).splitlines()
        begin = [f":::{{admonition}} {name}", f":class: {BOXES[name]}", ""]
        return "\n".join(indent + line for line in [*begin, *lines, ":::"])

    quote = rf"^( *)> \*\*({'|'.join(BOXES)}):\*\* (.*(?:\n *>.*)*)$"
    source[0] = re.sub(quote, box, source[0], flags=re.MULTILINE)


def label_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Repeats the head of its column in each cell of a wide table, for phones: see site.css."""
    for table in doctree.findall(nodes.table):
        heads, *rows = (list(row.findall(nodes.entry)) for row in table.findall(nodes.row))
        if len(heads) < WIDE:
            continue
        table["classes"].append("wide")
        for row in rows:
            for head, cell in zip(heads[1:], row[1:], strict=False):
                if cell.astext():
                    cell.insert(0, nodes.paragraph(text=head.astext(), classes=["column"]))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", show_programs)
    app.connect("source-read", link_to_code)
    app.connect("source-read", show_warnings)
    app.connect("doctree-read", label_cells)
