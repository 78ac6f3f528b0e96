"""A batch of padded sequences, normalized by `bn(x, mask=mask)` and by `bn(x[mask])`.

    python -m benchmarks.masks

No GPU is needed: a step for which the host of one would not wait runs on the meta device, and in
others the operations are counted that look for the places where a mask is true.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.activations import kept
from benchmarks.measuring import alternating, line, parser, timed
from syncbn import SynchronizedBatchNorm1d

#: Samples, channels, and the length of the padded batch.
SHAPE = (32, 64, 128)

#: Batches of other lengths.
BATCHES = 20

COLUMNS = (
    "graph breaks",
    f"graphs compiled again in {BATCHES} batches",
    "host waits",
    "kept for backward, in inputs",
    "time of a step on the CPU, `bn(x)` = 1",
)


class Masked(nn.Module):
    """The layer itself takes the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(SHAPE[1])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.bn(x, mask=mask)


class Indexed(Masked):
    """The layer gets the valid values only, ``(n, C)``."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = x.transpose(1, 2)
        y = torch.zeros_like(rows)
        y[mask] = self.bn(rows[mask])
        return y.transpose(1, 2)


class Unmasked(Masked):
    """Padding counts, so the statistics are others."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.bn(x)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "`bn(x, mask=mask)`": Masked,
    "`y[mask] = bn(x[mask])`": Indexed,
    "`bn(x)`, padding counts": Unmasked,
}


def batch(seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Sequences of random lengths, from 1 to that of the padded batch, and their mask."""
    samples, _, longest = SHAPE
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (samples,), generator=generator)
    x = torch.randn(SHAPE, generator=generator)
    return x.to(device).requires_grad_(), (torch.arange(longest) < lengths[:, None]).to(device)


def graphs(make: Callable[[], nn.Module]) -> tuple[int, int]:
    """Returns the graph breaks of a first step, and the graphs compiled in the steps after it."""
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    torch.compiler.reset()
    counters.clear()
    model = torch.compile(make(), backend=backend)
    model(*batch()).sum().backward()
    breaks, first = sum(counters["graph_break"].values()), len(compiled)
    for seed in range(1, BATCHES):
        model(*batch(seed)).sum().backward()
    torch.compiler.reset()
    return breaks, len(compiled) - first


class Waits(TorchDispatchMode):
    """Counts the operations for which the host of a GPU would wait."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            # Indexing by a mask looks for the places where it is true.
            self.count += any(index is not None and index.dtype is torch.bool for index in args[1])
        elif name in ("nonzero", "masked_select", "_local_scalar_dense", "equal"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def host_waits(make: Callable[[], nn.Module]) -> int:
    """Returns how often the host of a GPU would wait in a step."""

    def step(device: str) -> None:
        model, (x, mask) = make().to(device), batch(device=device)
        model(x, mask).backward(x.detach())

    try:
        step("meta")
    except NotImplementedError:  # something asks for values, which tensors on this device lack
        with Waits() as waits:
            step("cpu")
        return waits.count
    return 0


def memory(make: Callable[[], nn.Module]) -> float:
    """Returns what a graph keeps for backward, in units of its input."""
    model, (x, mask) = make(), batch()
    x = x * 1.0  # as the output of a layer, which the graph keeps itself
    return kept(model(x, mask), model) / (x.numel() * x.element_size())


def times(seconds: float) -> dict[str, float]:
    """Returns the time of an uncompiled step, as a multiple of the last way's."""

    def step(model: nn.Module, x: Tensor, mask: Tensor) -> None:
        model(x, mask).backward(x.detach())

    steps = {name: partial(step, make(), *batch()) for name, make in WAYS.items()}
    taken = alternating({name: partial(timed, step) for name, step in steps.items()}, seconds)
    unit = list(taken.values())[-1][0]
    return {name: figures[0] / unit for name, figures in taken.items()}


def lines(seconds: float) -> list[str]:
    """Returns the table in Markdown."""
    found, taken = [line(("", *COLUMNS)), line(["---"] * (1 + len(COLUMNS)))], times(seconds)
    for name, make in WAYS.items():
        cells = *graphs(make), host_waits(make)
        found.append(line((name, *map(str, cells), f"{memory(make):.2f}", f"{taken[name]:.2f}")))
    return found


def main() -> None:
    arguments = parser(__doc__).parse_args()
    print("\n".join(lines(arguments.seconds)))


if __name__ == "__main__":
    main()
