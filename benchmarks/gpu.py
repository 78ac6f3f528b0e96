"""What only a GPU shows: what runs there at all, launches, training steps, and kept threads.

One GPU is enough, and eight minutes: all replicas, or ranks, share it. Ranks communicate by gloo,
which is slow, and which `torch.nn.SyncBatchNorm` allows on a single GPU. What can't run, or takes
too long, is listed with the reason. The output is Markdown, to be pasted into an issue.

    python -m benchmarks.gpu
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from multiprocessing import active_children
from pathlib import Path
from threading import Event, Timer
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import host, networks, processes, step
from benchmarks.layer import REPLICAS, WAYS
from benchmarks.measuring import Figures, Row, Table, in_processes, line, parser, show
from benchmarks.networks import NETWORKS as NETWORKS_BY_NAME
from replication import DataParallel, Scattered
from replication.version import __version__
from syncbn import SynchronizedBatchNorm2d, convert_model
from tests.cuda import runtime

DEVICE = "cuda:0"

NETWORKS = ("dense", "resnet")

ABOUT_LAUNCHES = (
    f"Kernels that {REPLICAS} replicas of one layer launch in forward and backward. The unit is "
    "plain BatchNorm."
)


def kernels_of(run: Callable[[], object]) -> float:
    """Counts the kernels of a second run, by the profiler, or by a simulated runtime itself."""
    run()
    torch.cuda.synchronize()
    if runtime.device_count():  # which no profiler sees
        with runtime.counted() as found:
            run()
        return float(sum(found["launches"].values()))
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in events.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return float(len(kernels))


def launches(make: Callable[[nn.Module], nn.Module]) -> float:
    """Counts the kernels of a forward and a backward of replicas."""
    layer = make(nn.BatchNorm2d(64)).to(DEVICE)
    model = DataParallel(layer, [DEVICE] * REPLICAS, gather_to_one_device=False)
    shards, upstream = (
        [torch.randn(8, 64, 56, 56, device=DEVICE) for _ in range(REPLICAS)] for _ in range(2)
    )
    for shard in shards:
        shard.requires_grad_()

    def run() -> None:
        outputs = model(Scattered(shards))
        torch.autograd.grad(outputs, [*shards, *model.parameters()], upstream)

    return kernels_of(run)


ABOUT_LAUNCHES_OF_A_RANK = (
    "Kernels, and copies between the host and the GPU, of one layer in forward and backward, in a "
    "process whose group pretends to have two ranks. What it pretends to exchange is copied, so "
    "these copies count as well. The unit is plain BatchNorm."
)


def launches_of_a_rank(rank: int) -> Row:
    """Counts the kernels of a forward and a backward in a process, in each way."""
    x, upstream = (torch.randn(8, 64, 56, 56, device=DEVICE) for _ in range(2))
    figures = {}
    with processes.pretending():
        for name, convert in processes.ON_ACCELERATORS.items():
            layer = convert(nn.Sequential(nn.BatchNorm2d(64))).to(DEVICE)
            inputs = [x.requires_grad_(), *layer.parameters()]

            def run(layer: nn.Module = layer, inputs: list[torch.Tensor] = inputs) -> None:
                torch.autograd.grad(layer(x), inputs, upstream)

            figures[name] = (kernels_of(run),)
    return Row("8 x 64 x 56 x 56", 1, torch.get_num_threads(), figures)


def counts_of_a_rank() -> Iterator[Row]:
    yield in_processes(1, 0, launches_of_a_rank)


ABOUT_HOST = (
    f"A stack of {host.LAYERS} BatchNorms on the GPU, in a process whose group pretends to have "
    f"two ranks and exchanges nothing. {host.UNIT}"
)


def times_of_the_host(seconds: float) -> Iterator[Row]:
    figures = in_processes(1, 1, rank_of_two, host.in_rank, DEVICE, seconds)
    yield Row(f"{host.LAYERS} layers", 1, 1, figures)


def count(rank: int) -> Row:
    figures = {name: (launches(make),) for name, make in WAYS.items()}
    return Row("8 x 64 x 56 x 56", REPLICAS, torch.get_num_threads(), figures)


def counts() -> Iterator[Row]:
    yield in_processes(1, 0, count)


ABOUT_THREADS = (
    "ResNet-50 with `torch.backends.cudnn.benchmark`, on two replicas. torch keeps cuDNN's plans "
    "per thread. Its DataParallel makes new threads in each forward, but syncbn keeps them. The "
    "unit is torch's. Cells are the second and later steps, and in brackets the first step."
)

ABOUT_MEMORY = (
    "How much the resident memory of the host grows in 200 such steps, after 20, in MiB. The unit "
    "is torch's."
)

#: Each wraps a network in two replicas on the GPU.
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch's DataParallel": lambda net: nn.DataParallel(net, [DEVICE] * 2),
    "syncbn": lambda net: DataParallel(net, [DEVICE] * 2),
}


def steps_of(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Figures]:
    """A training step of a new network, with plain BatchNorm, that searches cuDNN's plans."""
    torch.backends.cudnn.benchmark = True
    _, build, (samples, *shape) = NETWORKS_BY_NAME["resnet"]
    return step.training(wrap(build().to(DEVICE)), torch.randn(2 * samples, *shape, device=DEVICE))


