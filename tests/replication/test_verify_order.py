"""`verify` where layers get the samples of a batch in another order: that alone is no difference.

Two views below each other, `torch.cat([a, b])`, or time that is folded into the batch, are the
same samples on one device and on copies, but not in the same order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import verify, verify_ranks
from replication.verify.order import as_far_as_each_goes, in_one_order
from syncbn import convert_model
from tests.kit.ranks import needs_gloo
from tests.programs import checks

ORDER = "samples are in another order or shape than on one device, which alone is no fault: "


class Folded(nn.Module):
    """Folds time into the batch, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x.transpose(0, 1).flatten(0, 1))
        return y.view(x.size(1), len(x), 3).transpose(0, 1)


def siamese(norm: nn.Module) -> checks.Siamese:
    return checks.Siamese(nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 4)))


VIEWS = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (convert_model(siamese(nn.BatchNorm1d(8))), (*VIEWS,)),
        (Folded(), torch.randn(5, 6, 4)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples_in_another_order_are_equal(model, batch, dtype):
    found = verify(model, batch, dtype=dtype).check()
    assert str(found).startswith(ORDER)
    assert max(d.error for d in found.differences["outputs of layers"]) < 1e-4


def test_the_first_layer_that_really_differs_is_named():
    found = verify(siamese(nn.BatchNorm1d(8)), (*VIEWS,))
    assert found.first_difference.where == "output of `net.1` (BatchNorm1d)"
    assert f"{ORDER}output of `net.0` (Linear)\n" in str(found)
    assert "`net.0`" not in found.explanation


class Centered(nn.Module):
    """A function of all samples, which no layer names, in front of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x - x.mean(0))


def test_a_layer_that_treats_each_sample_alone_need_not_communicate():
    found = verify(Centered(), VIEWS[0])
    assert found.first_difference.where == "output of `a` (Linear)"
    assert "what it is given differs: look at what the forward computes before" in str(found)
    assert "let the layer" not in found.explanation


class Below(checks.Siamese):
    """Returns both views below each other, for a loss that divides them."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return torch.cat(super().forward(a, b))


def test_a_loss_says_whether_the_order_of_outputs_is_right():
    net = Below(nn.Linear(3, 4))
    found = verify(net, (*VIEWS,), loss=lambda y: y.square().mean()).check()
    assert f"{ORDER}output of `net` (Linear), output of the model\n" in str(found)
    paired = verify(net, (*VIEWS,), loss=lambda y: (y[:7] * y[7:]).sum())
    assert paired.first_kind == "gradients"
    assert verify(net, (*VIEWS,)).first_kind == "outputs"  # upstream gradients are of samples


# -- what counts as the same rows ----------------------------------------------------------------


def is_same(parts: list[Tensor], reference: Tensor) -> bool:
    pairs = in_one_order(dict(enumerate(parts)), reference)
    return any(torch.equal(*pair) for pair in pairs)


X = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1))
ORDERS = torch.tensor([4, 0, 3, 5, 1, 2])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([X[ORDERS][:4], X[ORDERS][4:]], True),
        ([X[:, ORDERS[ORDERS < 4]][:, :1], X[:, ORDERS[ORDERS < 4]][:, 1:]], True),  # dimension 1
        ([X[ORDERS], X], True),  # each has all samples
        ([X[ORDERS].relu()[:2], X[ORDERS].relu()[2:]], False),
        ([X[:3], X[:3]], False),  # the same twice
        ([X[ORDERS], X + 1e-3], False),
        ([X[:3].transpose(1, 2), X[3:].transpose(1, 2)], False),
        ([X[:3].flatten(0, 1), X[3:].flatten(0, 1)], True),  # another shape
        ([X[:4]], False),
    ],
)
def test_rows_in_another_order(parts, expected):
    assert is_same(parts, X) == expected


def test_rows_that_are_not_finite_or_no_fractions_are_sorted():
    odd = X.clone()
    odd[0, 0], odd[1], odd[2, 1] = float("inf"), float("-inf"), 7
    assert is_same([odd[ORDERS][:2], odd[ORDERS][2:]], odd)
    codes = torch.tensor([3, 1, 1, 0, 2])
    assert is_same([codes[3:], codes[:3]], codes)
    assert not is_same([codes[3:], codes[:2], codes[:1]], codes)
    flags = codes > 1
    assert is_same([flags[1:3], flags[[0, 3, 4]]], flags)
    turned = torch.complex(X[0], X[1])
    assert is_same([turned[2:], turned[:2]], turned)
    assert not is_same([turned[2:].conj(), turned[:2]], turned)


def test_padding_to_a_length_of_ones_own():
    own = [X[:4, :3], X[4:]]
    actual, expected = as_far_as_each_goes(dict(enumerate(own)), X)
    assert torch.equal(actual, expected) and len(actual) == 4 * 3 * 5 + 2 * 4 * 5
    for parts in (
        [X[:4, :3], X[4:, :3]],  # none is as long as one device
        [X[:4, :3, :2], X[4:]],  # two dimensions are shorter
        [X[:4, :3], X[4:, 0]],
        [X[:3, :3], X[4:]],
        [X],
    ):
        assert as_far_as_each_goes(dict(enumerate(parts)), X) is None


# -- ranks ---------------------------------------------------------------------------------------


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "note"),
    [
        (checks.two_views, f"{ORDER}output of `net.0` (Linear)"),
        (
            checks.own_lengths,
            "ranks pad to their own longest, up to which they are compared: output of `head` "
            "(Linear), output of the model",
        ),
    ],
)
def test_ranks_with_another_order_or_padding_are_equal(make, note):
    assert note in str(verify_ranks(make, 2).check())


@needs_gloo
@pytest.mark.slow
def test_a_loss_of_own_samples_is_not_blamed_on_a_layer():
    result = verify_ranks(checks.two_views_of_own, 2)
    assert result.first_difference.where.startswith("gradient of input")
    assert result.explanation.startswith("Outputs are equal, but already the loss differs.")
