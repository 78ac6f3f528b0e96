"""Networks as people have them: many small layers, or few large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

#: The output of a bottleneck has this many times the channels of its 3x3 convolution.
EXPANSION = 4


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution, a BatchNorm, and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def dense(layers: int = 100, channels: int = 16) -> nn.Module:
    """A stack of 1x1 convolutions, each with a BatchNorm and a ReLU."""
    return nn.Sequential(*(conv(channels, channels, 1) for _ in range(layers)))


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.inside = nn.Sequential(conv(channels, width, 1), conv(width, width, 3, stride))
        # Without the last ReLU, which follows the sum.
        self.last = conv(width, out, 1)[:2]
        is_identity = channels == out and stride == 1
        self.shortcut = nn.Identity() if is_identity else conv(channels, out, 1, stride)[:2]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(self.inside(x)) + self.shortcut(x))


def resnet(width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 10) -> nn.Module:
    """ResNet-50 with ten classes: 53 convolutions, 53 BatchNorms, and a linear layer."""
    stages: list[nn.Module] = []
    channels = width
    for stage, count in enumerate(blocks):
        inside = width << stage
        for block in range(count):
            stages.append(Bottleneck(channels, inside, 2 if stage and not block else 1))
            channels = EXPANSION * inside
    return nn.Sequential(
        conv(3, width, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class UNet(nn.Module):
    """A U-Net of four resolutions with 14 BatchNorms."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            self.pair(i, o) for i, o in zip([3, *widths], widths, strict=False)
        )
        self.bottom = self.pair(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            self.pair(2 * own, below)
            for own, below in zip(widths[::-1], [*widths[-2::-1], width], strict=True)
        )
        self.classes = nn.Conv2d(width, classes, 1)

    @staticmethod
    def pair(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(conv(inputs, outputs), conv(outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            skipped.append(block(x))
            x = nn.functional.max_pool2d(skipped[-1], 2)
        x = self.bottom(x)
        for block, skip in zip(self.up, reversed(skipped), strict=True):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1))
        return self.classes(x)  # type: ignore[no-any-return]


class Head(nn.Module):
    """A detector's convolutional head: two towers of four layers, shared by three resolutions.

    Each BatchNorm therefore runs three times per forward, on inputs of different sizes.
    """

    def __init__(self, channels: int = 32, classes: int = 10, levels: int = 3) -> None:
        super().__init__()
        self.levels = levels
        self.scores, self.boxes = (
            nn.Sequential(
                *(conv(channels, channels) for _ in range(4)),
                nn.Conv2d(channels, outputs, 3, padding=1),
            )
            for outputs in (classes, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for level in range(self.levels):
            features = nn.functional.max_pool2d(x, 1 << level)
            outputs += [self.scores(features).flatten(1), self.boxes(features).flatten(1)]
        return torch.cat(outputs, 1)


class Network(NamedTuple):
    """A network and the shape of its input."""

    title: str
    build: Callable[[], nn.Module]
    #: Per replica.
    shape: tuple[int, ...]


NETWORKS = {
    "dense": Network("100 x [Conv 1x1, BN, ReLU], 16 ch, 8x8", dense, (8, 16, 8, 8)),
    "narrow": Network("ResNet-50 of width 8, 32x32", partial(resnet, 8), (8, 3, 32, 32)),
    "resnet": Network("ResNet-50, 64x64", resnet, (8, 3, 64, 64)),
    "unet": Network("U-Net of width 16, 64x64", UNet, (2, 3, 64, 64)),
    "head": Network("Detector head, 32 ch, 32x32 to 8x8", Head, (2, 32, 32, 32)),
}
