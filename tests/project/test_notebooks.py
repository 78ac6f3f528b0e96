"""The notebooks run, and their saved outputs are what they print today."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit.programs import EXAMPLES, ROOT, run_python

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
NEEDED = ("ipykernel", "ipywidgets", "matplotlib", "nbclient", "sklearn", "tqdm")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shown(outputs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The kind of each output and its types. Of its text, the words without the numbers."""
    return [
        (output["output_type"], *data, *re.sub(r"[-+]?[\d.]+(e[-+]\d+)?", "#", text).split())
        for output in outputs
        for data in [output.get("data", {})]
        for text in ["".join(output.get("text", data.get("text/plain", "")))]
    ]


def test_saved_outputs_are_of_one_run_without_warnings_and_name_no_machine(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert "error" not in {output["output_type"] for output in outputs}
    text = path.read_text("utf-8")
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/|[A-Z]:\\\\|Warning:", text)


def test_a_notebook_runs_and_shows_what_is_saved(path, tmp_path):
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: pip install '.[examples,notebooks]'")
    done = run_python("-m", "tests.notebooks", "--output", str(tmp_path), str(path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    pairs = zip(code_cells(path), code_cells(tmp_path / path.name), strict=True)
    for saved, now in pairs:
        assert shown(now["outputs"]) == shown(saved["outputs"]), now["source"]
