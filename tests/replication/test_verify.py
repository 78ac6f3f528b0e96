"""`verify` finds every difference from one device, and no other."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from replication import DataParallel, Scattered
from syncbn import convert_model, verify
from tests.kit.layers import Centering, Numbered

CPUS = ["cpu"] * 3


class Net(nn.Module):
    """Nested layers; one that is called twice; arguments and outputs that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.shared = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, scale: Tensor | None = None, name: str = "") -> dict[str, Any]:
        features = self.stem(x).mean((2, 3))
        if scale is not None:
            features = features * scale
        y = self.norm(self.shared(self.shared(features)))
        return {"features": [features, y], "name": name}


@pytest.fixture
def net() -> nn.Module:
    return convert_model(Net())


X = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(0))
LINEAR = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
SCALE = torch.rand(8, 1, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize(
    "batch",
    [X, (X, SCALE), [X, SCALE, "n"], {"x": X, "scale": SCALE}],
    ids=["tensor", "tuple", "list", "dict"],
)
@pytest.mark.parametrize("devices", [CPUS, ["cpu"] * 9])
def test_a_synchronized_network_is_equal(net, wraps, batch, devices):
    found = verify(DataParallel(net, CPUS) if wraps else net, batch, devices)
    assert found
    assert found.first_difference is None
    assert max(d.error for kind in found.differences.values() for d in kind) < 1e-9
    assert str(found).endswith(f"\n{min(len(devices), 8)} replicas: equal (tolerance 1e-06)")


def test_everything_is_compared_on_two_cpu_replicas_by_default(net):
    result = verify(net, (X, SCALE))
    assert result.replicas == 2
    found = result.differences
    assert [d.where for d in found["outputs of layers"]] == [
        "output of `stem.0` (Conv2d)",
        "output of `stem.1` (SynchronizedBatchNorm2d)",
        "output of `stem.2` (ReLU)",
        "output of `stem` (Sequential)",
        "output of `shared` (Linear)",
        "output of `shared` (Linear, call 2)",
        "output of `norm` (SynchronizedBatchNorm1d)",
    ]
    assert {d.where for d in found["outputs"]} == {
        "output of `features.0`",
        "output of `features.1`",
    }
    assert len(found["gradients"]) == 2 + 2 * 4
    assert len(found["buffers"]) == 2 * 3


def test_the_error_of_a_layer_is_relative_to_its_own_outputs(net):
    net.norm = nn.BatchNorm1d(4)
    nn.init.constant_(net.norm.weight, 1e-9)
    first = verify(net, X, CPUS).first_difference
    assert first.where == "output of `norm` (BatchNorm1d)"
    assert first.error > 0.1


def test_the_model_is_left_as_it_is(net):
    before = copy.deepcopy(net.state_dict())
    verify(net, X, CPUS)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())


class WrongBackward(Numbered):
    """Right forward, but copy 1 forgets a part of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.detach() if self.copy_id == 1 else 2 * x


def test_a_gradient_that_differs_is_named():
    net = nn.Sequential(nn.Linear(3, 3), WrongBackward(), Centering())
    found = verify(net, torch.randn(6, 3), CPUS)
    assert found.first_difference.where == "gradient of input `args[0]`"
    assert all(d.error < 1e-12 for d in found.differences["outputs of layers"])


class Odd(Numbered):
    """In replicas it does something else."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does, self.inner = does, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.copy_id is not None and self.does == "skips":
            return x
        y = self.inner(x)
        if self.copy_id == 0 and self.does == "halves":
            return self.inner(x[::2])
        if self.does == "returns odd things":
            return y, x > 0, x.mean().detach(), None, "text"
        if self.does.startswith("masks"):
            y = y.masked_fill(y > 1, float("-inf"))
        if self.copy_id is not None and self.does == "masks and triples":
            y = 3 * y
        if self.does == "nan" or (self.copy_id == 1 and self.does == "nan in one"):
            y = y * float("nan")
        if self.does == "registers" and self.copy_id is None:
            self.register_buffer("late", y.detach())
        return y


