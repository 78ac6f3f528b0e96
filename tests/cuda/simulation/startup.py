"""Loads the simulated libraries before torch looks for CUDA's, and lets its operators compute.

Each start of the simulation's Python imports this module.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from pathlib import Path

FOLDER = Path(sys.prefix) / "simulated"


class AroundTorch(importlib.abc.MetaPathFinder):
    """Does its part before and after the first import of torch."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load_libraries()
            load(module)
            if os.environ.get("SIMULATED_NUMBERS") != "0":
                let_operators_compute(module)

        spec.loader.exec_module = exec_module
        return spec


def load_libraries():
    # The loader takes a library that is there already for one that has the same soname.
    for name in (FOLDER / "order").read_text().split():
        ctypes.CDLL(str(FOLDER / name), ctypes.RTLD_GLOBAL)


def let_operators_compute(torch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an operator has a kernel already
        ctypes.CDLL(str(FOLDER / "libvalues.so"), ctypes.RTLD_GLOBAL).simulated_values_install()
    for kind in ("flash", "mem_efficient", "cudnn"):  # the CPU has no such kernels
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)


sys.meta_path.insert(0, AroundTorch())
