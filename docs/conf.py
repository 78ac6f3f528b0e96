"""The site. To build it: `sphinx-build -W --keep-going -c docs . site`."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # autodoc imports the packages

project = html_title = "synchronized-batchnorm"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# The root of the repository is the source folder, so that links hold both there and on the site.
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "examples/*"]
exclude_patterns = [".*"]  # such as a virtual environment
source_suffix = dict.fromkeys([".md", ".ipynb", ".py"], "myst-nb")

myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are committed with their outputs

# In docstrings, a name in single backticks links to the reference if it is there.
default_role = "py:obj"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 70

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # leads to the README
html_show_copyright = html_show_sourcelink = html_use_index = html_domain_indices = False
pygments_style = "default"  # the theme's own has no colours for diffs
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"  # prompts and outputs

#: The groups of the navigation, by the page that lists them. Patterns stand for files.
NAVIGATION = {
    "README": {
        "Start": [
            "docs/quick-start.md",
            "docs/migration.md",
            "docs/layers.md",
            "docs/processes.md",
        ],
        "Guides": [
            "docs/options.md",
            "docs/questions.md",
            "docs/troubleshooting.md",
            "examples/README.md",
        ],
        "How it works": [
            "docs/how-it-works.md",
            "docs/guarantees.md",
            "docs/limits.md",
            "docs/free-threading.md",
            "benchmarks/README.md",
        ],
        "Reference": ["docs/syncbn.md", "docs/replication.md"],
        "Project": ["CHANGELOG.md", "CONTRIBUTING.md"],
    },
    "examples/README": {"Examples": ["examples/*.ipynb", "examples/*.py"]},
}


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the groups of a page to its end, where they don't show."""
    for caption, patterns in NAVIGATION.get(docname, {}).items():
        files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        pages = "\n".join(f"/{path.relative_to(ROOT).as_posix()}" for path in files)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def show_programs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turns a program into a page."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".py":
        source[0] = f"# {path.name}\n\n~~~~python\n{source[0]}~~~~\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", show_programs)