@pytest.mark.parametrize(
    ("does", "where", "reason"),
    [
        ("skips", "", ""),  # nothing follows from it
        ("nan", "", ""),  # the same on one device
        ("nan in one", "output of the model", "error inf"),
        ("masks", "", ""),
        ("masks and triples", "output of the model", "error"),
        ("registers", "buffer of `late`", "only one device has it"),
        ("halves", "output of `inner` (Identity, call 2)", "only replicas have it"),
        ("returns odd things", "", ""),
    ],
)
def test_different_calls_and_shapes_are_reported(does, where, reason):
    found = verify(Odd(does), torch.randn(6, 3), ["cpu"] * 2)
    first = found.first_difference
    assert ("" if first is None else first.where) == where
    assert first is None or reason in str(first)
    if does == "skips":
        note = "output of `inner` (Identity): only one device has it"
        assert note in str(found) and "nothing that follows from them does" in str(found)


@pytest.mark.parametrize(
    ("call", "error", "requirement"),
    [
        (lambda: verify(Net, X), TypeError, r"expected a torch\.nn\.Module"),
        (lambda: verify(nn.ReLU(), X, []), ValueError, r"more devices, such as \['cpu'\] \* 2"),
        (lambda: verify(nn.ReLU(), X, ["cpu"]), ValueError, "expected two or more devices"),
        (lambda: verify(nn.ReLU(), X[:1]), ValueError, "at least two replicas with data"),
        (lambda: verify(LossOfSamples(), (X, X)), ValueError, "return one loss per sample"),
        (lambda: verify(nn.ReLU(), X, wrap=nn.Sequential), ValueError, "run under torchrun"),
        (lambda: verify(nn.ReLU(), X, targets=X), ValueError, "targets are for a loss"),
    ],
    ids=["module", "none", "devices", "samples", "loss", "wrap", "targets"],
)
def test_what_cannot_be_compared_is_refused(call, error, requirement):
    with pytest.raises(error, match=requirement):
        call()


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)["features"][1]


class Sequences(nn.Module):
    """Batches in other dimensions, and outputs without any."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(5, 4)
        self.rnn = nn.LSTM(4, 4)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1]))
        y, _ = self.rnn(x.transpose(0, 1))
        return self.linear(y[-1])


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.by).abs()


@pytest.mark.parametrize(
    ("net", "batch"),
    [
        (DataParallel(LINEAR, CPUS, dim=1), torch.randn(4, 7, 3)),
        (nn.DataParallel(LINEAR).cpu(), torch.randn(4, 3)),  # without accelerators: no `dim`
        (nn.Sequential(DataParallel(LINEAR, ["cpu"] * 2)), torch.randn(8, 3)),
        (nn.Sequential(nn.ReLU(inplace=True), LINEAR), torch.randn(8, 3)),
        (nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Tanh()), torch.arange(8) % 5),
        (Turns(), torch.randn(6, 2)),
        (convert_model(Checkpointed()), X),
        (Sequences(), torch.randn(7, 5, 4)),
    ],
    ids=["dim", "torch's", "inner", "in place", "sparse", "complex", "checkpoint", "sequences"],
)
def test_odd_networks_are_equal(net, batch):
    found = verify(net, batch, CPUS)
    assert found, found
    # In float64, or complex numbers of that precision.
    assert all(d.error < 1e-9 for kind in found.differences.values() for d in kind)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_does_not_matter_that_gradients_are_off(net, mode):
    with mode():
        found = verify(net, X.clone(), CPUS)
    assert found
    assert max(d.error for d in found.differences["gradients"]) > 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_replicas_and_one_device_get_the_loss(net, reduction):
    targets = {"classes": torch.arange(8) % 4, "scale": SCALE}

    def loss(outputs: dict[str, Any], targets: dict[str, Tensor]) -> Tensor:
        scores, classes = outputs["features"][1] * targets["scale"], targets["classes"]
        assert scores.shape == (8, 4) and targets["scale"].dtype == scores.dtype
        return nn.functional.cross_entropy(scores, classes, reduction=reduction)

    found = verify(net, X, CPUS, loss=loss, targets=targets)
    assert found and max(d.error for d in found.differences["gradients"]) > 0
    calls = itertools.count(1)
    other = verify(net, X, CPUS, loss=lambda y: y["features"][1].square().sum() * next(calls))
    assert other.first_difference.where == "gradient of input `args[0]`"


class LossOfSamples(nn.Module):
    def forward(self, x: Tensor, y: Tensor, detaches: bool = False) -> dict[str, Any]:
        losses = nn.functional.mse_loss(x, y, reduction="none").flatten(1).mean(1)
        mean = losses.mean()
        return {"losses": losses, "mean": mean.detach() if detaches else mean}


def test_loss_of_each_sample_is_compared():
    found = verify(LossOfSamples(), (X, 2 * X, True), CPUS)
    assert found and len(found.differences["outputs"]) == 2


def test_a_network_in_evaluation_is_refused_unless_a_layer_trains():
    plain = nn.Sequential(nn.BatchNorm2d(2)).eval()
    with pytest.raises(ValueError, match=r"training mode \(got eval\(\)\); call model\.train\(\)"):
        verify(DataParallel(plain, CPUS), X, CPUS)
    plain[0].train()
    assert verify(convert_model(plain), X, CPUS)


class Both(Numbered):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"same": x, "other": x if self.copy_id is None else 2 * x}


def test_output_of_a_layer_that_differs_is_named():
    first = verify(nn.Sequential(Both()), X, CPUS).first_difference
    assert first.where == "output `other` of `0` (Both)"


class Derived(nn.BatchNorm1d):
    """Of a class that no warning is about."""


class Functional(nn.Module):
    """Normalizes without a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("layer", [Derived(3), Functional()], ids=["derived", "functional"])
