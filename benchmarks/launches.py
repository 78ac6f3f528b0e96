"""The kernels that one synchronized layer launches in a forward and a backward, counted.

    python -m benchmarks.launches

No accelerator is needed: the CPU and the meta device stand in for two of them, and
`tests.fused` for the kernels that they lack. A copy to the host from the device that the CPU
stands in for is the only thing that remains unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.measuring import line
from replication import execute_replication_callbacks, parallel_apply, replicate
from syncbn import SynchronizedBatchNorm2d, convert_model
from syncbn.kernels import Kernels
from tests import fused

#: Of processes or replicas.
NUMBERS = (2, 4, 16)

#: Per replica.
SHAPE = torch.Size((4, 8, 6, 5))

#: The kinds of operations that are counted, and their headings.
KINDS = {
    "launch": "launches",
    "large": "of the input's size",
    "copy": "copies from another device",
    "collective": "collectives",
    "wait": "host waits",
    "from host": "copies from host memory",
}

ABOUT = (
    "One layer with weight, bias and running statistics, in float32, after a first call. A launch "
    "is an operation that torch dispatches, except views and allocations. Launches that read or "
    "write a tensor of the input's size are also listed apart. Replica 0, which merges, is on one "
    "accelerator, and the others are on a second one: copies to it are made once, for all of "
    "them. Cells are forward + backward."
)

#: The kernels of accelerators, which `Recorder` replaces.
OF_TORCH = Kernels(*[getattr(torch, name) for name in fused.KERNELS])

#: Operations for which the host waits.
WAITING = ("_local_scalar_dense", "equal", "is_nonzero")


#: The type of an operation's device, and its kinds. It counts once for each.
Operation = tuple[str, list[str]]


class Recorder(TorchDispatchMode):
    """Records the operations of a thread."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        inputs = tensors_in((args, kwargs))
        if name == "_to_copy" and kwargs.get("device", args[0].device) != args[0].device:
            # The meta device has no values to copy.
            result = torch.empty_like(args[0], device=kwargs["device"], dtype=kwargs.get("dtype"))
        elif func.namespace == "c10d":  # the fake backend takes no meta tensors, of one dimension
            result = func(*tree_map_only(Tensor, flat_on_cpu, args), **kwargs)
        else:
            result = fused.KERNELS.get(name, func)(*args, **kwargs)
        outputs = tensors_in(result)
        tensors = (*inputs, *outputs) if func.namespace == "c10d" else (*outputs, *inputs)
        device = tensors[0].device
        self.operations.append((device.type, kinds_of(func, name, inputs, outputs)))
        return result


