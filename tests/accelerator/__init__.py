"""A foreign backend: two devices, "sim:0" and "sim:1", in the memory of the host.

GPUs are simulated by `tests.cuda`, which runs CUDA's own code. Here is only what it cannot show,
because CUDA has all of it:

- a type of device that is not "cuda", for which torch knows no module but the one that is given
- a backend without kernels for batch norm in parts, or without a kernel of `Tensor.record_stream`
- devices without float64, as on MPS
- operations that refuse tensors of two devices of such a backend

torch knows one such backend per process, and takes it for *the* accelerator of the machine, so
tests on it run in a separate process::

    pytest --simulated-accelerator tests/accelerator
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

from replication._torch import has_kernels
from syncbn import channels
from tests.kit import stand_in_kernels

#: The type of the devices.
NAME = "sim"

HERE = Path(__file__).parent
SOURCE = HERE / "backend.cpp"

#: The versions of torch that the backend is written for.
OLDEST = (2, 13)

#: The calls of the library, once it is registered.
library: Any = torch.ops.simulated

#: The kernels of `torch.nn.SyncBatchNorm` for the backend. torch forgets them with this object.
fused_kernels = torch.library.Library("aten", "IMPL")

#: The kernel of `Tensor.record_stream`, which not every backend has.
stream_kernel: Any = None


def reason_to_skip() -> str | None:
    """Why this machine cannot build the backend, or None."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux only"
    if version < OLDEST:
        return f"the simulated accelerator needs torch {'.'.join(map(str, OLDEST))}"
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return f"no C++ compiler (looked for {cpp_extension.get_cxx_compiler()!r})"
    return None


def built() -> Path:
    """Compiles the backend, unless that has been done, and returns the library's path."""
    key = hashlib.sha256(torch.__version__.encode() + SOURCE.read_bytes())
    library = HERE / "build" / f"simulated-{key.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        # Another process may do the same.
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [cpp_extension.get_cxx_compiler(), "-O2", "-shared", "-fPIC", "-std=c++20", "-w"]
        command += [f"-I{path}" for path in cpp_extension.include_paths()]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += [str(SOURCE), "-o", str(unfinished), "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


def register() -> None:
    """Makes the simulated devices known to torch, in this process and for good."""
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, device_module())
    register_record_stream()
    for name, kernel in stand_in_kernels.KERNELS.items():
        fused_kernels.impl(name, as_one_kernel(kernel), "PrivateUse1")


def register_record_stream() -> None:
    global stream_kernel
    stream_kernel = torch.library.Library("aten", "IMPL")
    stream_kernel.impl(
        "record_stream",
        lambda memory, stream: None,
        "PrivateUse1",
    )
    has_kernels.cache_clear()


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function use float64 inside, as a kernel may."""

    @wraps(function)
    def kernel(*args: Any, **out: Any) -> Any:
        library.begin_kernel()
        try:
            return function(*args, **out)
        finally:
            library.end_kernel()

    return kernel


def device_module() -> ModuleType:
    """Returns ``torch.sim``, with the functions that every backend has, as `torch.xpu` does."""
    module = ModuleType(f"torch.{NAME}")
    current_device = torch.accelerator.current_device_index

    def index_of(device: Any = None) -> int:
        index = device if isinstance(device, int) else torch.device(device or NAME).index
        return current_device() if index is None else index

    @contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        with torch.accelerator.device_index(stream.device_index):
            before = torch.accelerator.current_stream()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def generator(device: Any = None) -> torch.Generator:
        return library.default_generator(index_of(device))

    def manual_seed_all(seed: int) -> None:
        for index in range(library.device_count()):
            generator(index).manual_seed(seed)

    vars(module).update(
        device_count=library.device_count,
        current_device=current_device,
        set_device=torch.accelerator.set_device_index,
        device=lambda device: torch.accelerator.device_index(index_of(device)),
        current_stream=torch.accelerator.current_stream,
        stream=stream,
        synchronize=torch.accelerator.synchronize,
        manual_seed=lambda seed: generator().manual_seed(seed),
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device=None: generator(device).get_state(),
        set_rng_state=lambda state, device=None: generator(device).set_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        Stream=torch.Stream,
        Event=torch.Event,
    )
    return module


# -- what tests ask for ------------------------------------------------------------------------


@contextmanager
def no_float64() -> Iterator[None]:
    """Takes float64 from the devices, in copies to and from the host as well."""
    library.set_lacks_float64(True)
    channels._has_float64.clear()
    try:
        yield
    finally:
        library.set_lacks_float64(False)
        channels._has_float64.clear()


@contextmanager
def no_record_stream() -> Iterator[None]:
    """Takes the kernel of `Tensor.record_stream` from the backend."""
    stream_kernel._destroy()
    has_kernels.cache_clear()
    try:
        yield
    finally:
        register_record_stream()
