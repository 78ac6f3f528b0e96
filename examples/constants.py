"""Constant tensors in a custom layer, such as the matrix that takes RGB to YCbCr.

There are three ways, and with each the constant reaches the device of every replica:

    a buffer that is not persistent   prefer this: ``net.to(device)`` and ``net.double()`` convert
                                      it with the rest, and no checkpoint carries it
    a frozen parameter                as before, but checkpoints carry it, ``parameters()`` lists
                                      it, and it has to be left out of the optimizer
    a plain tensor attribute          DataParallel moves it to each replica, but ``net.to(device)``
                                      and ``net.double()`` leave it behind

    python examples/constants.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from replication import DataParallel

#: ITU-R BT.601, full range: rows are Y, Cb, Cr.
RGB_TO_YCBCR = [
    [0.299, 0.587, 0.114],
    [-0.168735892, -0.331264108, 0.5],
    [0.5, -0.418687589, -0.081312411],
]


class YCbCr(nn.Module):
    """Converts images ``(N, 3, H, W)``; derived classes say where the matrix is."""

    matrix: Tensor

    def forward(self, rgb: Tensor) -> Tensor:
        return torch.einsum("yc,nchw->nyhw", self.matrix, rgb)


class WithBuffer(YCbCr):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.tensor(RGB_TO_YCBCR), persistent=False)


class WithFrozenParameter(YCbCr):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor(RGB_TO_YCBCR), requires_grad=False)


class WithAttribute(YCbCr):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.tensor(RGB_TO_YCBCR)


def main() -> int:
    images = torch.rand(6, 3, 4, 4)
    for layer in (WithBuffer(), WithFrozenParameter(), WithAttribute()):
        net = nn.Sequential(layer, nn.Conv2d(3, 2, 1))
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        torch.optim.SGD(trained, lr=0.1)  # without the constant
        model = DataParallel(net, ["cpu"] * 3)
        torch.testing.assert_close(model(images), net(images))
        in_checkpoint = "0.matrix" in net.state_dict()
        converted = net.double()[0].matrix.dtype == torch.float64
        print(f"{type(layer).__name__:<20} in checkpoints: {in_checkpoint!s:<5}", end="  ")
        print(f"converted with the network: {converted}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
