"""Gives the site the layout of the repository, so that a link in a file holds in both."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

#: What is shown, or linked to, relative to the root.
SHOWN = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *("docs/*.md", "docs/*.css"),
    *("benchmarks/README.md", "benchmarks/*.png"),
    *("examples/*.py", "examples/*.png"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Takes the files from the root instead of from ``docs_dir``, which may not be the root."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in SHOWN for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
