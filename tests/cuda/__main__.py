"""Runs the tests and checks as on a machine with GPUs, on the simulated CUDA runtime.

Without names of parts, all of them run. A part that fails shows its output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.cuda import environment

ROOT = Path(__file__).parent.parent.parent


class Part(NamedTuple):
    """A command of the simulation's Python."""

    devices: int
    arguments: str
    is_lazy: bool = False
    computes: bool = True


RANKS = "-m torch.distributed.run --standalone --nproc-per-node=2 -m syncbn"
PYTEST = "-m pytest -q -p no:cacheprovider"
#: The tests that see the devices. All others run as on a machine without any.
OF_DEVICES = "--ignore=tests/cuda -m (accelerator)or(gpu)"

PARTS = {
    "self-check": Part(2, "-m syncbn"),
    "self-check-4": Part(4, "-m syncbn"),
    "nccl": Part(2, RANKS),
    "gloo": Part(1, RANKS),  # ranks that share a device
    "matrix": Part(2, f"{PYTEST} tests/cuda"),
    "matrix-4": Part(4, f"{PYTEST} tests/cuda"),
    "matrix-lazy": Part(2, f"{PYTEST} tests/cuda", is_lazy=True),
    "suite": Part(2, f"{PYTEST} --ignore=tests/cuda"),  # which the matrix runs
    "suite-4": Part(4, f"{PYTEST} {OF_DEVICES}"),
    # Work that waits holds memory of the host, which one test measures.
    "suite-lazy": Part(2, f"{PYTEST} -k not(two_hundred_steps) {OF_DEVICES}", is_lazy=True),
    # Networks of a real size would take minutes on the CPU. Whether it ends is the question.
    "benchmarks": Part(1, "-m benchmarks.gpu --seconds 0", computes=False),
}

#: Seconds after which a part has hung.
LIMIT = 1200


def variables(part: Part, folder: str) -> dict[str, str]:
    """Returns what the environment of a part has beside this one's.

    Ranks exchange messages through files in the folder.
    """
    return {
        "SIMULATED_GPUS": str(part.devices),
        "SIMULATED_LAZY": str(int(part.is_lazy)),
        "SIMULATED_NUMBERS": str(int(part.computes)),
        "PYTHONPATH": str(ROOT),
        "SIMULATED_NCCL_FOLDER": folder,
        # torch warns where NumPy is not installed.
        "PYTHONWARNINGS": "ignore:Failed to initialize NumPy:UserWarning",
    }


def run(python: Path, part: Part, *more: str) -> tuple[int, str]:
    """Returns the exit status and the output of a part."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="simulated-nccl-", dir=in_memory) as folder:
        process = subprocess.Popen(
            [str(python), *part.arguments.split(), *more],
            cwd=ROOT,
            env={**os.environ, **variables(part, folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 1, process.communicate()[0] + f"\nno end within {LIMIT} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it has left behind
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument(
        "--required", action="store_true", help="fail where the simulation cannot be built"
    )
    parser.add_argument(
        "--python", action="store_true", help="build the simulation and print its Python"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running part as well
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    begin = time.monotonic()
    try:
        python = environment.python()
    except environment.Unavailable as reason:
        print(f"simulated CUDA skipped: {reason}")
        return int(given.required)
    if given.python:
        print(python)
        return 0
    print(f"built in {time.monotonic() - begin:.0f} s: {python}", flush=True)
    failed = []
    for name in given.parts or PARTS:
        begin = time.monotonic()
        status, output = run(python, PARTS[name])
        lines = [line for line in output.splitlines() if line.strip("` ")] or [""]
        if status:
            failed.append(name)
            print(output)
        verdict = "FAILED" if status else "passed"
        print(f"{name}: {verdict} in {time.monotonic() - begin:.0f} s: {lines[-1]}", flush=True)
    passed = len(given.parts or PARTS) - len(failed)
    print(f"simulated CUDA: {passed} passed, {len(failed)} failed {' '.join(failed)}".rstrip())
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
