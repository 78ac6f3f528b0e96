"""Runs the notebooks in ``examples/``, and saves them with their outputs.

    python -m tests.notebooks examples/*.ipynb

It needs the packages of ``pip install '.[examples,notebooks]'``. The outputs come from a
machine without a GPU, whatever this machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The type of outputs that need a running kernel, such as progress bars.
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(source: Path, target: Path) -> None:
    """Runs a notebook in an empty folder, and saves it without what differs from run to run."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(source, folder))
        command = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(copy)]
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        notebook = json.loads(copy.read_text("utf-8"))
    notebook["metadata"] = json.loads(source.read_text("utf-8"))["metadata"]
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)  # the times of its beginning and its end
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if WIDGET not in o.get("data", ())]
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)
    target.write_text(f"{text}\n", "utf-8")


def main() -> None:
    """Runs the notebooks of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks", description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path, help="the notebooks to run")
    parser.add_argument("--output", type=Path, help="the folder to save to, if another")
    options = parser.parse_args()
    for path in options.notebooks:
        run(path, (options.output or path.parent) / path.name)


if __name__ == "__main__":
    main()
