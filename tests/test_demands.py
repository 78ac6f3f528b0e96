"""What users of such toolkits asked for: batches of any size, any order of wrapping, no hang.

Each case was reported of some toolkit; its reference is in the docstring. Cases that the tests
of a module show are not repeated here.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import replication.sync.rendezvous
from replication import (
    CallbackContext,
    ReplicasDiverged,
    ReplicationError,
    patch_replication_callback,
)
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.layers import DEADLINE, AsTorchDoes, Centering, Numbered, together, values
from tests.pairwise import pairwise
from tests.stepping import batch, network, ours, patched, step, wraps

# -- batches of any size -----------------------------------------------------------------------


@wraps
@pytest.mark.parametrize("sizes", [[8, 8, 3, 1, 8], [1, 8, 1, 2, 8], [4, 1, 1, 5]], ids=str)
def test_full_and_short_batches_through_one_model(wrap, sizes):
    """vacancy#44. A single chunk, and all of them again after it."""
    net = network()
    twin = copy.deepcopy(net)
    model = wrap(convert_model(net), 4)
    for samples in sizes:
        x, dy = batch(samples)
        torch.testing.assert_close(step(model, net, x, dy), step(twin, twin, x, dy))


@wraps
def test_an_epoch_whose_last_batch_is_a_single_sample(wrap):
    """GANet#23. Without ``drop_last``."""
    net = network()
    twin = copy.deepcopy(net)
    model = wrap(convert_model(net), 4)
    loader = DataLoader(TensorDataset(*batch(21)), batch_size=5)
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (net, twin)]
    sizes = []
    for x, dy in loader:
        torch.testing.assert_close(step(model, net, x, dy), step(twin, twin, x, dy))
        for optimizer in optimizers:
            optimizer.step()
        sizes.append(len(x))
    assert sizes == [5, 5, 5, 5, 1]


class Notes(Numbered):
    """Notes which replica got what; its copies talk, so that one too many would be waited for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.told: list[int] = []  # the replicas share them
        self.got: list[tuple[int, int]] = []
        self.norm = SynchronizedBatchNorm1d(2, dtype=torch.float64)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        self.told.append(copy_id)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # As a user's forward, it cannot do without what it names.
        x = {
            "tensors": lambda x, y: x + y,
            "keywords": lambda *, x, y: x + y,
            "flags": lambda x, *, flag, name: x if flag and name == "a" else None,
            "none": lambda flag, *, name: torch.eye(2).double() if flag and name == "a" else None,
        }[self.kind](*args, **kwargs)
        self.got.append((self.copy_id, len(x)))
        return self.norm(x[:, :, None].expand(-1, -1, 2) * torch.arange(1.0, 3).double())


@pairwise(wrap=[ours, patched], kind=["tensors", "keywords", "flags", "none"], n=range(1, 5))
def test_exactly_the_replicas_that_have_a_part_exist(wrap, kind, n):
    """pytorch#15161, #52260, nnUNet#677."""
    for samples in range(1, 3 * n + 1):
        assert_the_replicas_that_have_a_part_exist(wrap, kind, n, samples)


def assert_the_replicas_that_have_a_part_exist(wrap, kind, n, samples):
    net = Notes(kind)
    x = torch.randn(samples, 2, dtype=torch.float64)
    args, kwargs = {
        "tensors": ((x, x + 1), {}),
        "keywords": ((), {"x": x, "y": x + 1}),
        "flags": ((x,), {"flag": True, "name": "a"}),
        "none": ((True,), {"name": "a"}),
    }[kind]
    twin = copy.deepcopy(net)
    expected = twin(*args, **kwargs)
    y = wrap(net, n)(*args, **kwargs)
    torch.testing.assert_close(y, expected)
    parts = [2] if kind == "none" else [len(part) for part in x.chunk(n)]
    assert len(parts) <= n
    if kind != "none":
        assert len(parts) == math.ceil(samples / math.ceil(samples / n))
    if n == 1:  # the module itself is called
        assert net.got == [(None, parts[0])]
    else:
        assert sorted(net.got) == list(enumerate(parts))
        assert net.told == list(range(len(parts)))


