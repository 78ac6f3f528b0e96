"""All files state the same version, date, license and requirements of a release."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
from pathlib import Path

import pytest

import replication
import replication.version
import syncbn

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def config():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", "utf-8")
    return parser


NAMED_FILE = re.compile(r"`((?:tests|replication|syncbn)/[a-z_/]+\.py)`")


def test_version_matches_the_changelog_and_the_citation(config):
    version = config["metadata"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest, date = re.search(r"^## (\S+) \((\S+)\)$", changes, re.MULTILINE).groups()
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    cited = dict(re.findall(r"^([\w-]+): (\S+)$", citation, re.MULTILINE))
    assert version == newest == cited["version"]
    assert date == cited["date-released"]
    assert config["metadata"]["license"] == cited["license"]


def test_version_is_the_one_in_the_metadata(tmp_path, monkeypatch):
    def version():
        return runpy.run_path(replication.version.__file__)["__version__"]

    assert replication.__version__ == syncbn.__version__ == version()
    monkeypatch.setattr(sys, "path", [])
    assert version() == "0+not.installed"
    metadata = tmp_path / "synchronized_batchnorm-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: synchronized-batchnorm\nVersion: 1.2.3\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert version() == "1.2.3"


def test_every_requirement_has_a_pin(config):
    extras = config["options.extras_require"].values()
    required = " ".join((config["options"]["install_requires"], *extras))
    pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert {re.match(r"[\w-]+", line)[0] for line in required.split()} <= set(pins)


def test_readme_and_matrix_have_the_oldest_versions_and_the_matrix_all_classifiers(config):
    readme, matrix = ((ROOT / name).read_text("utf-8") for name in ("README.md", "noxfile.py"))
    torches = re.findall(r'^    "([\d.]+)": \["([\d.]+)"', matrix, re.MULTILINE)
    oldest = config["options"]["install_requires"].strip().removeprefix("torch>=")
    python = config["options"]["python_requires"].removeprefix(">=")
    assert f"Python {python} and torch {oldest}, or later, are required." in readme
    assert torches[0][0].startswith(f"{oldest}.") and {first for _, first in torches} == {python}
    classified = re.findall(r":: Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert set(classified) <= set(re.findall(r'"(3\.\d+)"', matrix))


#: Modules that are tested with their only user, and the file of these tests.
TESTED_WITH = {
    "agreement": "replication/test_verify_ranks.py",
    "arguments": "syncbn/test_refusals.py",
    "base": "replication/test_replicas.py",
    "by_textbook": "syncbn/test_masks.py",
    "broadcast": "replication/test_replicate.py",
    "case": "replication/test_verify_explanations.py",
    "causes": "replication/test_verify_explanations.py",
    "channels": "syncbn/test_textbook.py",
    "collective": "replication/test_processes.py",
    "command": "replication/test_verify_command.py",
    "comparison": "replication/test_verify.py",
    "checks": "test_messages.py",
    "containers": "replication/test_tree.py",
    "cpu_kernels": "syncbn/test_kernels.py",
    "copies": "replication/test_verify.py",
    "errors": "test_messages.py",
    "explanation": "replication/test_verify_explanations.py",
    "extending": "project/test_architecture.py",
    "factors": "replication/test_verify_explanations.py",
    "gather": "replication/test_scatter.py",
    "graphs": "replication/test_compiled.py",
    "losses": "replication/test_verify_explanations.py",
    "modules": "replication/test_replicate.py",
    "order": "replication/test_verify_order.py",
    "position": "replication/test_started_ranks.py",
    "quantities": "replication/test_verify.py",
    "ranks": "replication/test_verify_ranks.py",
    "recording": "replication/test_verify.py",
    "registry": "replication/test_processes.py",
    "results": "replication/test_verify.py",
    "runs": "replication/test_verify_ranks.py",
    "server": "replication/test_started_ranks.py",
    "supervision": "replication/test_started_ranks.py",
    "texts": "test_messages.py",
    "version": "project/test_release.py",
    "warning": "test_unsynchronized.py",
}


@pytest.mark.parametrize("package", ["replication", "syncbn"])
def test_every_module_has_a_file_of_tests(package):
    for path in (ROOT / package).rglob("[!_]*.py"):
        own = f"{package}/test_{path.stem}*.py"
        others = TESTED_WITH.get(path.stem, own)
        assert list((ROOT / "tests").glob(own)) or (ROOT / "tests" / others).is_file(), path


def test_files_that_the_pages_name_exist():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {name for page in pages for name in NAMED_FILE.findall(page.read_text("utf-8"))}
    assert len(named) > 20
    roots = ROOT, Path(replication.__file__).parent.parent  # the packages may be installed
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
