"""A loss on the replicas is the loss on one device, however the samples are shared out."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from replication import DataParallel, DataParallelCriterion, Scattered

CLASSES = 4
SHARES = [[5], [3, 2], [4, 0, 1], [0, 5], [1, 1, 1, 2]]


def labels(n):
    return torch.randint(CLASSES, (n,))


def some_ignored(n):
    """All targets of the first three samples are ignored."""
    return torch.cat([torch.full((min(n, 3),), -100), labels(max(0, n - 3))])


def values(n):
    return torch.randn(n, CLASSES).double()


def positive(n):
    return torch.rand(n, CLASSES).double()


def several(n):
    """The classes of each sample, and -1 behind the last."""
    return torch.stack([torch.randperm(CLASSES) for _ in range(n)] or [torch.zeros(0, 4).long()])


WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)

LOSSES = {
    "mean": (nn.CrossEntropyLoss(), labels),
    "weighted": (nn.CrossEntropyLoss(WEIGHT), labels),
    "ignoring": (nn.CrossEntropyLoss(WEIGHT), some_ignored),
    "another index": (nn.CrossEntropyLoss(ignore_index=1), labels),
    "smooth": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), labels),
    "smooth, ignoring": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), some_ignored),
    "probabilities": (nn.CrossEntropyLoss(WEIGHT), lambda n: positive(n).softmax(1)),
    "summed": (nn.CrossEntropyLoss(WEIGHT, reduction="sum"), some_ignored),
    "NLL": (nn.NLLLoss(WEIGHT), labels),
    "bytes": (nn.CrossEntropyLoss(WEIGHT), lambda n: labels(n).byte()),
    "MSE": (nn.MSELoss(), values),
    "summed MSE": (nn.MSELoss(reduction="sum"), values),
    "L1": (nn.L1Loss(), values),
    "BCE": (nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT + 1), positive),
    "KL": (nn.KLDivLoss(reduction="sum"), positive),
    "Poisson": (nn.PoissonNLLLoss(), positive),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHT), labels),
    "multi label margin": (nn.MultiLabelMarginLoss(), several),
    "multi label soft margin": (nn.MultiLabelSoftMarginLoss(WEIGHT), positive),
}


class Own(nn.Module):
    """A mean weighted by the samples themselves."""

    def forward(self, scores, target):
        weight = target.abs().sum(1)
        return (weight * (scores - target).square().sum(1)).sum(), weight.sum()


class OwnOnOneDevice(Own):
    def forward(self, scores, target):
        total, weight = super().forward(scores, target)
        return total / weight


def compare(criterion, alone, target, shares):
    """Loss and gradients on the replicas and on one device."""
    net = nn.Linear(3, CLASSES).double()
    expected_net = copy.deepcopy(net)
    devices = ["cpu"] * len(shares)
    x = torch.randn(sum(shares), 3).double()
    predict = DataParallel(net, devices, gather_to_one_device=False)
    on_replicas = DataParallelCriterion(criterion, devices)
    factor = torch.randn(())
    loss = on_replicas(predict(Scattered(x.split(shares))), target)
    (factor * loss).backward()
    expected = alone(expected_net(x), target)
    (factor * expected).backward()
    torch.testing.assert_close(loss, expected)
    for own, other in zip(net.parameters(), expected_net.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("shares", [[2, 1, 2], [4, 0, 1]], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_torch_equal_one_device(loss, shares):
    criterion, make_target = LOSSES[loss]
    if 0 in shares and isinstance(criterion, (nn.MultiMarginLoss, nn.MultiLabelMarginLoss)):
        pytest.skip("torch refuses an empty batch")
    compare(criterion, criterion, make_target(sum(shares)), shares)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_criterion_of_ones_own_tells_its_weight(shares):
    compare(Own(), OwnOnOneDevice(), values(sum(shares)), shares)


def test_labels_of_each_pixel_are_counted():
    scores, target = torch.randn(5, CLASSES, 2, 3).double(), torch.randint(CLASSES, (5, 2, 3))
    target[:3] = -100
    parallel = DataParallelCriterion(nn.CrossEntropyLoss(WEIGHT), ["cpu"] * 3)
    expected = nn.functional.cross_entropy(scores, target, WEIGHT)
    torch.testing.assert_close(parallel(scores, target), expected)
    torch.testing.assert_close(parallel(scores, target=target), expected)


def test_a_sum_without_a_weight_is_the_loss():
    class Total(nn.Module):
        def forward(self, x):
            return x.square().sum(), None

    x = torch.randn(5, 2)
    parallel = DataParallelCriterion(Total(), ["cpu"] * 2)
    torch.testing.assert_close(parallel(x), x.square().sum())


def test_the_mean_of_half_precision_does_not_overflow():
    x = torch.full((4, 2), 200.0, dtype=torch.float16)
    loss = DataParallelCriterion(nn.MSELoss(), ["cpu"] * 2)(x, torch.zeros_like(x))
    assert loss.item() == 40_000


def test_the_criterion_of_the_caller_is_unchanged():
    criterion = nn.CrossEntropyLoss(WEIGHT)
    parallel = DataParallelCriterion(criterion, ["cpu"] * 2)
    parallel(values(5), labels(5))
    assert criterion.reduction == "mean" and criterion.weight is WEIGHT
    assert parallel.module.criterion.weight is WEIGHT


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (nn.KLDivLoss(reduction="batchmean"), "must be 'mean' or 'sum' .got 'batchmean'"),
        (nn.MSELoss(reduction="none"), "must be 'mean' or 'sum' .got 'none'"),
        (nn.CTCLoss(), "reduction of CTCLoss must be 'sum' .got 'mean'"),
    ],
    ids=str,
)
def test_reductions_whose_weight_is_unknown_are_refused(criterion, message):
    with pytest.raises(ValueError, match=message):
        DataParallelCriterion(criterion, ["cpu"] * 2)


@pytest.mark.parametrize(
    ("pair", "got"),
    [
        (lambda x: x.mean(), "a tensor of shape []"),
        (lambda x: (x.sum(), len(x)), "a tensor of shape [] and int"),
        (lambda x: (x, x.sum()), "a tensor of shape [2, 2] and a tensor of shape []"),
        (lambda x: (x.sum(), None, None), "a tensor of shape [] and NoneType and NoneType"),
        (lambda x: [x.sum(), None], "list"),
    ],
    ids=["mean", "int", "losses of samples", "triple", "list"],
)
def test_the_sum_and_the_weight_must_be_scalars(pair, got):
    class Pair(nn.Module):
        def forward(self, x):
            return pair(x)

    with pytest.raises(TypeError, match=f"Pair must return a pair .*{re.escape(f'(got {got})')}"):
        DataParallelCriterion(Pair(), ["cpu"] * 2)(torch.ones(4, 2))


def test_all_replicas_or_none_must_return_a_weight():
    class Sometimes(nn.Module):
        def forward(self, x):
            return x.sum(), x.sum() if len(x) == 2 else None

    with pytest.raises(TypeError, match=r"Sometimes must return a weight in every replica"):
        DataParallelCriterion(Sometimes(), ["cpu"] * 2)(torch.ones(3, 2))
