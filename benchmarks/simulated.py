"""Calls functions on torch's CUDA build, with the simulated CUDA runtime of the tests.

What a function returns passes through JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.cuda import environment, runtime

ROOT = Path(__file__).parent.parent

#: Before the result, in the last line of the output.
MARK = "result: "


def reason_to_skip() -> str | None:
    """Why this machine cannot run the simulation, or None."""
    try:
        environment.python()
    except environment.Unavailable as reason:
        return str(reason)
    return None


def call(name: str, *arguments: Any, devices: int = 2, computes: bool = True) -> Any:
    """Calls ``module:function`` in a process with so many devices, or here if it has them.

    Without ``computes`` kernels take no time and leave memory as it is.

    Raises:
        environment.Unavailable: This machine cannot build the simulation.
    """
    if runtime.device_count() >= devices and computes == runtime.NUMBERS:
        return found(name, arguments)
    variables = {
        "SIMULATED_GPUS": str(devices),
        "SIMULATED_NUMBERS": str(int(computes)),
        "SIMULATED_LAZY": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",  # torch has one where NumPy is not installed
    }
    done = subprocess.run(
        [environment.python(), "-m", __spec__.name, name, json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.rpartition(MARK)[2])


def found(name: str, arguments: Any) -> Any:
    """What a function returns, as JSON has it."""
    module, _, function = name.partition(":")
    return json.loads(json.dumps(getattr(import_module(module), function)(*arguments)))


if __name__ == "__main__":
    print(MARK + json.dumps(found(sys.argv[1], json.loads(sys.argv[2]))))
