"""Networks that others have written: n replicas train them with the numbers of one device.

They are built from tiny configurations; nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replication import DataParallel
from syncbn import SynchronizedBatchNorm2d, convert_model, revert_model, summary
from tests.kit.programs import package

# -- networks ----------------------------------------------------------------------------------

#: Deviation of the weights of layers of some 16 channels. The usual 0.02 is for wide ones, and
#: leaves so small a signal here that normalization magnifies rounding.
NARROW = 0.25


def resnet() -> nn.Module:
    """A classifier of images."""
    models = package("transformers")
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [2, 1], "num_labels": 3}
    config = models.ResNetConfig(num_channels=2, layer_type="bottleneck", **sizes)
    return models.ResNetForImageClassification(config)


def levit() -> nn.Module:
    """A classifier of images, with attention, and BatchNorm1d over the patches of all samples."""
    models = package("transformers")
    sizes = {"hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1]}
    config = models.LevitConfig(
        image_size=32,
        num_channels=2,
        key_dim=[4, 4, 4],
        drop_path_rate=0,
        initializer_range=NARROW,
        num_labels=3,
        **sizes,
    )
    return models.LevitForImageClassification(config)


def unet() -> nn.Module:
    """Segments volumes."""
    nets = package("monai.networks.nets")
    return nets.UNet(3, 2, 3, channels=(4, 8, 8), strides=(2, 2), num_res_units=2, norm="batch")


def generator() -> nn.Module:
    nets = package("monai.networks.nets")
    return nets.Generator((4,), (8, 2, 2), (6, 4, 2), (2, 2, 2), num_res_units=2, norm="batch")


def discriminator() -> nn.Module:
    """Its output is a list of tensors, and a list of lists of tensors."""
    nets = package("monai.networks.nets")
    return nets.MultiScalePatchDiscriminator(2, 1, 2, 4, in_channels=2, minimum_size_im=16)


def image_model(name: str, **options: Any) -> nn.Module:
    """A classifier of timm's, without dropout, which would draw other numbers in replicas."""
    package("torchvision")
    timm = package("timm")
    return timm.create_model(name, num_classes=3, drop_rate=0, **options)


# -- how they are trained ----------------------------------------------------------------------

Losses = Iterator[tuple[int, Tensor]]  #: Which network a loss is for, and the loss.


class Images:
    """Logits of images, or of their pixels, and what lies between."""

    def __init__(
        self, build: Callable[[], nn.Module], image: list[int], target: list[int]
    ) -> None:
        self.build, self.sample, self.target = build, image, target

    def networks(self) -> list[nn.Module]:
        return [self.build()]

    def batch(self, samples: int) -> list[Tensor]:
        x = torch.randn(samples, *self.sample, dtype=torch.float64)
        return [x, torch.randint(3, (samples, *self.target))]

    def losses(self, model: nn.Module, x: Tensor, target: Tensor) -> Losses:
        output = model(x, output_hidden_states=True)
        # Of the joined output. With ``labels`` each replica would return its own mean loss, and
        # the mean of these is not the mean of the batch if shares are uneven.
        loss = F.cross_entropy(output.logits, target)
        # The sine has a gradient which normalization does not take away, as it does with a square.
        yield 0, loss + sum(hidden.sin().mean() for hidden in output.hidden_states)