def flat_on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").flatten()


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def kinds_of(func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[str]:
    """Returns the kinds of an operation, none if it launches nothing."""
    if func.namespace == "c10d":
        return ["collective"]
    if name == "lift_fresh":  # a tensor made of Python numbers
        return ["from host"]
    if name in WAITING:
        return ["wait"]
    if len({tensor.device for tensor in (*inputs, *outputs)}) > 1:
        return ["copy"]
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    is_host_scalar = not inputs and not outputs[0].dim()
    if is_view or is_host_scalar or "empty" in name:
        return []
    if name == "index" and any(t.dtype == torch.bool for t in inputs[1:]):
        return ["launch", "wait", "launch"]  # the first one counts the values that the mask keeps
    if name == "batch_norm_gather_stats_with_counts":
        inputs = inputs[1:]  # of the first, only the dtype matters
    is_large = max(tensor.numel() for tensor in (*inputs, *outputs)) >= SHAPE.numel()
    return ["launch", "large"] if is_large else ["launch"]


#: Of a forward and of a backward.
Counts = tuple[Counter[str], Counter[str]]


def counts(operations: Iterable[Operation], device: str = "cpu") -> Counter[str]:
    return Counter(kind for where, kinds in operations for kind in kinds if where == device)


class Recorded(nn.Sequential):
    """A layer whose operations are recorded."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        #: All replicas share the list.
        self.operations: list[Operation] = []

    def forward(self, x: Tensor) -> Tensor:
        with Recorder(self.operations):
            return super().forward(x)  # type: ignore[no-any-return]


def in_replicas(replicas: int) -> tuple[Counts, Counts]:
    """Counts the operations of replica 0, with the merge, and of each other replica."""
    devices = ["cpu", *["meta"] * (replicas - 1)]
    model = Recorded(convert_model(nn.BatchNorm2d(SHAPE[1])))
    shards = [torch.randn(SHAPE, device=device, requires_grad=True) for device in devices]
    upstream = [torch.randn_like(shard) for shard in shards]
    with patch("syncbn.batchnorm.kernels_for", lambda kind: OF_TORCH):
        for _ in range(2):  # the first call fills caches
            forward, backward = model.operations, list[Operation]()
            forward.clear()
            copies = replicate(model, devices)
            execute_replication_callbacks(copies, devices)
            outputs = parallel_apply(copies, [(shard,) for shard in shards])
            parameters = [p for c in copies for p in (c[0].weight, c[0].bias)]
            with Recorder(backward):
                # The first copy gets the gradients of the parameters, of all shards.
                torch.autograd.grad(outputs, [*shards, *parameters], upstream, allow_unused=True)
    first, others = (
        [counts(made, device) for made in (forward, backward)] for device in ("cpu", "meta")
    )
    for counted in others:
        for kind in counted.keys() - {"copy"}:
            counted[kind], rest = divmod(counted[kind], replicas - 1)
            assert rest == 0
    return tuple(first), tuple(others)


@contextmanager
def processes(size: int) -> Iterator[None]:
    """One of several processes, which exchange nothing."""
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def recorded(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor], device: str = "cpu"
) -> Counts:
    """Counts the operations of a second forward and backward. The first fills caches."""
    for _ in range(2):
        of_forward, of_backward = list[Operation](), list[Operation]()
        with Recorder(of_forward):
            y = forward()
        dy = torch.randn_like(y)
        with Recorder(of_backward):
            torch.autograd.grad(y, inputs, dy)
    return counts(of_forward, device), counts(of_backward, device)


def in_processes_of_syncbn(size: int) -> Counts:
    """Counts the operations of a layer in one process, for which meta is an accelerator."""
    layer = SynchronizedBatchNorm2d(SHAPE[1], device="meta")
    x = torch.randn(SHAPE, device="meta", requires_grad=True)
    kernels = patch("syncbn.batchnorm.kernels_for", lambda kind: OF_TORCH)
    with processes(size), kernels:
        return recorded(lambda: layer(x), [x, *layer.parameters()], "meta")


def torchs(size: int) -> Counts:
    """Counts the operations of `nn.SyncBatchNorm` in one process, by its autograd function.

    The module itself refuses the CPU, and adds the count of batches.
    """
    layer = nn.BatchNorm2d(SHAPE[1])
    x = torch.randn(SHAPE, requires_grad=True)

    def forward() -> Tensor:
        layer.num_batches_tracked.add_(1)
        return SyncBatchNorm.apply(  # type: ignore[no-any-return, no-untyped-call]
            *(x, layer.weight, layer.bias, layer.running_mean, layer.running_var),
            *(layer.eps, layer.momentum, distributed.group.WORLD, size),
        )

    with processes(size):
        return recorded(forward, [x, *layer.parameters()])


def lines() -> Iterator[str]:
    """The table in Markdown, line by line."""
    yield from (ABOUT, "")
    headings = ["layer", "replicas or processes", *KINDS.values()]
    yield line(headings)
    yield line(["---"] * len(headings))
    for number in NUMBERS:
        first, other = in_replicas(number)
        for title, (forward, backward) in {
            "syncbn, each process": in_processes_of_syncbn(number),
            "`nn.SyncBatchNorm`, each process": torchs(number),
            "syncbn, replica 0": first,
            "syncbn, each other replica": other,
        }.items():
            cells = [f"{forward[kind]} + {backward[kind]}" for kind in KINDS]
            yield line([title, str(number), *cells])


if __name__ == "__main__":
    print(*lines(), sep="\n")
