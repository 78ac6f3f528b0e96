"""What it takes to make replicas: ours to torch's way, and the callbacks.

The network is a ResNet-50, plain, on CPU replicas. Torch's way is that of
`torch.nn.parallel.replicate`, which refuses the CPU: the shells, then each child, parameter and
buffer of each of them by ``setattr``. What copies the tensors is the same in both: all parameters
go through one node of the graph, and of the buffers copy 0 has the originals, the others clones.

    python -m benchmarks.replicate
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.measuring import WARM_UP, Row, alternating, replica_counts, run, seconds
from benchmarks.networks import resnet
from replication import execute_replication_callbacks, replicate
from replication.devices import parse_devices
from replication.steps.broadcast import broadcast, copied_buffers

#: That have a callback.
MODULES = 1_000


class Called(nn.Module):
    """A small module with a callback."""

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        pass


def torch_replicate(module: nn.Module, replicas: int) -> list[nn.Module]:
    """As torch does it for a network on its first device."""
    devices = parse_devices(["cpu"] * replicas)
    parameters: list[Tensor] = list(module.parameters())
    buffers = list(module.buffers())
    parameter_indices = {parameter: index for index, parameter in enumerate(parameters)}
    buffer_indices = {buffer: index for index, buffer in enumerate(buffers)}
    parameter_copies = broadcast(parameters, devices)
    buffer_copies = copied_buffers(buffers, devices, detach=False)
    modules = list(module.modules())
    copies: list[list[Any]] = [[] for _ in devices]
    module_indices: dict[nn.Module, int] = {}
    for i, submodule in enumerate(modules):
        module_indices[submodule] = i
        for j in range(replicas):
            shell: Any = submodule._replicate_for_data_parallel()
            shell._former_parameters = OrderedDict()
            copies[j].append(shell)
    for i, submodule in enumerate(modules):
        for name, child in submodule._modules.items():
            for j in range(replicas):
                if child is None:
                    copies[j][i]._modules[name] = None
                else:
                    setattr(copies[j][i], name, copies[j][module_indices[child]])
        for name, parameter in submodule._parameters.items():
            for j in range(replicas):
                if parameter is None:
                    copies[j][i]._parameters[name] = None
                else:
                    copy = parameter_copies[j][parameter_indices[parameter]]
                    setattr(copies[j][i], name, copy)
                    copies[j][i]._former_parameters[name] = copy
        for name, buffer in submodule._buffers.items():
            for j in range(replicas):
                if buffer is None:
                    copies[j][i]._buffers[name] = None
                else:
                    setattr(copies[j][i], name, buffer_copies[j][buffer_indices[buffer]])
    return [copy[0] for copy in copies]


def ratio(network: nn.Module, replicas: int, steps: int) -> float:
    """The median time of ours to that of torch's way."""
    ways: list[Callable[[], object]] = [
        partial(replicate, network, ["cpu"] * replicas),
        partial(torch_replicate, network, replicas),
    ]
    ours, theirs = alternating(ways, steps)
    return ours / theirs


def callbacks(modules: int, replicas: int, steps: int) -> float:
    """The median seconds that the callbacks of so many small modules take."""
    network = nn.Sequential(*(Called() for _ in range(modules)))
    times = []
    for _ in range(WARM_UP + steps):
        devices = ["cpu"] * replicas
        copies = replicate(network, devices)
        times.append(seconds(partial(execute_replication_callbacks, copies, devices)))
    return statistics.median(times[WARM_UP:])


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    network = resnet(4, (1, 1, 1, 1)) if quick else resnet()
    counts = replica_counts(quick)
    figures = {n: ratio(network, n, steps) for n in counts}
    yield Row("replicate", "ResNet-50, to torch's way", figures, goal=0.25)
    modules = 10 if quick else MODULES
    figures = {n: 1e3 * callbacks(modules, n, steps) for n in counts}
    yield Row("replicate", f"callbacks of {modules} modules", figures, goal=20, unit="ms")


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