class Volumes(Images):
    """Logits of voxels. The Dice loss is one of the whole batch, no mean over samples."""

    def losses(self, model: nn.Module, x: Tensor, target: Tensor) -> Losses:
        dice = package("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True, batch=True)
        yield 0, dice(model(x), target[:, None])


class Adversarial:
    """A generator and a discriminator, in turn."""

    def networks(self) -> list[nn.Module]:
        return [generator(), discriminator()]

    def batch(self, samples: int) -> list[Tensor]:
        shapes = (samples, 4), (samples, 2, 16, 16)
        return [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def losses(self, generate: nn.Module, judge: nn.Module, noise: Tensor, real: Tensor) -> Losses:
        fake = generate(noise)
        judged, features = judge(real)
        # The penalty on gradients takes second derivatives, through all replicas.
        (slope,) = torch.autograd.grad(sum(j.sum() for j in judged), real, create_graph=True)
        loss = slope.square().sum() / len(real) + sum((j - 1).square().mean() for j in judged)
        yield 1, loss + sum(j.square().mean() for j in judge(fake.detach())[0])

        judged, imitated = judge(fake)
        loss = sum((j - 1).square().mean() for j in judged)
        for ours, theirs in zip(imitated, features, strict=True):
            loss += sum(F.l1_loss(o, t.detach()) for o, t in zip(ours, theirs, strict=True))
        yield 0, loss


trainings = pytest.mark.parametrize(
    "training",
    [
        pytest.param(Images(resnet, [2, 16, 16], []), id="resnet"),
        pytest.param(Images(levit, [2, 32, 32], []), id="levit"),
        pytest.param(Volumes(unet, [2, 8, 8, 8], [8, 8, 8]), id="unet"),
        pytest.param(Adversarial(), id="gan"),
    ],
)


def train(
    training: Images | Adversarial,
    networks: list[nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    batches: list[list[Tensor]],
) -> dict[str, Tensor]:
    """What each step gives: the losses, all gradients, and then all parameters and buffers."""
    networks = [copy.deepcopy(network).double().train() for network in networks]
    models = [wrap(network) for network in networks]
    # SGD, because Adam makes a step of full size even if a gradient is 0 but for rounding. A
    # bias in front of a BatchNorm has such a gradient.
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in networks]
    seen: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        inputs = [part.clone().requires_grad_(part.is_floating_point()) for part in batch]
        for turn, loss in training.losses(*models, *inputs):
            optimizers[turn].zero_grad()
            loss.backward()
            optimizers[turn].step()
            here = f"step {step}, network {turn}"
            seen[f"{here}: loss"] = loss.detach()
            for name, parameter in networks[turn].named_parameters():
                if parameter.grad is not None:  # it is None of what the network does not use
                    seen[f"{here}: gradient of {name}"] = parameter.grad.clone()
            for index, network in enumerate(networks):
                for name, tensor in network.state_dict().items():
                    seen[f"{here}: {name} of network {index}"] = tensor.clone()
        for index, part in enumerate(inputs):
            if part.grad is not None:
                seen[f"step {step}: gradient of input {index}"] = part.grad
    return seen


def alone(network: nn.Module) -> nn.Module:
    return network


def synchronized(network: nn.Module, replicas: int) -> nn.Module:
    return DataParallel(convert_model(network), ["cpu"] * replicas)


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each tensor is off, in relation to its largest entry.

    Tensors that are 0 but for rounding are measured in relation to 0.01.
    """
    assert list(actual) == list(expected)
    pairs = [(actual[name].double(), expected[name].double()) for name in expected]
    largest = [((a - e).abs().amax() / (e.abs().amax() + 0.01)).item() for a, e in pairs]
    return dict(zip(expected, largest, strict=True))


#: Of float64: 1e-16 in each operation, and it grows with every layer that divides by a small
#: deviation, and with every step. It has come to 2e-11 in the deepest of these networks, and to as
#: much on one device that sees the samples of each batch in reverse order.
ROUNDING = 1e-8


# -- tests -------------------------------------------------------------------------------------


@trainings
@pytest.mark.parametrize(("replicas", "sizes"), [(2, [8, 5, 6]), (3, [7, 9, 5])])
def test_training_on_replicas_equals_training_on_one_device(training, replicas, sizes):
    """Clause 1e: whole networks."""
    networks = training.networks()
    batches = [training.batch(samples) for samples in sizes]
    expected = train(training, networks, alone, batches)
    actual = train(training, networks, lambda net: synchronized(net, replicas), batches)
    off = errors(actual, expected)
    assert {name: error for name, error in off.items() if not error < ROUNDING} == {}


def test_an_output_of_transformers_keeps_its_type():
    network = resnet()
    x = torch.randn(5, 2, 16, 16)
    expected = network(x, output_hidden_states=True)
    output = DataParallel(convert_model(network), ["cpu"] * 2)(x, output_hidden_states=True)
    assert type(output) is type(expected)
    assert list(output) == list(expected)
    assert output[0] is output.logits is output["logits"]
    shapes = [hidden.shape for hidden in output.hidden_states]
    assert shapes == [hidden.shape for hidden in expected.hidden_states]


@pytest.mark.parametrize(
    "name",
    ["efficientnet_b0", "mobilenetv3_small_050", "densenet121", "regnetx_002", "ghostnet_050"],
)
def test_networks_of_timm_are_synchronized_and_equal_one_device(name):
    plain = image_model(name).double()
    network = convert_model(copy.deepcopy(plain))
    layers = [m for m in plain.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(summary(network).paths("synchronized")) == len(layers) > 30
    x = torch.randn(7, 3, 32, 32, dtype=torch.float64)
    expected, actual = plain(x), DataParallel(network, ["cpu"] * 3)(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    pairs = dict(network.named_buffers()), dict(plain.named_buffers())
    torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    actual.backward(dy)
    gradients = [{n: p.grad for n, p in net.named_parameters()} for net in (network, plain)]
    off = errors(*gradients)
    assert {name: error for name, error in off.items() if not error < ROUNDING} == {}
    assert [type(m) for m in revert_model(network).modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("library", ["torchvision.models", "timm"])
def test_networks_may_be_built_with_synchronized_layers(library):
    package(library.partition(".")[0])
    build = getattr(import_module(library), "resnet18" if "." in library else "create_model")
    name = [] if "." in library else ["resnet18"]
    torch.manual_seed(0)
    network = build(*name, num_classes=3, norm_layer=SynchronizedBatchNorm2d).double()
    torch.manual_seed(0)
    plain = build(*name, num_classes=3).double()
    assert len(summary(network).paths("synchronized")) == 20
    x = torch.randn(7, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(DataParallel(network, ["cpu"] * 3)(x), plain(x))
    torch.testing.assert_close(dict(network.named_buffers()), dict(plain.named_buffers()))


def test_what_timm_freezes_and_unfreezes_is_converted_again():
    """timm replaces the layers by its own; activations stay."""
    network = convert_model(image_model("mobilenetv3_small_050"))
    tools = package("timm.layers")
    count = len(summary(network).paths("synchronized"))
    x = torch.randn(4, 3, 32, 32)
    expected = network.eval()(x)
    frozen = tools.freeze_batch_norm_2d(network)
    torch.testing.assert_close(frozen(x), expected)
    thawed = tools.unfreeze_batch_norm_2d(frozen)
    assert summary(thawed).paths("synchronized") == []
    assert len(summary(convert_model(thawed)).paths("synchronized")) == count
    torch.testing.assert_close(thawed.eval()(x), expected)
