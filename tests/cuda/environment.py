"""The environment of the simulation: torch's CUDA build, and the simulated libraries before it.

Both are kept in a folder for caches, torch for each of its versions, and the libraries for each
state of their sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The version of torch whose CUDA build runs.
TORCH = "2.14.1"

HERE = Path(__file__).parent
SOURCES = HERE / "simulation"
CONSTRAINTS = HERE.parent.parent / "constraints.txt"

#: What the tests need beside torch.
REQUIREMENTS = ("pytest", "hypothesis", "mypy", "setuptools")

#: The sources of the CUDA runtime.
RUNTIME = [
    f"{part}.cpp" for part in ("counters", "launches", "devices", "memory", "streams", "graphs")
]

CXX = os.environ.get("CXX", "g++")


class Unavailable(Exception):
    """This machine cannot run the simulation. The message says why."""


def cache() -> Path:
    """The folder in which everything is kept between runs."""
    if chosen := os.environ.get("CUDA_SIMULATION"):
        return Path(chosen).absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "synchronized-batchnorm" / "cuda"


def python() -> Path:
    """Returns the Python of the environment, after making what is missing of it.

    Raises:
        Unavailable: There is no compiler, or no CUDA build of torch for this machine.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unavailable(f"it needs Linux on x86_64, not {sys.platform} on {platform.machine()}")
    if shutil.which(CXX) is None:
        raise Unavailable(f"there is no C++ compiler (looked for {CXX!r})")
    cache().mkdir(parents=True, exist_ok=True)
    installed = cache() / f"torch-{TORCH}-{_key(sys.version, *_requirements())}"
    with _made_once(installed) as missing:
        if missing:
            _install(installed)
    sources = [path.read_text("utf-8") for path in sorted(SOURCES.iterdir()) if path.is_file()]
    built = cache() / f"libraries-{_key(installed.name, *sources)}"
    with _made_once(built) as missing:
        if missing:
            _build(built, installed)
    return built / "bin" / "python"


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@contextmanager
def _made_once(folder: Path) -> Iterator[bool]:
    """Whether a folder has to be made, which another process waits for meanwhile."""
    done = folder / "done"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        yield True
        done.touch()


# -- torch -------------------------------------------------------------------------------------


def _requirements() -> list[str]:
    """`REQUIREMENTS` with the versions of constraints.txt."""
    lines = [line.split(";")[0].strip() for line in CONSTRAINTS.read_text("utf-8").splitlines()]
    pinned = {line.split("==")[0]: line for line in lines}
    return [pinned.get(name, name) for name in REQUIREMENTS]


def _install(folder: Path) -> None:
    """Makes an environment with torch's CUDA build, without the libraries of CUDA (3 GB)."""
    wheels = folder / "wheels"
    _run(sys.executable, "-m", "venv", str(folder))
    _download(wheels, f"torch=={TORCH}")
    (wheel,) = wheels.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requires = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.M)
    toolkits = [re.match(r"cuda-toolkit\b.*==(\d+\.\d+)", line) for line in requires]
    versions = [found[1] for found in toolkits if found]
    if not versions:
        raise Unavailable(f"torch {TORCH} that pip finds is not built for CUDA")
    parts = ("cuda-runtime", "cuda-crt")
    _download(folder / "headers", *(f"nvidia-{part}=={versions[0]}.*" for part in parts))
    for headers in (folder / "headers").glob("*.whl"):
        with zipfile.ZipFile(headers) as archive:
            archive.extractall(folder / "headers")
    others = [
        line.split(";")[0].strip()
        for line in requires
        if "extra ==" not in line and not re.match(r"nvidia|cuda|triton", line)
    ]
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "--no-deps", str(wheel))
    _run(*pip, *others, *_requirements())
    shutil.rmtree(wheels)


def _download(folder: Path, *requirements: str) -> None:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder))
    try:
        _run(*pip, *requirements)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"pip does not find {', '.join(requirements)}") from error


def _run(*command: str, **env: str) -> str:
    # A constraint for the CPU's builds would keep the CUDA build away.
    env = {**os.environ, "PIP_CONSTRAINT": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="", file=sys.stderr)
        done.check_returncode()
    return done.stdout


# -- the libraries -----------------------------------------------------------------------------


