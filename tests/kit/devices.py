"""The devices that tests run on: the CPU, or the accelerators of the process.

In a process with accelerators (``pytest --simulated-accelerator``, or a machine with GPUs) a test
that is marked ``accelerator`` runs on them, and all others as on a machine without any.
"""

from __future__ import annotations

import torch

from replication.devices import default_devices

ACCELERATORS = [str(device) for device in default_devices()]

#: The device of modules and batches.
HOME = ACCELERATORS[0] if ACCELERATORS else "cpu"


def several(number: int) -> list[str]:
    """Returns devices for replicas: every accelerator in turn, or the CPU."""
    # Those of this test: most tests run as on a machine without accelerators.
    devices = list(map(str, default_devices())) or ["cpu"]
    return [devices[i % len(devices)] for i in range(number)]


#: Lists of accelerators, each beginning with another one of them or with the CPU.
LISTS = {
    "ascending": ACCELERATORS,
    "descending": ACCELERATORS[::-1],
    "repeated": [HOME] * 3,
    "each twice": ACCELERATORS * 2,
    "with the CPU": [HOME, "cpu", *ACCELERATORS[1:]],
    "CPU first": ["cpu", *ACCELERATORS],
}


def has_simulated() -> bool:
    """Whether `tests.accelerator` simulates the accelerators."""
    return torch.device(HOME).type == "sim"
