"""What synchronization costs in a step of training, and what replicas on the CPU cost.

A step is forward, backward and SGD of a ResNet-50 of width 32 on 96 x 96 images, 8 per replica,
or of its usual width on 160 x 160 images, where the time is that of convolutions.

    converted   under `replication.DataParallel` on CPU replicas, to the same network with plain
                BatchNorm; one torch thread each
    replicas    the plain network on 2 replicas with one torch thread each, to the network itself
                on the whole batch with all threads. Backward runs in one thread, the caller's,
                whatever the replicas are: with as many torch threads as the forward has, or with
                all. Torch's threads wait for each other: where something else runs beside them a
                step may take a hundred times as long, and the replicas look well. So the last row
                has the network itself with all threads, to one; above 1 the machine was busy, and
                the rows before it say nothing.

    python -m benchmarks.step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.measuring import Row, alternating, run
from benchmarks.networks import resnet
from replication import DataParallel
from syncbn import convert_model

#: What torch has when nobody has set it: this is read before a part sets it.
ALL_THREADS = torch.get_num_threads()


def network(quick: bool, width: int = 32) -> nn.Module:
    return resnet(4, (1, 1, 1, 1)) if quick else resnet(width)


def batch(replicas: int, quick: bool, size: int = 96) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    samples, size = (2 * replicas, 32) if quick else (8 * replicas, size)
    return torch.randn(samples, 3, size, size), torch.arange(samples) % 10


def trained(
    model: nn.Module, images: Tensor, classes: Tensor, forward: int = 1, backward: int = 1
) -> Callable[[], None]:
    """A step of training, with so many torch threads forward and backward."""
    # Slow, so that figures stay figures for as many steps as one likes.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        torch.set_num_threads(forward)
        loss = nn.functional.cross_entropy(model(images), classes)
        if backward != forward:
            torch.set_num_threads(backward)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def converted(replicas: int, steps: int, quick: bool, width: int = 32, size: int = 96) -> float:
    """The median time of a step of synchronized replicas to that of plain ones."""
    images, classes = batch(replicas, quick, size)
    ours, plain = alternating(
        [
            trained(DataParallel(net, ["cpu"] * replicas), images, classes)
            for net in (convert_model(network(quick, width)), network(quick, width))
        ],
        steps,
    )
    return ours / plain


def replicas_on_the_cpu(replicas: int, steps: int, quick: bool) -> tuple[float, float, float]:
    """The median time of a step of plain replicas, backward with one thread and with all, to that
    of the whole batch with all threads; and of that to one of the whole batch with one thread."""
    images, classes = batch(replicas, quick)
    model = partial(DataParallel, device_ids=["cpu"] * replicas)
    one, every, whole, single = alternating(
        [
            trained(model(network(quick)), images, classes),
            trained(model(network(quick)), images, classes, backward=ALL_THREADS),
            trained(network(quick), images, classes, ALL_THREADS, ALL_THREADS),
            trained(network(quick), images, classes),
        ],
        steps,
    )
    torch.set_num_threads(1)
    return one / whole, every / whole, whole / single


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    figures = {n: converted(n, steps, quick) for n in ((2,) if quick else (2, 4))}
    yield Row("step", "converted, to plain BatchNorm", figures, goal=1.03)
    usual = {2: converted(2, min(steps, 30), quick, 64, 160)}
    yield Row("step", "converted, to plain BatchNorm, width 64", usual, goal=1.03)
    one, every, control = replicas_on_the_cpu(2, steps, quick)
    for threads, figure in (("one", one), ("all", every)):
        case = f"plain replicas, backward with {threads} of {ALL_THREADS} threads, to one replica"
        yield Row("step", case, {2: figure}, goal=1.1)
    yield Row("step", f"control: one replica with {ALL_THREADS} threads, to one", {2: control})


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