def plans(rank: int, name: str, count: int = 10) -> Figures:
    """Milliseconds of a later step, and of the first, in a new process."""
    run = steps_of(WRAPPERS[name])
    first, *later = [run()[0] for _ in range(count)]
    return statistics.median(later), first


def resident() -> float:
    """The memory of this process in MiB, where Linux's /proc tells it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(rank: int, name: str, warm_up: int = 20, count: int = 200) -> Figures:
    """MiB by which the process grows."""
    run, sizes = steps_of(WRAPPERS[name]), []
    for number in (warm_up, count):
        for _ in range(number):
            run()
        sizes.append(resident())
    return (sizes[1] - sizes[0],)


def in_turn(measure: Callable[..., Figures]) -> Iterator[Row]:
    figures = {name: in_processes(1, 0, measure, name) for name in WRAPPERS}
    yield Row("ResNet-50, 64x64", REPLICAS, torch.get_num_threads(), figures)


ABOUT_STEPS = (
    "Training steps of two and four replicas that share the GPU: forward, backward and SGD. The "
    "unit is plain BatchNorm in replicas made as `nn.DataParallel` makes them, which synchronize "
    "nothing. Cells are the step, and in brackets forward and backward."
)


def tables(seconds: float) -> list[Table]:
    return [
        Table("Launches on a GPU", ABOUT_LAUNCHES, counts(), unit="launches"),
        Table(
            "Launches of a rank on a GPU",
            ABOUT_LAUNCHES_OF_A_RANK,
            counts_of_a_rank(),
            unit="launches",
            counted="processes",
        ),
        Table(
            "The host's time of a rank on a GPU",
            ABOUT_HOST,
            times_of_the_host(seconds),
            counted="processes",
        ),
        Table("Plans of convolutions", ABOUT_THREADS, in_turn(plans)),
        Table("Memory of the host", ABOUT_MEMORY, in_turn(growth), unit="MiB"),
        Table("Training steps on a GPU", ABOUT_STEPS, step.rows(seconds, NETWORKS, device=DEVICE)),
        Table(
            "Between processes on a GPU",
            processes.ABOUT,
            processes.rows(seconds, NETWORKS, (2,), DEVICE),
            counted="processes",
        ),
    ]


# -- what runs at all ----------------------------------------------------------------------------

#: Seconds after which no further check or table begins, after which everything ends, and which one
#: check or table may take.
ENOUGH, LATEST, LONGEST = 400.0, 470.0, 120.0


def self_check(*launcher: str) -> str:
    """Runs ``python -m syncbn``, perhaps by a launcher. Returns its last lines."""
    command = [sys.executable, *launcher, "-m", "syncbn", "--timeout", str(LONGEST)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    block = done.stdout.rpartition("```\n")[0].rpartition("```\n")[2]
    failures = [text for text in block.splitlines() if text.startswith("FAIL  ")]
    verdicts = block.count("\nPASS  "), len(failures)
    if done.returncode and not failures:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return "; ".join([f"{verdicts[0]} pass", *failures])


def on_ranks() -> str:
    """Two ranks share the GPU, by gloo, because NCCL refuses that."""
    return self_check("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def rank_of_two(rank: int, measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measures in a process whose group pretends to have two ranks and exchanges nothing."""
    with processes.pretending():
        return measure(*arguments)


