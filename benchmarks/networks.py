"""A residual network with as many modules as ResNet-50 has, of any width."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

#: By how much a block's output is wider than what is inside.
EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if channels == out and stride == 1
            else nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y)) + self.shortcut(x)
        return self.relu(y)  # type: ignore[no-any-return]


def resnet(width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 10) -> nn.Module:
    """ResNet-50 by default, but for its classes: 53 convolutions, 53 BatchNorms, a linear layer.

    Takes ``(N, 3, H, W)``, returns ``(N, classes)``.
    """
    stages: list[nn.Module] = []
    channels = width
    for stage, count in enumerate(blocks):
        inside = width << stage
        for block in range(count):
            stages.append(Bottleneck(channels, inside, 2 if stage and not block else 1))
            channels = EXPANSION * inside
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
