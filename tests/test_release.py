"""All files state the same version, date and license of a release."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_version_matches_the_changelog_and_the_citation():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    version = config["metadata"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest, date = re.search(r"^## (\S+) \((\S+)\)$", changes, re.MULTILINE).groups()
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    cited = dict(re.findall(r"^([\w-]+): (\S+)$", citation, re.MULTILINE))
    assert version == newest == cited["version"]
    assert date == cited["date-released"]
    assert config["metadata"]["license"] == cited["license"]
