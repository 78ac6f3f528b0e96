"""The settings of the audit on two ranks and on one, without this toolkit.

    python -m benchmarks.audit.by_hand "open_clip_torch: ClipLoss()"

Processes start, meet over a file, and train one step under `DistributedDataParallel`. Their
gradients and buffers are then beside those of a process that has the whole batch.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.audit.settings import SETTINGS, made
from benchmarks.started import started

#: Seconds in which the ranks of a setting must end.
PATIENCE = 120
#: Errors up to which numbers count as equal, relative to the largest of a tensor.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def train(key: str, samples: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """One step of a rank: its loss, the gradients of its parameters, and its buffers."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    given = made(key, samples)
    dtype = given.get("dtype", torch.float64)
    net, loss = given["model"].to(dtype), given["loss"]
    if isinstance(loss, nn.Module):
        loss.to(dtype)
    x = given["batch"].to(dtype).chunk(size)[rank]
    targets = [t.chunk(size)[rank] for t in (given.get("targets"),) if t is not None]
    model = DistributedDataParallel(net)  # kept, because its hooks end with it
    torch.manual_seed(rank)
    value = loss(model(x), *targets)
    value = sum(value.values()) if isinstance(value, dict) else value
    value.backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return value.item(), gradients, dict(net.named_buffers())


def relation(ours: Tensor, alone: Tensor, largest: float, tolerance: float) -> str:
    """What a gradient is beside that of one process: equal, 1/2, or other."""
    scale = max(alone.abs().max().item(), 1e-3 * largest)
    for name, factor in (("equal", 1.0), ("1/2", 0.5)):
        if (ours - factor * alone).abs().max().item() <= tolerance * scale:
            return name
    return "other"


def compared(key: str, samples: int = 8) -> tuple[str, list[float], dict[str, str]]:
    """A setting's result, the losses of one process and of two, and the result by parameter."""
    (one,), two = (started(size, train, key, samples, seconds=PATIENCE) for size in (1, 2))
    if one.value is None:
        raise RuntimeError(f"one process alone has failed with {key!r}: {one.error or one.how}")
    if any(rank.value is None for rank in two):
        return "refused", [], {}
    value, expected, buffers = one.value
    (first, gradients, own), (second, _, _) = (rank.value for rank in two)
    dtype = next(iter(expected.values())).dtype
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    found = {
        name: relation(gradients[name], alone, largest, TOLERANCE[dtype])
        for name, alone in expected.items()
    }
    for name, alone in buffers.items():
        if alone.is_floating_point() and alone.numel():
            found[name] = relation(own[name], alone, 0.0, TOLERANCE[dtype])
    kinds = dict.fromkeys(found.values())
    result = "other" if "other" in kinds else ", ".join(sorted(kinds))
    return result, [value, first, second], found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="all, by default")
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    for key in options.settings or SETTINGS:
        result, losses, found = compared(key, options.samples)
        values = ", ".join(f"{value:.6g}" for value in losses)
        print(f"{key}\n  {result}; losses of one process and of the ranks: {values}")
        for name, each in found.items():
            print(f"  {each:6} {name}", flush=True)


if __name__ == "__main__":
    main()