def test_batch_norm_that_no_warning_sees_is_found(layer):
    """Clause 6e: `verify` finds what no warning can."""
    first = verify(nn.Sequential(nn.Linear(3, 3), layer), torch.randn(8, 3)).first_difference
    assert first.where == f"output of `1` ({type(layer).__name__})"


def test_in_float32_what_is_left_is_rounding():
    net = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    found = verify(net, torch.randn(8, 3), CPUS, dtype=torch.float32)
    assert found
    assert max(d.error for d in found.differences["gradients"]) > 1e-9


class Dropping(nn.Linear):
    """Draws random numbers by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_what_the_model_raises_says_where_verify_was():
    with pytest.raises(RuntimeError) as error:
        verify(nn.Linear(4, 4), torch.randn(4, 3))
    what = "while verify ran a copy of the model, cast to torch.float64, on"
    assert error.value.__notes__[-1] == f"{what} one device"
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        verify(nn.BatchNorm1d(3), torch.randn(2, 3), ["cpu"] * 2)
    assert error.value.__notes__[-1] == f"{what} 2 replicas"


def test_a_model_that_draws_random_numbers_is_refused():
    for net in (Dropping(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))):
        with pytest.raises(ValueError, match="must not draw random numbers"):
            verify(net, torch.randn(9, 4))
    net[1].eval()
    assert verify(net, torch.randn(9, 4))


# -- limits of replicas that it finds ----------------------------------------------------------


class Heads(nn.Module):
    """Writes into a plain list, as MONAI's DynUNet with deep supervision does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.exchanges = [None], Centering()

    def forward(self, x: Tensor) -> Tensor:
        self.heads[0] = 2 * x
        return self.exchanges(x) + self.heads[0]


def test_a_forward_that_writes_into_a_plain_list_differs():
    found = verify(nn.Sequential(Heads()), torch.randn(6, 3), CPUS)
    assert found.first_difference.where == "output of `0` (Heads)"


class Weighted(nn.Module):
    """Pairs the samples with the items of a list. Each replica gets the entire list."""

    def forward(self, x: Tensor, weights: list[float]) -> Tensor:
        return torch.stack([weight * sample for weight, sample in zip(weights, x, strict=False)])


def test_a_forward_that_pairs_a_list_with_the_samples_differs():
    weights = [1.0, 2.0, 3.0, 4.0]
    found = verify(Weighted(), (torch.ones(4, 2), weights), ["cpu"] * 2)
    assert found.first_difference.where == "output of the model"
    parts = Scattered(torch.ones(4, 2).split(2)), Scattered([weights[:2], weights[2:]])
    y = DataParallel(Weighted(), ["cpu"] * 2)(*parts)
    assert y[:, 0].tolist() == weights
