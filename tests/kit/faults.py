"""A network in which an error strikes one copy of one layer, and the step of its plain twin."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from syncbn import SynchronizedBatchNorm1d
from tests.kit import steps
from tests.kit.layers import Centering, Numbered
from tests.kit.wrappers import Run


class Fault:
    """An error that is raised at one place, in one replica, while it is active."""

    def __init__(self, place: str, replica: int, error: BaseException | None = None) -> None:
        self.place = place
        self.replica = replica
        self.error = error
        self.active = True
        self.has_struck = False
        #: Weak references to the copies of a layer in all forwards.
        self.copies: list[weakref.ref[nn.Module]] = []

    def strike(self, place: str, replica: int | None) -> None:
        if self.active and (place, replica) == (self.place, self.replica):
            self.has_struck = True
            self.act()

    def act(self) -> None:
        assert self.error is not None
        raise self.error


class Point(Numbered):
    """Passes on its input, unless the fault is in this place, in the callback or in backward."""

    def __init__(self, place: str, fault: Fault) -> None:
        super().__init__()
        self.place = place
        self.fault = fault

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        self.fault.copies.append(weakref.ref(self))
        self.fault.strike(f"callback, {self.place}", copy_id)

    def forward(self, x: Tensor) -> Tensor:
        fault, place, copy_id = self.fault, self.place, self.copy_id
        fault.strike(place, copy_id)
        x = StrikesInBackward.apply(x, fault, f"backward, {place}", copy_id)
        x.register_hook(lambda dy: fault.strike(f"tensor hook, {place}", copy_id))
        return x


class StrikesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
        ctx.where = where
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        fault, place, copy_id = ctx.where
        fault.strike(place, copy_id)
        return dy, None, None, None


class FaultyBatchNorm(SynchronizedBatchNorm1d):
    """Can be struck in the layer, before it has sent anything."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(3, dtype=torch.float64)
        self.fault = fault

    def _check_input_dim(self, input: Tensor) -> None:
        super()._check_input_dim(input)
        self.fault.strike("in", self.group.rank)


class FaultyCentering(Centering):
    """Can be struck in its master's callback, which runs in copy 0."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def _data_parallel_master(self, intermediates: Any) -> list[tuple[Any, Tensor]]:
        self.fault.strike("master", 0)
        return super()._data_parallel_master(intermediates)


def faulty(fault: Fault) -> nn.Sequential:
    """A network of two synchronized layers and an older one, in float64."""
    struck = FaultyBatchNorm(fault)
    struck.register_forward_pre_hook(
        lambda layer, args: fault.strike("pre-hook", layer.group.rank)
    )
    struck.register_forward_hook(
        lambda layer, args, output: fault.strike("hook", layer.group.rank)
    )
    layers: list[tuple[str, nn.Module]] = [
        ("first", nn.Linear(3, 3, dtype=torch.float64)),
        ("before", Point("before", fault)),
        ("bn1", SynchronizedBatchNorm1d(3, dtype=torch.float64)),
        ("between", Point("between", fault)),
        ("bn2", struck),
        ("center", FaultyCentering(fault)),
        ("after", Point("after", fault)),
        ("last", nn.Linear(3, 2, dtype=torch.float64)),
    ]
    return nn.Sequential(OrderedDict(layers))


def twin_of(net: nn.Sequential) -> nn.Sequential:
    """The same with torch's layers, for one device."""
    twins: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in net.named_children():
        if isinstance(layer, nn.Linear):
            twins[name] = nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)
        elif isinstance(layer, nn.BatchNorm1d):
            twins[name] = nn.BatchNorm1d(layer.num_features, dtype=torch.float64)
        else:
            twins[name] = Centering() if isinstance(layer, Centering) else nn.Identity()
    twin = nn.Sequential(twins)
    twin.load_state_dict(net.state_dict())
    return twin


def batch(features: int = 2, samples: int = 7) -> tuple[Tensor, Tensor]:
    """An input whose last replica gets a single sample, and an upstream gradient."""
    x, dy = (torch.randn(samples, size, dtype=torch.float64) for size in (3, features))
    return x, dy


def assert_next_step_is_exact(
    run: Run, net: nn.Module, twin: nn.Module, step: tuple[Tensor, Tensor] | None = None
) -> None:
    x, dy = step or batch()
    expected = steps.step(twin, twin, x, dy)
    torch.testing.assert_close(steps.step(run, net, x, dy), expected, rtol=1e-10, atol=1e-12)
