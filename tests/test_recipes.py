"""The recipes of docs/recipes.md, between two ranks on gloo, have the numbers of one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint_sequential

from syncbn import DataParallel, convert_model, verify
from tests.kit.ranks import needs_gloo, run_ranks

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text("utf-8")


def recipe(title: str, **names: Any) -> dict[str, Any]:
    """Runs the block below a heading, in which some names are known. Returns all names."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    (text,) = re.findall(r"^```py(?:thon)?\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    names |= {"__name__": "recipe", "distributed": distributed, "nn": nn, "torch": torch}
    names |= {"DistributedDataParallel": DistributedDataParallel, "convert_model": convert_model}
    exec(compile(text, title, "exec"), names)
    return names


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


# -- gradient accumulation -----------------------------------------------------------------------


def accumulated(rank: int) -> dict[str, Tensor]:
    model = DistributedDataParallel(convert_model(network()))
    batches = [(x.chunk(2)[rank], classes.chunk(2)[rank]) for x, classes in MICRO_BATCHES]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe("Gradient accumulation", loader=batches, model=model, optimizer=optimizer)
    return dict(model.module.state_dict())


MICRO_BATCHES = [(drawn(4, 3) * scale, torch.arange(4) % 2) for scale in range(1, 9)]


@needs_gloo
def test_accumulated_gradients_are_the_mean_over_the_batches():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batches in (MICRO_BATCHES[:4], MICRO_BATCHES[4:]):
        optimizer.zero_grad()
        loss = sum(nn.functional.cross_entropy(net(x), classes) for x, classes in batches) / 4
        loss.backward()
        optimizer.step()
    for state in run_ranks(2, accumulated):
        torch.testing.assert_close(state, dict(net.state_dict()))


def kept(run: Callable[[], Any]) -> int:
    """The MiB of activations that a forward keeps for backward."""
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return round(sum(sizes.values()) / 2**20)


def test_the_memory_of_activations_is_what_the_page_says():
    blocks = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
    net = convert_model(nn.Sequential(*[layer for block in blocks for layer in block]))
    x = torch.randn(32, 16, 32, 32)
    usual = kept(lambda: net(x))
    checkpoints = kept(lambda: checkpoint_sequential(net, 8, x, use_reentrant=False))
    said = re.findall(r"(\d+)\s+MiB", PAGE)
    assert [int(size) for size in said] == [usual, checkpoints]
    assert checkpoints < 0.6 * usual
    with torch.autograd.graph.save_on_cpu():
        net(torch.randn(4, 16, 8, 8)).sum().backward()


# -- two forwards --------------------------------------------------------------------------------

FIRST, SECOND = drawn(6, 3), 2 * drawn(6, 3) + 1


def called_twice(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    first, second = (x.chunk(2)[rank] for x in (FIRST, SECOND))
    title = "Two forwards and one backward under DDP"
    net = recipe(title, net=network(), first=first, second=second)["model"].module
    return {k: p.grad for k, p in net.named_parameters()}, dict(net.state_dict())


@needs_gloo
def test_two_forwards_and_one_backward_have_the_gradients_of_one_device():
    net = network()
    (net(FIRST) - net(SECOND)).square().mean().backward()
    for grads, state in run_ranks(2, called_twice):
        expected = {k: p.grad for k, p in net.named_parameters()}
        torch.testing.assert_close(grads, expected)
        torch.testing.assert_close(state, dict(net.state_dict()))


# -- running statistics --------------------------------------------------------------------------

BATCHES = [drawn(7, 3), 3 * drawn(5, 3), drawn(2, 3) - 1]


def recalibrated(rank: int) -> dict[str, Tensor]:
    net = convert_model(network())
    loader = [batch.chunk(2)[rank] for batch in BATCHES]
    recipe("Recalibrating running statistics", loader=loader, net=net)
    return dict(net.state_dict())


@needs_gloo
def test_running_statistics_are_recalibrated_exactly_over_ranks():
    net = network()
    update_bn(BATCHES, net)
    for state in run_ranks(2, recalibrated):
        torch.testing.assert_close(state, dict(net.state_dict()))


# -- sparse tensors ------------------------------------------------------------------------------


def test_layers_of_sparse_tensors_are_synchronized_by_a_derived_class():
    names, x = recipe("Sparse tensors"), drawn(9, 4)
    model = DataParallel(names["net"].double(), ["cpu"] * 3)
    sparse = names["SparseTensor"](x, torch.arange(9))
    expected = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(model(sparse).feats, expected)


# -- losses --------------------------------------------------------------------------------------


def with_loss(rank: int) -> bool:
    loss = recipe("The loss of the whole batch under DDP")["whole_batch"]
    options = {"loss": loss, "targets": torch.arange(7) % 2}
    return bool(
        verify(convert_model(network()), drawn(7, 3), wrap=DistributedDataParallel, **options)
    )


@needs_gloo
def test_the_loss_of_the_whole_batch_has_its_gradients_under_ddp():
    assert run_ranks(2, with_loss) == [True, True]


# -- loss and accuracy ---------------------------------------------------------------------------

SAMPLES = [(drawn(7, 3), torch.arange(7) % 2), (2 * drawn(4, 3), torch.arange(4) % 2)]


def evaluated(rank: int) -> tuple[list[float], bool]:
    evaluate = recipe("Loss and accuracy over all ranks")["evaluate"]
    net = convert_model(network())
    loader = [(x[rank::2], classes[rank::2]) for x, classes in SAMPLES]  # 6 and 5 samples
    return evaluate(net, loader), net.training


@needs_gloo
def test_loss_and_accuracy_are_means_over_the_samples_of_all_ranks():
    net = network().eval()
    x, classes = (torch.cat(parts) for parts in zip(*SAMPLES, strict=True))
    scores = net(x).detach()
    loss = nn.functional.cross_entropy(scores, classes)
    accuracy = (scores.argmax(1) == classes).double().mean()
    for (found_loss, found_accuracy), is_training in run_ranks(2, evaluated):
        assert found_loss == pytest.approx(float(loss)) and is_training
        assert found_accuracy == pytest.approx(float(accuracy))
