"""Layers that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from replication import SyncMaster
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d

#: torch's layer and the synchronized one, by the number of spatial dimensions.
LAYERS = {
    1: (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    2: (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    3: (nn.BatchNorm3d, SynchronizedBatchNorm3d),
}

#: Whether a replica knows that its thread has no hooks on saved tensors.
KNOWS_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
knows_hooks = pytest.mark.skipif(
    condition=not KNOWS_HOOKS,
    reason="torch 2.6 does not say whether a thread has hooks on saved tensors",
)


class Fused(nn.BatchNorm2d):
    """A batch norm that does something more, as other libraries have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class SyncFused(Fused, SynchronizedBatchNorm2d):
    pass


class Recomputed(nn.Module):
    """Calls a network in an activation checkpoint, which computes it again in backward."""

    def __init__(self, net: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.net, self.use_reentrant = net, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=self.use_reentrant)


class Stop(torch.autograd.Function):
    """Passes its input on, and no gradient back, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Centering(nn.Module):
    """Subtracts the mean of the whole batch. Written as layers for the older toolkits are."""

    def __init__(self) -> None:
        super().__init__()
        self._sync_master = SyncMaster(self._data_parallel_master)
        self._is_parallel = False
        self._parallel_id: int | None = None
        self._slave_pipe: Any = None

    def forward(self, x: Tensor) -> Tensor:
        message = (x.sum(0), len(x))
        if not self._is_parallel:
            return x - x.mean(0)
        if self._parallel_id == 0:
            return x - self._sync_master.run_master(message).to(x.device)
        return x - self._slave_pipe.run_slave(message).to(x.device)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self._is_parallel = True
        self._parallel_id = copy_id
        if copy_id == 0:
            ctx.sync_master = self._sync_master
        else:
            self._slave_pipe = ctx.sync_master.register_slave(copy_id)

    def _data_parallel_master(self, intermediates: Any) -> list[tuple[Any, Tensor]]:
        assert intermediates[0][0] == 0
        total = sum(message[0].to(intermediates[0][1][0].device) for _, message in intermediates)
        count = sum(message[1] for _, message in intermediates)
        return [(identifier, total / count) for identifier, _ in intermediates]


def echoed(*args: Any, **kwargs: Any) -> Any:
    """The only argument, or a dict of all arguments."""
    return args[0] if len(args) == 1 and not kwargs else {"args": args, **kwargs}


class Echo(nn.Module):
    """Returns its arguments, and remembers what each replica was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []  # the replicas share it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return echoed(*args, **kwargs)


class LayerError(Exception):
    """An error that only the tests raise."""


class Numbered(nn.Module):
    """Knows which copy it is; None for the original."""

    copy_id: int | None = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.copy_id = copy_id


class WithMaster(Numbered):
    """Has a master in the older style, and a slave of it in every other copy."""

    def __init__(self, callback: Callable[[Any], Any]) -> None:
        super().__init__()
        self.master = SyncMaster(callback)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        if copy_id == 0:
            ctx.master = self.master
        else:
            ctx.master.register_slave(copy_id)


class FailsAt(Numbered):
    """Raises in one replica; passes its input on in the others. Failing can be switched off."""

    def __init__(self, replica: int, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.replica = replica
        self.error = error
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        if self.active and self.copy_id == self.replica:
            raise self.error()
        return x


class Repeat(Numbered):
    """Calls a layer as often as ``counts`` says for each replica."""

    def __init__(self, layer: nn.Module, counts: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 if self.copy_id is None else self.counts[self.copy_id]):
            x = self.layer(x)
        return x
