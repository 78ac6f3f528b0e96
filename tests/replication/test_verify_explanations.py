"""What `verify` says about a difference: what is first, why, and what to do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from replication import ReplicaAware, verify, verify_ranks
from replication.verify.agreement import values_of
from tests.kit.ranks import needs_gloo
from tests.programs import checks

ONLY_GRADIENTS = ": only gradients differ.\n"
LOSS_DIFFERS = "Outputs are equal, but already the loss differs.\n"


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (
            checks.sum_of_samples,
            [
                f"{ONLY_GRADIENTS}Every gradient is 1/2 of one device's: DDP averages over",
                "Outputs are equal, and the ranks' losses add up to one device's: only",
                "so losses that add up to one device's must be multiplied by the number of ranks",
            ],
        ),
        (
            checks.terms,
            [
                f"{ONLY_GRADIENTS}term `center`: every gradient is 1/2 of one device's",
                "a collective has none. Use collectives that have derivatives",
            ],
        ),
        (
            checks.features_and_scale,
            [
                f"{ONLY_GRADIENTS}Gradients of input `args[0]`, `0.weight`, `0.bias`: 1/2 of one",
                "; gradients of `1.scale`: equal. Every rank has the loss of one device, so some",
            ],
        ),
        (
            checks.uneven_means,
            [
                f"{LOSS_DIFFERS}Gradients are no multiple of one device's. One device weighs the "
                "gradients of the ranks' losses by 0.6, 0.4, but DDP averages, by 0.5 each",
                "multiply by the number of ranks",
                "No fault if all ranks always have equally many",
            ],
        ),
        (
            checks.loss_with_parameters,
            [
                "The ranks have different gradients of the loss's `weight`, so nothing averages "
                "them. Their mean is one device's. Wrap their module as well",
            ],
        ),
        (
            checks.own_statistics,
            ["only buffers differ.\nEach rank updates `1.center` from its own samples: reduce"],
        ),
        (
            checks.statistics_of_rank_0,
            ["only buffers differ.\nOnly rank 0 changes `1.center`, and the others keep old"],
        ),
        (
            checks.own_sums,
            [
                "Already the forward differs.\nEach rank updates `1.sums` from its own samples",
                "\n`1.codes` probably follows from `1.sums`\n",
                "\n`1` (Codebook) probably follows from `1.sums`\n",
            ],
        ),
        (
            checks.batch_norm,
            ["Already the forward differs.\nEach rank computes `1` (BatchNorm1d) from its own"],
        ),
        (
            checks.coupled,
            [
                f"{LOSS_DIFFERS}Gradients are no",
                "Each rank computes the loss from its own",
                "Gather",
            ],
        ),
        (
            checks.strict_beginning,
            ["The ranks begin with different values of `weight`, `bias`, and the wrapper does"],
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("ranks", [2])
@needs_gloo
@pytest.mark.slow
def test_a_difference_between_ranks_is_explained(make, ranks, texts):
    result = verify_ranks(make, ranks)
    assert not result
    for text in texts:
        assert text in result.explanation


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [checks.compiled, checks.empty_parts, checks.other_beginning, checks.strict_and_broadcast],
)
def test_what_is_equal_has_no_explanation(make):
    result = verify_ranks(make, 2).check()
    assert not result.explanation
    assert bool(result.notes) == (make not in (checks.compiled, checks.empty_parts))


@needs_gloo
@pytest.mark.slow
def test_terms_of_a_loss_are_compared_one_by_one():
    result = verify_ranks(checks.terms, 2)
    found = result.differences
    assert max(d.error for d in found["gradients of term `fit`"]) < 1e-9
    # The parameters that a term does not use have gradients of zero.
    assert len(found["gradients of term `fit`"]) == len(found["gradients of term `center`"]) == 5
    assert [*result.losses] == ["loss", "term `fit`", "term `center`"]
    alone, *of_ranks = result.losses["term `fit`"]
    assert sum(of_ranks) / 2 == pytest.approx(alone, rel=1e-12)
    assert "on the ranks (their mean is equal)" in str(result)
    assert result.losses["term `center`"] == pytest.approx([result.losses["term `center`"][0]] * 3)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, -2.0, 3.0]])
def test_what_the_ranks_have_is_told_apart(values):
    layer = nn.Module()
    layer.register_buffer("values", torch.tensor(values))
    digests = values_of(layer)
    assert digests == values_of(copy.deepcopy(layer))
    layer.values = torch.tensor([*values, 1.0])
    assert digests != values_of(layer)


# -- replicas ------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Doubling(ReplicaAware, nn.Module):
    """In replicas its backward is twice too much."""

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x) if self.group.size > 1 else x


def test_a_wrong_factor_in_replicas_is_explained():
    net = nn.Sequential(nn.Linear(3, 4), Doubling(), nn.Linear(4, 2))
    found = verify(net, torch.randn(6, 3))
    assert found.explanation == (
        "Outputs are equal: only gradients differ.\n"
        "Gradients of input `args[0]`, `0.weight`, `0.bias`: 2 times one device's; gradients of "
        "`2.weight`, `2.bias`: equal. Look at the backward of the layers that communicate, "
        "between those whose gradients are wrong and those after them"
    )
    every = verify(net[:2], torch.randn(6, 3), loss=lambda y: {"a": y.sum(), "b": y.exp().sum()})
    for term in ("a", "b"):
        assert f"\nterm `{term}`: every gradient is 2 times one device's" in every.explanation


def test_a_layer_that_does_not_communicate_is_named_in_replicas():
    found = verify(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(6, 3))
    first, second, _, last = found.explanation.splitlines()
    assert first == "Already the forward differs."
    assert last.startswith("The loss and gradients are judged only once outputs agree")
    assert second.startswith("Each replica computes `1` (BatchNorm1d) from its own samples")


class Centered(nn.Module):
    """Centers the batch in its own forward, so that no layer in it differs."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("model", [Centered(), nn.BatchNorm1d(3)])
