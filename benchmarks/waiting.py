"""What it costs a layer between ranks that the host waits for the GPU: wall time per layer.

    python -m benchmarks.waiting
    python -m benchmarks.waiting --write     # into details.md

Kernels of the simulated CUDA runtime (`tests/cuda`) compute nothing here, and take the time that a
row says. So a host that waits for them waits as long as it would for those of a GPU. For the rest,
the settings are those of `benchmarks.host`.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import distributed, nn

from benchmarks import simulated
from benchmarks.host import LAUNCH, SETTINGS
from benchmarks.launches import RANKS, SHAPE, WAYS, in_ranks, nccl, print_or_write, stack
from benchmarks.measuring import environment, line
from tests.cuda import runtime

#: Of the kernels.
MICROSECONDS = (0, 20, 100)

LAYERS, ROUNDS, WARM_UP = 50, 15, 3

ABOUT = (
    "Microseconds of wall time per layer, in forward + backward, that the host of one of "
    f"{RANKS} ranks (NCCL) needs to launch a stack of {LAYERS} layers on shards of "
    f"{' x '.join(map(str, SHAPE))}. The GPU is simulated: each of its kernels takes the time in "
    f"the first column and computes nothing. A launch takes the host {LAUNCH} us, and so does a "
    "collective, which waits for no other rank."
)


def step(net: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> float:
    """Microseconds per layer until the host has launched a forward and backward."""
    begin = time.perf_counter()
    torch.autograd.grad(net(x), [x, *net.parameters()], dy)
    return 1e6 * (time.perf_counter() - begin) / LAYERS


def of_a_rank(rank: int, folder: str) -> dict[str, dict[str, float]]:
    """The median of each way, by the time of a kernel. The ways take turns."""
    x = torch.zeros(SHAPE, device=f"cuda:{rank}", requires_grad=True)
    dy, found = torch.zeros_like(x), {}
    with nccl(rank, RANKS, folder):
        nets = {way: make(stack(LAYERS)).to(x.device) for way, make in WAYS.items()}
        for kernel in MICROSECONDS:
            taken: dict[str, list[float]] = {way: [] for way in nets}
            runtime.set_times(kernel, launch=LAUNCH)
            for _ in range(ROUNDS):
                for way, net in nets.items():
                    torch.cuda.synchronize()
                    distributed.barrier(device_ids=[rank])
                    taken[way].append(step(net, x, dy))
            found[str(kernel)] = {
                way: statistics.median(own[WARM_UP:]) for way, own in taken.items()
            }
    return found


def measured() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = in_ranks(of_a_rank)
    return found


def table() -> str:
    with environment(SETTINGS):
        found = simulated.call("benchmarks.waiting:measured", devices=RANKS, computes=False)
    rows = [["kernels of", *WAYS], ["---"] * (1 + len(WAYS))]
    for kernel, ways in found.items():
        rows.append([f"{kernel} us", *(f"{taken:,.0f}" for taken in ways.values())])
    return "\n".join((ABOUT, "", *map(line, rows)))


if __name__ == "__main__":
    print_or_write(__doc__, table, "waiting")
