"""A convolutional block whose output does not depend on padding.

    python examples/padded_sequences.py

Sequences of different lengths are padded to one length. Plain BatchNorm counts the padding, so
what the network says of a sequence depends on how long the others are. With a mask, padding takes
no part in the statistics, and the layer's output there is zero, which is also what a convolution
adds at the end of a sequence.
"""

import torch
from torch import Tensor, nn

from syncbn import DataParallel, SynchronizedBatchNorm1d


class Block(nn.Module):
    """Convolutions over sequences ``(N, C, L)``, and the mean over their valid positions."""

    def __init__(self, channels: int = 8, uses_mask: bool = True) -> None:
        super().__init__()
        self.uses_mask = uses_mask
        self.convs = nn.ModuleList(nn.Conv1d(channels, channels, 5, padding=2) for _ in range(3))
        self.norms = nn.ModuleList(SynchronizedBatchNorm1d(channels) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.where(mask.unsqueeze(1), 0.0)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x), mask=mask if self.uses_mask else None).relu()
        return (x * mask.unsqueeze(1)).sum(2) / mask.sum(1, keepdim=True)


def padded(sequences: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Returns a batch of sequences, ``(C, L)`` each, and its mask. Its padding is NaN."""
    x = torch.full((len(sequences), *sequences[0].shape[:1], length), torch.nan).double()
    for row, sequence in zip(x, sequences, strict=True):
        row[:, : sequence.size(1)] = sequence
    lengths = torch.tensor([sequence.size(1) for sequence in sequences])
    return x, torch.arange(length) < lengths.unsqueeze(1)


def step(model: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor]:
    """Returns outputs and gradients of a training step."""
    y = model(x, mask)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), list(model.parameters()))]


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def main() -> None:
    sequences = [torch.randn(8, length).double() for length in (30, 7, 12, 3, 19, 1)]
    print("largest difference of outputs and gradients, padded to 30 and to 100:")
    for name, uses_mask in (("bn(x)", False), ("bn(x, mask=mask)", True)):
        torch.manual_seed(0)
        model = Block(uses_mask=uses_mask).double()
        short, long = (step(model, *padded(sequences, length)) for length in (30, 100))
        difference = largest_difference(short, long)
        print(f"  {name:<17} {difference:.0e}")
        assert (difference < 1e-12) == uses_mask

    replicas = step(DataParallel(model, ["cpu"] * 3), *padded(sequences, 50))
    difference = largest_difference(short, replicas)
    print(f"the same on three replicas, padded to 50: {difference:.0e}")
    assert difference < 1e-12


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