def _build(folder: Path, installed: Path) -> None:
    """Makes an environment that sees the installed one, with the simulated libraries before it."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python3*/site-packages")
    (packages,) = installed.glob("lib/python3*/site-packages")
    (header,) = (installed / "headers").rglob("cuda_runtime_api.h")
    libraries = Libraries(folder / "simulated", packages / "torch", header.parent)
    order = libraries.build()
    shutil.copy(SOURCES / "startup.py", site / "simulated_cuda.py")
    (folder / "simulated" / "order").write_text("\n".join(order))
    (site / "simulated_cuda.pth").write_text(f"{packages}\nimport simulated_cuda\n")


class Libraries:
    """Compiles the simulated libraries into a folder.

    torch's own libraries ask for CUDA's by name (soname) and symbol. A symbol that the sources
    here lack becomes a stub, so that every library of torch can be loaded.
    """

    def __init__(self, folder: Path, torch: Path, include: Path) -> None:
        self.folder, self.torch, self.include = folder, torch, include
        folder.mkdir()
        lib = torch / "lib"
        own = [path for name in ("torch", "c10", "caffe2") for path in lib.glob(f"lib{name}*.so")]
        dynamic = "".join(_run("readelf", "-d", str(path)) for path in own)
        names = re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", dynamic)
        self.needed = sorted(set(names))
        undefined = "".join(_run("nm", "-D", "--undefined-only", str(path)) for path in own)
        self.undefined = {line.split()[-1].split("@")[0] for line in undefined.splitlines()}

    def build(self) -> list[str]:
        """Returns the names of the libraries, in the order in which they are to be loaded."""
        (runtime,) = [name for name in self.needed if name.startswith("libcudart.")]
        self._compile(runtime, RUNTIME, "-ldl", "-lpthread")
        self._compile("libcuda.so.1", ["driver.cpp"], runtime)
        self._compile("libnccl.so.2", ["nccl.cpp"], runtime)
        own = [runtime, "libcuda.so.1", "libnccl.so.2"]
        self._stubs(own)
        rest = [name for name in self.needed if name not in own]
        for name in rest:
            self._link(name, "-Wl,--no-as-needed", "libsimulatedstubs.so")
        torch = [f"-I{self.torch / 'include'}", f"-L{self.torch / 'lib'}"]
        torch += ["-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
        self._compile("libvalues.so", ["values.cpp"], runtime, *torch)
        return [*own, "libsimulatedstubs.so", *rest]

    def _stubs(self, own: list[str]) -> None:
        """The rest of cuBLAS, cuDNN and so on."""
        names = (_run("nm", "-D", "--defined-only", str(self.folder / name)) for name in own)
        defined = {line.split()[-1] for text in names for line in text.splitlines()}
        stubs = self.folder / "stubs.c"
        stubs.write_text(stubs_of(self.undefined - defined))
        self._link("libsimulatedstubs.so", str(stubs), str(SOURCES / "libraries.c"), own[0])

    def _compile(self, name: str, sources: list[str], *others: str) -> None:
        flags = (
            "-O1",
            "-std=c++20",
            "-DNDEBUG",
            f"-I{self.include}",
            "-Wl,--allow-shlib-undefined",
        )
        self._link(name, *flags, *(str(SOURCES / source) for source in sources), *others)

    def _link(self, name: str, *parts: str) -> None:
        """Makes a library. Parts are options, files, and names of libraries made before."""
        made = {path.name for path in self.folder.iterdir()}
        given = [str(self.folder / part) if part in made else part for part in parts]
        compiler = "gcc" if any(part.endswith(".c") for part in parts) else CXX
        _run(
            *(compiler, "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"),
            *("-Wl,-rpath,$ORIGIN", "-o", str(self.folder / name), *given),
        )


#: Functions that store a handle in their first argument.
MAKES = re.compile(r"cu(blas|blasLt|sparse|sparseLt|solver|solverDn|rand|dnn)\w*Create\w*")

#: Functions that compute, each counted as one launch.
COMPUTES = re.compile(
    r"cublas\w*(gemm|Gemm|gemv|dot|trsm|getr[fs]|geqrf)\w*|cublasLtMatmul"
    r"|cudnn(BatchNormalization|Convolution|RNN|Pooling)\w*(Forward|Backward)\w*"
)

#: Libraries whose functions can be passed over, because nothing depends on what they do.
PASSED_OVER = re.compile(r"cu(blas|dnn|sparse|solver|fft|rand|pti|File|dss)|nv(rtc|ml|tx|JitLink)")


def stubs_of(names: set[str]) -> str:
    """Writes functions of the libraries around CUDA in C: they return 0, and are counted."""
    lines = [
        "static char handle[4096];",
        "extern void simulated_count(const char*, long long);",
        "extern int simulated_missing(const char*);",
        "extern int simulated_library_launch(const char*);",
    ]
    for name in sorted(names):
        if not re.match(r"(__)?cu|nccl|nv", name):
            continue
        if not PASSED_OVER.match(name):
            body = f'return simulated_missing("{name}");'
        elif COMPUTES.fullmatch(name):
            body = f'return simulated_library_launch("{name}");'
        else:
            makes = "*(void**)first = handle; " if MAKES.fullmatch(name) else ""
            body = f'{makes}simulated_count("libraries/{name}", 1); return 0;'
        # Those that libraries.c writes out are taken from there.
        lines.append(f"__attribute__((weak)) int {name}(void* first) {{ {body} }}")
    return "\n".join(lines) + "\n"