@pytest.mark.parametrize("samples", [7, 8])
def test_outputs_of_replicas_that_do_not_communicate_are_explained(model, samples):
    explanation = verify(model, torch.randn(samples, 3)).explanation
    second = explanation.splitlines()[1]
    assert second.startswith("Each replica computes its outputs from its own samples"), explanation


class Mean(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": x.mean().detach()}


def test_what_is_not_compared_is_printed_as_such():
    found = verify(nn.Sequential(nn.Linear(3, 4), Mean()), torch.randn(6, 3), loss=Trained())
    rows = {line.split("  ")[0]: line.split()[-2:] for line in str(found).splitlines()}
    assert rows["outputs"] == ["not", "compared"]
    assert rows["outputs of layers"] == ["not", "compared)"]  # one of two
    assert "output of `mean`: not compared: " in str(found.differences["outputs"][0])
    names = "output `mean` of `1` (Mean), output of `mean`"
    assert f"\nnot compared: {names}: the copies have a number each" in str(found)


class Trained(nn.Module):
    """A loss with a parameter, which alone gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, outputs: dict[str, Tensor]) -> Tensor:
        return (self.weight * outputs["mean"].detach()).square().sum()


def test_a_loss_that_is_no_number_is_refused():
    for loss in (lambda y: {"a": y}, lambda y: y):
        with pytest.raises(ValueError, match="must be a tensor of one number"):
            verify(nn.Linear(3, 4), torch.randn(6, 3), loss=loss)


def test_parameters_of_a_loss_that_nothing_compares_are_refused():
    layer, net, x = nn.Linear(4, 10).double(), nn.Linear(3, 4), torch.randn(6, 3)

    class Criterion:
        def loss(self, y: Tensor) -> Tensor:
            return layer(y).square().mean()

    for loss in (Criterion().loss, lambda y: {"a": y.mean(), "b": Criterion().loss(y)}):
        with pytest.raises(
            ValueError, match=r"the loss has parameters of shapes \(10,\), \(10, 4"
        ):
            verify(net, x, loss=loss)
    with pytest.raises(
        ValueError, match=r"shapes \(4, 3\) that .* of the model must be among its"
    ):
        verify(net, x, loss=lambda y: y.mean() + net.weight.double().norm())
    layer.requires_grad_(False)
    verify(net, x, loss=Criterion().loss).check()

    def penalty(y: Tensor) -> Tensor:
        """A leaf that is no parameter, as in penalties of gradients."""
        leaf = y.detach().clone().requires_grad_()
        return y.mean() + leaf.square().mean()

    verify(net, x, loss=penalty).check()


def test_an_error_about_dtypes_says_what_to_do():
    layer = nn.Linear(4, 10)
    with pytest.raises(RuntimeError) as error:
        verify(nn.Linear(3, 4), torch.randn(6, 3), loss=lambda y: layer(y).mean())
    note = "verify computes in float64: make constants of the loss with `.to(outputs.dtype)`, or"
    assert error.value.__notes__[0].startswith(note)
    with pytest.raises(RuntimeError) as error:
        verify(nn.Linear(3, 4), torch.randn(6, 3), loss=lambda y: y.view(5, 5).mean())
    assert not error.value.__notes__[0].startswith(note)
