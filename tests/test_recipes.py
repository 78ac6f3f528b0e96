"""The recipes of docs/recipes.md, between two ranks on gloo, have the numbers of one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn

from syncbn import DataParallel, convert_model, verify
from tests.ranks import needs_gloo, run_ranks

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


# -- masks ---------------------------------------------------------------------------------------

SEQUENCES = drawn(5, 6, 3)
MASK = torch.arange(6) < torch.tensor([[6], [2], [1], [0], [0]])


def masked(rank: int) -> tuple[Tensor, bool]:
    layer = recipe("Padded sequences and masks")["MaskedNorm"](3).double()
    own = slice(0, 3) if rank == 0 else slice(3, 5)  # the second rank has only padding
    return layer(SEQUENCES[own], MASK[own]), bool(verify(layer, (SEQUENCES, MASK)))


@needs_gloo
def test_only_valid_positions_are_normalized():
    expected = torch.zeros_like(SEQUENCES)
    valid = SEQUENCES[MASK]
    deviation = (valid.var(0, unbiased=False) + 1e-5).sqrt()
    expected[MASK] = (valid - valid.mean(0)) / deviation
    (first, is_equal), (second, _) = run_ranks(2, masked)
    torch.testing.assert_close(torch.cat([first, second]), expected)
    assert is_equal


# -- gradient accumulation -----------------------------------------------------------------------


def test_the_memory_of_accumulated_batches_is_what_the_page_says(capsys):
    net = recipe("Gradient accumulation")["net"]
    usual, checkpoints = re.findall(r"(\d+) MiB", capsys.readouterr().out)
    (said,) = re.findall(r"It prints (\d+ MiB and \d+ MiB)", PAGE)
    assert f"{usual} MiB and {checkpoints} MiB" == said
    assert int(checkpoints) < 0.6 * int(usual)
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
    x, names = drawn(9, 4), recipe("Sparse tensors")
    model = DataParallel(names["net"].double(), ["cpu"] * 3)
    sparse = names["SparseTensor"](x, torch.arange(9))
    expected = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(model(sparse).feats, expected)


# -- losses --------------------------------------------------------------------------------------


def with_loss(rank: int) -> bool:
    loss = recipe("The loss of the whole batch under DDP")["whole_batch"]
    net, targets = convert_model(network()), torch.arange(7) % 2
    wrap = DistributedDataParallel
    return bool(verify(net, drawn(7, 3), wrap=wrap, loss=loss, targets=targets))


@needs_gloo
def test_the_loss_of_the_whole_batch_has_its_gradients_under_ddp():
    assert run_ranks(2, with_loss) == [True, True]
