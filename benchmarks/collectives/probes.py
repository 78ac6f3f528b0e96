"""What is found out about a collective, in ranks. Every result is a short text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.collectives.peers import PEERS, Peer
from replication import DataParallel, ReplicaAware

NONE = "–"
RIGHT = "right"


def is_near(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradient(
    collective: Callable[[Tensor], Tensor], xs: Sequence[Tensor], whole: Callable[[Tensor], Tensor]
) -> str:
    """What the gradient of a rank's tensor is, beside that of one device.

    One device computes ``whole`` of the joined tensors ``xs``. First all ranks have the same loss,
    whose gradients a wrapper averages. Then each has another one, and their sum is differentiated.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    joined = torch.cat([*xs]).requires_grad_()
    y = whole(joined)
    upstream = [random(*y.shape, seed=10 + r) for r in range(size)]
    own = slice(sum(map(len, xs[:rank])), sum(map(len, xs[: rank + 1])))
    results = []
    for losses in ([upstream[0]] * size, upstream):
        x = xs[rank].clone().requires_grad_()
        actual = collective(x)
        if not is_near(actual.detach(), y.detach()):
            return "wrong values"
        if not actual.requires_grad:
            return "none"
        (ours,) = torch.autograd.grad((actual * losses[rank]).sum(), x)
        total = torch.stack(losses).sum(0)
        (expected,) = torch.autograd.grad((y * total).sum(), joined, retain_graph=True)
        results.append((ours, expected[own]))
    (ours, expected), of_each = results
    if is_near(*of_each):
        return RIGHT
    names = {1.0: "right for one loss", 1 / size: "1/n", float(size): "n times"}
    return next((n for factor, n in names.items() if is_near(ours, factor * expected)), "wrong")


def parts(rows: Sequence[int]) -> list[Tensor]:
    return [random(n, 4, seed=rank) for rank, n in enumerate(rows)]


def equal(peer: Peer) -> str:
    return gradient(peer.gather(), parts([3] * distributed.get_world_size()), lambda x: x)


def uneven(peer: Peer) -> str:
    rows = [rank + 1 for rank in range(distributed.get_world_size())]
    return gradient(peer.gather(), parts(rows), lambda x: x)


def empty(peer: Peer) -> str:
    rows = [0 if rank == 1 else 3 for rank in range(distributed.get_world_size())]
    return gradient(peer.gather(), parts(rows), lambda x: x)


def reduced(op: str) -> Callable[[Peer], str]:
    def probe(peer: Peer) -> str:
        size = distributed.get_world_size()
        whole = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[op]
        if peer.reduce is None:
            return NONE
        reduce, xs = peer.reduce(), parts([1] * size)
        return gradient(lambda x: reduce(x, op), xs, lambda x: whole(x, dim=0, keepdim=True))

    return probe


