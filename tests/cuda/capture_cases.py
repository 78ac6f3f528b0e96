"""What each rank captures by `torch.cuda.graph`, and compares with one CPU device in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from replication import ProcessGroup
from syncbn import convert_model
from tests.cuda.matrix import (
    SIZES,
    Samples,
    Step,
    assert_close,
    batch,
    convolutions,
    network,
    state_of,
    step,
)
from tests.cuda.rank_cases import CONVERSIONS, WRAPS, own_part, shard_of

IMAGES = Samples((6, 4, 5))

#: DDP makes its buckets anew in the first steps, and wants eleven before a capture.
WARM_UP = 11


def captured(run: Callable[[], Any], side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Captures a function on a stream, on which it has run before.

    So the nodes that add gradients, which belong to a stream, belong to that of the capture.
    """
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # In the mode "global" another thread's call, such as one of NCCL's watchdog, ends a capture.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        run()
    return graph


class Training:
    """A step of training, with the optimizer's, that uses the same memory each time."""

    def __init__(self, net: nn.Module, model: Any, x: Tensor, dy: Tensor, wrap: str) -> None:
        self.net, self.model, self.wrap = net, model, wrap
        self.x, self.dy, self.y = x.clone().requires_grad_(), dy.clone(), torch.empty(0)
        # DDP divides gradients by the number of ranks.
        lr = 0.05 if wrap == "alone" else 0.05 * distributed.get_world_size()
        self.optimizer = torch.optim.SGD(net.parameters(), lr)

    def run(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        if self.x.grad is not None:
            self.x.grad.zero_()
        self.y = self.model(self.x)
        self.y.backward(self.dy)
        if self.wrap == "alone":
            for parameter in self.net.parameters():
                distributed.all_reduce(parameter.grad)
        self.optimizer.step()

    def found(self) -> Step:
        assert self.x.grad is not None
        return {"y": self.y.detach(), "x.grad": self.x.grad, **state_of(self.net)}


def replays_a_step(wrap: str, split: str, options: dict[str, Any], conversion: str) -> None:
    """Three replays on new data."""
    plain = network(IMAGES, options)
    sizes = SIZES[split](distributed.get_world_size())
    part = own_part(sizes)
    net = CONVERSIONS[conversion](copy.deepcopy(plain)).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # to which DDP's nodes will belong
        model = WRAPS[wrap](net)
    torch.cuda.current_stream().wait_stream(side)
    x, dy = batch(IMAGES, sum(sizes))
    training = Training(net, model, x[part].cuda(), dy[part].cuda(), wrap)
    graph = captured(training.run, side)
    net.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(3):
        x, dy = batch(IMAGES, sum(sizes))
        with torch.no_grad():
            training.x.copy_(x[part])
            training.dy.copy_(dy[part])
        graph.replay()
        expected = step(plain, plain, x, dy)
        optimizer.step()
        right = {"y": expected["y"], "x.grad": expected["x.grad"], **state_of(plain)}
        assert_close(training.found(), shard_of(right, part))


def captures_with_autocast(dtype: torch.dtype) -> None:
    """The capture and its replays run; their numbers are those of the same steps without it."""
    size = distributed.get_world_size()
    nets = [convert_model(convolutions().float()).cuda() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x, dy = batch(IMAGES, 4 * size)
    part = own_part([4] * size)

    def model_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(leaf: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
                return net(leaf).float()  # type: ignore[no-any-return]

        return run

    own, upstream = x[part].cuda().float(), dy[part].cuda().float()
    trainings = [Training(net, model_of(net), own, upstream, "alone") for net in nets]
    graph = captured(trainings[0].run, torch.cuda.Stream())
    nets[0].load_state_dict(nets[1].state_dict())
    for _ in range(2):
        graph.replay()
        trainings[1].run()
    found, expected = (training.found() for training in trainings)
    assert_close(found, {name: t.cpu() for name, t in expected.items()}, 1e-6)


def captures_a_collective(name: str) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    group = ProcessGroup(name="here")
    x = torch.zeros(3, dtype=torch.float64, device="cuda")
    calls: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: group.all_reduce(x),
        "mean": lambda: group.all_reduce(x, op="mean"),
        "broadcast": lambda: group.broadcast(x, size - 1),
        "all_gather": lambda: torch.cat(group.all_gather(x, same_shape=True)),
        "reduce_scatter": lambda: group.reduce_scatter([x + r for r in range(size)]),
    }
    results = {}

    def run() -> None:
        results["y"] = calls[name]()

    graph = captured(run, torch.cuda.Stream())
    x.copy_(torch.arange(3) + 10 * rank)
    graph.replay()
    of_each = torch.stack([torch.arange(3).double() + 10 * r for r in range(size)])
    expected = {
        "all_reduce": of_each.sum(0),
        "mean": of_each.mean(0),
        "broadcast": of_each[-1],
        "all_gather": of_each.flatten(),
        "reduce_scatter": of_each.sum(0) + size * rank,
    }
    assert_close(results, {"y": expected[name]})
