"""What docs/losses.md shows has the numbers of one device."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

from replication import DataParallel, ReplicaAware, functional, global_mean, verify_ranks
from tests.kit.ranks import needs_gloo, run_ranks

PAGE = (Path(__file__).parent.parent / "docs" / "losses.md").read_text("utf-8")


def block(title: str, **names: Any) -> dict[str, Any]:
    """Runs the first block below a heading, in which some names are known. Returns all names."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    text = re.search(r"^```py\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[1]
    known = {"torch": torch, "nn": nn, "nullcontext": nullcontext, "normalize": normalize}
    known |= {"functional": functional, "global_mean": global_mean, "cross_entropy": cross_entropy}
    names = known | {"ReplicaAware": ReplicaAware, "DataParallel": DataParallel} | names
    exec(compile(text, title, "exec"), names)
    return names


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels_of(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


def case() -> dict[str, Tensor]:
    """What the whole batch of each kind has."""
    labels = labels_of(3, 5, 4, 4)
    labels[:2] = 255  # all that the first rank has
    return {
        "scores": drawn(5, 3, 4, 4),
        "labels": labels,
        "token_losses": drawn(5, 6),
        "lengths": torch.tensor([6, 1, 0, 2, 5]),
        "box_losses": drawn(5),
        "logits": drawn(5, 3),
        "classes": labels_of(3, 5),
    }


WEIGHTS = drawn(3, seed=2).abs()
KINDS = ("of_pixels", "of_tokens", "of_boxes", "of_classes")


def of_each_kind(rank: int) -> list[float]:
    own = {name: tensor[[slice(0, 2), slice(2, 5)][rank]] for name, tensor in case().items()}
    found = block("Pixels, tokens, boxes", class_weights=WEIGHTS, **own)
    return [found[kind].item() for kind in KINDS]


@needs_gloo
def test_each_kind_of_loss_is_that_of_the_whole_batch():
    batch = case()
    of_tokens = [row[:n] for row, n in zip(batch["token_losses"], batch["lengths"], strict=True)]
    expected = [
        cross_entropy(batch["scores"], batch["labels"], ignore_index=255).item(),
        torch.cat(of_tokens).mean().item(),
        batch["box_losses"].mean().item(),
        cross_entropy(batch["logits"], batch["classes"], WEIGHTS).item(),
    ]
    for found in run_ranks(2, of_each_kind):
        assert found == pytest.approx(expected, rel=1e-12)


# -- accumulation --------------------------------------------------------------------------------

IMAGES = drawn(3, 5, 2, 4, 4)
MAPS = labels_of(3, 3, 5, 4, 4)
MAPS[0, :, :2], MAPS[1, 2:], MAPS[2, :2] = 255, 255, 255


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ELU()).double()


def accumulated(rank: int) -> list[Tensor]:
    net, own = network(), [slice(0, 2), slice(2, 5)][rank]
    micro_batches = [(x[own], t[own]) for x, t in zip(IMAGES, MAPS, strict=True)]
    block(
        "Gradient accumulation",
        model=DistributedDataParallel(net),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        batches_of_micro_batches=[micro_batches] * 2,
    )
    return [parameter.detach() for parameter in net.parameters()]


@needs_gloo
def test_micro_batches_train_as_one_device_with_all_of_them():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        scores = net(IMAGES.flatten(0, 1))
        cross_entropy(scores, MAPS.flatten(0, 1), ignore_index=255).backward()
        optimizer.step()
    for found in run_ranks(2, accumulated):
        torch.testing.assert_close(found, [p.detach() for p in net.parameters()])


# -- contrastive losses, statistics and replicas -------------------------------------------------


def contrastive() -> dict[str, Any]:
    loss = block("Contrastive losses")["contrastive_loss"]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    return {
        "model": net,
        "batch": torch.randn(5, 2, 3),
        "loss": lambda y: loss(y[:, 0], y[:, 1]),
        "wrap": DistributedDataParallel,
    }


@needs_gloo
def test_the_contrastive_loss_is_that_of_one_device():
    result = verify_ranks(contrastive, 2)
    assert result, result


def test_replicas_take_the_mean_of_what_they_return():
    x, target = drawn(5, 3), labels_of(4, 5)
    net = nn.Linear(3, 4).double()
    text = PAGE.split("class WithLoss")[1].split("    def forward")[0]
    assert "__init__" not in text  # the page leaves it out

    class Base(ReplicaAware):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

    def parallel(module: nn.Module) -> DataParallel[nn.Module]:
        return DataParallel(module, ["cpu"] * 3)

    names = {"ReplicaAware": Base, "DataParallel": parallel}
    loss = block("In replicas", x=x, target=target, net=net, **names)["loss"]
    expected = cross_entropy(net(x), target)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, list(net.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(expected, list(net.parameters())))
