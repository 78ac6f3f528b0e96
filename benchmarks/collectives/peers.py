"""The collectives that are compared, each as a function of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
import torch.distributed.nn
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as in_graphs

from benchmarks.audit.common import imported
from replication import Group, functional, global_mean

Collective = Callable[[Tensor], Tensor]
Reduction = Callable[[Tensor, str], Tensor]


class Peer(NamedTuple):
    """The functions of a package. What imports it makes them, outside of what is compiled."""

    name: str
    #: Makes a function that joins the tensors of all ranks, in order, in the first dimension.
    gather: Callable[[], Collective]
    #: Makes a function that takes "sum", "mean" or "max", over the ranks.
    reduce: Callable[[], Reduction] | None = None
    #: The same as `gather`, where the caller says that all shapes are equal.
    gather_of_same_shapes: Collective | None = None
    #: The same between replicas in threads.
    gather_in_replicas: Callable[[Tensor, Group], Tensor] | None = None
    #: The mean over all ranks of losses with weights, as a loss under a wrapper that averages.
    weighted_mean: Callable[[Tensor, Tensor], Tensor] | None = None
    #: The distribution, if it is neither torch nor this toolkit.
    library: str = ""
    #: What its source says, for machines without it.
    by_reading: Mapping[str, str] = {}

    @property
    def version(self) -> str | None:
        """None if it is not installed."""
        try:
            return metadata.version(self.library) if self.library else ""
        except metadata.PackageNotFoundError:
            return None


# -- torch ---------------------------------------------------------------------------------------


def torch_gather(x: Tensor) -> Tensor:
    return torch.cat(distributed.nn.functional.all_gather(x))


def torch_reduce(x: Tensor, op: str) -> Tensor:
    reduce_op = distributed.ReduceOp.MAX if op == "max" else distributed.ReduceOp.SUM
    y = distributed.nn.functional.all_reduce(x, reduce_op)
    return y / distributed.get_world_size() if op == "mean" else y


def graph_gather() -> Collective:
    """Of the private module that torch's compiler calls, and that torch's warnings name."""
    # The second name is the one before torch 2.13.
    names = "all_gather_single_autograd", "all_gather_tensor_autograd"
    found = next(getattr(in_graphs, name) for name in names if hasattr(in_graphs, name))
    return lambda x: found(x, 0, distributed.group.WORLD)


def graph_reduce(x: Tensor, op: str) -> Tensor:
    y = in_graphs.all_reduce(x, "max" if op == "max" else "sum", distributed.group.WORLD)
    return y / distributed.get_world_size() if op == "mean" else y


# -- other packages ------------------------------------------------------------------------------


def lightly_gather() -> Collective:
    gather = imported("lightly.utils.dist").gather
    return lambda x: torch.cat(gather(x))


def metric_gather() -> Collective:
    """Its function leaves the own part out, which its losses add."""
    all_gather = import_module("pytorch_metric_learning.utils.distributed").all_gather

    def gather(x: Tensor) -> Tensor:
        others, first = all_gather(x), distributed.get_rank() * len(x)
        return torch.cat((others[:first], x, others[first:]))

    return gather


def of_accelerate(name: str) -> Any:
    import_module("accelerate").PartialState(cpu=True)
    return getattr(import_module("accelerate.utils"), name)


def accelerate_reduce() -> Reduction:
    reduce = of_accelerate("reduce")

    def reduced(x: Tensor, op: str) -> Tensor:
        if op == "max":
            raise NotImplementedError
        return reduce(x, op)

    return reduced


def lightning_gather() -> Collective:
    """What `LightningModule.all_gather(x, sync_grads=True)` calls where there are processes."""
    module = import_module("lightning.fabric.utilities.distributed")
    return lambda x: module._all_gather_ddp_if_available(x, sync_grads=True).flatten(0, 1)


# -- this toolkit --------------------------------------------------------------------------------


def our_gather(x: Tensor) -> Tensor:
    return torch.cat(functional.all_gather(x))


def our_gather_of_same_shapes(x: Tensor) -> Tensor:
    return torch.cat(functional.all_gather(x, same_shape=True))


def our_gather_in_replicas(x: Tensor, group: Group) -> Tensor:
    return torch.cat(functional.all_gather(x, group))


PEERS = [
    Peer("`torch.distributed.nn`", lambda: torch_gather, lambda: torch_reduce),
    Peer("torch's functional collectives", graph_gather, lambda: graph_reduce),
    Peer(
        *("lightly's `gather`", lightly_gather),
        library="lightly",
        by_reading={"gather": "right", "bytes": "n", "second": "raises"},
    ),
    Peer(
        *("pytorch-metric-learning's `all_gather`", metric_gather),
        library="pytorch-metric-learning",
        by_reading={"gather": "1/n"},
    ),
    Peer(
        *("Accelerate's `gather` and `reduce`", lambda: of_accelerate("gather")),
        accelerate_reduce,
        library="accelerate",
        by_reading={"gather": "none"},
    ),
    Peer(
        *("Lightning's `all_gather`", lightning_gather),
        library="lightning",
        by_reading={"gather": "right", "second": "right", "bytes": "n", "warnings": "1"},
    ),
    Peer(
        "`replication.functional`",
        lambda: our_gather,
        lambda: functional.all_reduce,
        our_gather_of_same_shapes,
        our_gather_in_replicas,
        global_mean,
    ),
]