def second(peer: Peer) -> str:
    """The derivative of a gradient."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    xs, own = parts([3] * size), slice(3 * rank, 3 * rank + 3)
    upstream = [random(3 * size, 4, seed=10 + r) for r in range(size)]
    direction = random(3, 4, seed=20)
    x = xs[rank].clone().requires_grad_()
    loss = (peer.gather()(x) ** 3 * upstream[rank]).sum()
    if not loss.requires_grad:
        return "none"
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    if not first.requires_grad:
        return "none"
    (ours,) = torch.autograd.grad((first * direction).sum(), x)
    factor = torch.stack(upstream).sum(0)[own]
    return RIGHT if is_near(ours, 6 * xs[rank] * factor * direction) else "wrong"


class Counting(TorchDispatchMode):
    """Adds up the bytes of the tensors that a rank passes to collectives."""

    #: Where the inputs of calls that also take their results are.
    SECOND = "allgather", "reduce_scatter_", "_reduce_scatter_base", "alltoall"

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            own = name.partition("::")[2]
            given = args[own.lstrip("_").startswith(self.SECOND) and name.startswith("c10d")]
            tensors = (
                [given] if isinstance(given, Tensor) else torch.utils._pytree.tree_leaves(given)
            )
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def communicated(peer: Peer) -> str:
    """What a rank sends in the backward of a gather, in units of its own tensor."""
    x = random(256, 4, seed=0).requires_grad_()
    loss = peer.gather()(x).square().sum()
    if not loss.requires_grad:
        return "0"
    with Counting() as count:
        loss.backward()
    ratio = count.bytes / x.nbytes
    return "n" if ratio == distributed.get_world_size() else f"{ratio:.2g}"


def warned(peer: Peer) -> str:
    """Warnings in forward and backward, in a step that is not the first."""
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            x = random(3, 4, seed=0).requires_grad_()
            loss = peer.gather()(x).square().sum()
            if loss.requires_grad:
                loss.backward()
    return str(len(found))


def ignored(peer: Peer) -> str:
    """The mean of losses of which some do not count, and are NaN."""
    if peer.weighted_mean is None:
        return NONE
    rank, size = distributed.get_rank(), distributed.get_world_size()
    losses = [random(rank + 2, seed=rank) for rank in range(size)]
    weights = [torch.arange(rank + 2.0, dtype=torch.float64) for rank in range(size)]
    total = sum(w.sum() for w in weights)
    x = losses[rank].where(weights[rank] > 0, torch.nan).requires_grad_()
    value = peer.weighted_mean(x, weights[rank])
    value.backward()
    mean = sum((a * w).sum() for a, w in zip(losses, weights, strict=True)) / total
    is_right = is_near(value.detach(), mean) and is_near(x.grad, size * weights[rank] / total)
    return RIGHT if is_right else "wrong"


def mismatch(peer: Peer) -> str:
    """Another shape on one rank: whether the error of every rank tells both."""
    x = torch.zeros(3, 5 if distributed.get_rank() else 4, requires_grad=True)
    try:
        peer.gather()(x)
    except Exception as error:
        return "named" if re.search(r", 4\b.*, 5\b", str(error), re.DOTALL) else "raises"
    return "silent"


def graph(peer: Peer) -> str:
    """Whether a gather stays in one graph, with the same gradient."""
    gather = peer.gather_of_same_shapes or peer.gather()
    compiled = torch.compile(gather, fullgraph=True, backend="aot_eager")
    try:
        found = gradient(compiled, parts([3] * distributed.get_world_size()), lambda x: x)
    except Exception:
        return "no"
    return "yes" if found == RIGHT else f"yes, but {found}"


#: Column by heading. Those of a group run in the same ranks, because none of them ends these.
PROBES: list[dict[str, Callable[[Peer], str]]] = [
    {
        "sum": reduced("sum"),
        "mean": reduced("mean"),
    },
    {"max": reduced("max")},
    {"gather": equal, "second": second, "bytes": communicated, "warnings": warned},
    {"uneven": uneven},
    {"empty": empty},
    {"ignored": ignored},
    {"mismatch": mismatch},
    {"graph": graph},
]


def run(number: int, index: int) -> dict[str, str]:
    """The results of a group of probes for a peer, in a rank."""
    found = {}
    for heading, probe in PROBES[index].items():
        try:
            found[heading] = probe(PEERS[number])
        except NotImplementedError as error:
            found[heading] = "raises" if str(error) else NONE
        except Exception:
            found[heading] = "raises"
    return found


# -- replicas ------------------------------------------------------------------------------------


class Gathering(ReplicaAware, nn.Module):
    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer = peer

    def forward(self, x: Tensor) -> Tensor:
        if self.peer.gather_in_replicas is not None:
            return self.peer.gather_in_replicas(x, self.group)[None]
        return self.peer.gather()(x)[None]


def in_replicas(peer: Peer, size: int) -> str:
    """Whether it gathers between replicas in threads. Runs in this process."""
    x = random(2 * size, 4, seed=0)
    try:
        gathered = DataParallel(Gathering(peer), ["cpu"] * size)(x)
    except Exception:
        return "no"
    is_right = gathered.shape == (size, *x.shape) and is_near(gathered, x.expand(size, -1, -1))
    return "yes" if is_right else "no"