def compiled(mode: str | None) -> str:
    """A training step of a converted network in one graph, and uncompiled."""
    if find_spec("triton") is None:
        raise RuntimeError("torch.compile needs Triton on a GPU")
    net = convert_model(nn.Sequential(*[networks.conv(16, 16) for _ in range(4)])).to(DEVICE)
    x = torch.randn(16, 16, 56, 56, device=DEVICE)
    whole = torch.compile(net, fullgraph=True, mode=mode)
    taken = []
    for model in (net, whole):
        run = step.training(model, x)
        for _ in range(5):
            run()
        taken.append(statistics.median(run()[0] for _ in range(20)))
    return f"one graph, {taken[1]:.2f} ms (uncompiled {taken[0]:.2f} ms)"


def captured(samples: int) -> str:
    """A forward and backward of a layer, captured by `torch.cuda.graph` and replayed."""
    layer = SynchronizedBatchNorm2d(16, device=DEVICE)
    x = torch.randn(samples, 16, 8, 8, device=DEVICE, requires_grad=True)

    def run() -> None:
        layer(x).square().sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    before = int(layer.num_batches_tracked)
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    counted = int(layer.num_batches_tracked) - before
    if counted != 2:
        raise RuntimeError(f"two replays have counted {counted} batches")
    return "captured, replayed twice"


def checks() -> dict[str, Callable[[], str]]:
    """What is checked, by name. Each returns what it found, or raises."""

    def in_rank(measure: Callable[..., str], *arguments: Any) -> Callable[[], str]:
        return partial(in_processes, 1, 0, rank_of_two, measure, *arguments)

    return {
        "`python -m syncbn`: replicas on the CPU and on the GPU, ranks on the CPU": self_check,
        "`torchrun -m syncbn`: two ranks on this GPU, by gloo": on_ranks,
        "a step in one graph, `fullgraph=True`": in_rank(compiled, None),
        'the same with `mode="reduce-overhead"`': in_rank(compiled, "reduce-overhead"),
        "`torch.cuda.graph` of a layer": in_rank(captured, 8),
        "`torch.cuda.graph` of a layer with an empty shard": in_rank(captured, 0),
    }


def attempted(step: Callable[[], str], begin: float) -> str:
    """What a check or a table returned, or why it could not run."""
    passed = time.monotonic() - begin
    if passed > ENOUGH:
        return "skipped: it is late"
    # A step that hangs, hangs in a process that it has started.
    seconds, is_late = min(LONGEST, LATEST - passed), Event()
    limit = Timer(seconds, end_processes, [is_late])
    limit.daemon = True
    limit.start()
    try:
        return step()
    except Exception as error:
        if is_late.is_set() or isinstance(error, subprocess.TimeoutExpired):
            return f"ended: it took more than {seconds:.0f} s"
        first = (str(error) or type(error).__name__).strip().partition("\n")[0]
        return f"failed: {type(error).__name__}: {first[:200].replace('|', '/')}"
    finally:
        limit.cancel()


def end_processes(is_late: Event) -> None:
    is_late.set()
    for process in active_children():
        process.kill()


def shown(table: Table) -> str:
    """Prints a table."""
    show(table)
    return ""


def environment() -> str:
    memory = torch.cuda.get_device_properties(DEVICE).total_memory / 2**30
    return (
        f"synchronized-batchnorm {__version__}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
        f"Python {platform.python_version()}, {platform.platform()}, on "
        f"{torch.cuda.get_device_name(DEVICE)} ({memory:.0f} GiB)."
    )


def main() -> None:
    seconds = parser(__doc__).parse_args().seconds
    if not torch.cuda.is_available():
        raise SystemExit(
            f"this needs a CUDA device, and torch {torch.__version__} finds none on this machine; "
            "python -m syncbn checks what there is"
        )
    begin = time.monotonic()
    print(f"\n### What runs on a GPU\n\n{environment()}\n")
    print(f"{line(['check', 'result'])}\n{line(['---', '---'])}", flush=True)
    for name, check in checks().items():
        print(line([name, attempted(check, begin)]), flush=True)
    for table in tables(seconds):
        if why := attempted(partial(shown, table), begin):
            print(f"\n{table.title}: {why}", flush=True)


if __name__ == "__main__":
    main()