# -- wrapping ----------------------------------------------------------------------------------

STEPS = ("convert", "wrap", "to", "patch")


@pytest.mark.parametrize("wrapper", [ours, AsTorchDoes], ids=["ours", "the user's"])
@pytest.mark.parametrize("order", [*itertools.permutations(STEPS)], ids=" ".join)
def test_every_order_of_setup_trains_like_one_device_or_names_the_missing_step(wrapper, order):
    """vacancy#40, #45."""
    net = network().float()
    twin = copy.deepcopy(net).double()
    model: Any = net
    actions = {
        "convert": convert_model,
        "wrap": lambda model: wrapper(model, 3),
        "to": lambda model: model.to(torch.float64),
        "patch": lambda model: patch_replication_callback(model) and model,
    }
    for name in order:
        if name == "patch" and order.index("patch") < order.index("wrap"):
            with pytest.raises(TypeError, match=r"expected a torch.nn.DataParallel, .*Sequential"):
                actions[name](model)
            continue
        model = actions[name](model) or model
    if order.index("patch") < order.index("wrap"):
        patch_replication_callback(model)
    x, dy = batch(7)
    torch.testing.assert_close(step(model, net, x, dy), step(twin, twin, x, dy))


# -- who runs ----------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps its replicas, as none should be."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.kept: dict[int, nn.Module] = {}  # the replicas share it

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.kept[copy_id] = self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@wraps
@pytest.mark.parametrize("layer", [lambda: SynchronizedBatchNorm1d(3), Centering])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("part", ["replica", "layer"])
def test_a_replica_that_is_kept_after_its_forward_is_given_up(
    wrap, layer, index, part, monkeypatch
):
    """inplace_abn#88: marked parallel, and its peers do not run."""
    net = Keeps(layer())
    wrap(net, 2)(torch.randn(7, 3))
    replica = net.kept[index]
    net.kept.clear()
    if part == "replica":  # which may not run alone
        monkeypatch.setattr(replication.sync.rendezvous, "STALL_TIMEOUT", 0.05)
        with pytest.raises(ReplicasDiverged, match=f"replica {index} waits.*did not begin"):
            replica(torch.randn(4, 3))
    else:
        with pytest.raises(ReplicationError, match=r"outside the forward|forward.* has ended"):
            replica.layer(torch.randn(4, 3))


@pytest.mark.slow
@wraps
@pytest.mark.parametrize("shared", ["one model", "one network", "nothing"])
def test_forwards_at_once_do_not_mix_their_messages(wrap, shared):
    """pytorch#8388. Two threads, each with its own batches."""
    nets = [network(), network()] if shared == "nothing" else [network()] * 2
    twins = [copy.deepcopy(net) for net in nets]
    models = [wrap(convert_model(net), n) for net, n in zip(nets, (2, 3), strict=True)]
    if shared == "one model":
        models = models[:1] * 2
    batches = [[batch(samples) for samples in sizes] for sizes in ((7, 2, 5) * 4, (3, 8, 4) * 4)]
    start = threading.Barrier(2, timeout=DEADLINE)

    def run(index: int) -> list[Any]:
        outputs = []
        start.wait()
        for x, dy in batches[index]:
            leaf = x.clone().requires_grad_()
            y = models[index](leaf)
            grads = torch.autograd.grad(y, [leaf, *nets[index].parameters()], dy)
            outputs.append([y.detach(), *grads])
        return outputs

    actual = values(together(lambda: run(0), lambda: run(1)))
    for index, twin in enumerate(twins):
        for (x, dy), found in zip(batches[index], actual[index], strict=True):
            x.requires_grad_()
            y = twin(x)
            expected = [y.detach(), *torch.autograd.grad(y, [x, *twin.parameters()], dy)]
            torch.testing.assert_close(found, expected)
    if shared == "nothing":  # who shares a layer shares its buffers, as without replicas
        for net, twin in zip(nets, twins, strict=True):
            torch.testing.assert_close([*net.buffers()], [*twin.buffers()])
