"""A layer that whitens: afterwards the features of the whole batch are uncorrelated, variance 1.

As batch norm needs a mean and a variance, this needs a mean and a covariance matrix. Two sums over
all copies are enough, and autograd does the rest.

    python examples/whiten.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from replication import DataParallel, ReplicaAware


class Whiten(ReplicaAware, nn.Module):
    """Whitens ``(n, D)`` by the covariance over all replicas, whose n may differ.

    With the covariance's Cholesky factor L, the output is inverse(L) (x - mean).
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        samples = self.group.all_reduce(torch.tensor(len(x), device=x.device))
        centered = x - self.group.all_reduce(x.sum(0)) / samples
        covariance = self.group.all_reduce(centered.T @ centered) / samples
        factor = torch.linalg.cholesky(covariance + self.eps * torch.eye(x.size(1)).to(x))
        return torch.linalg.solve_triangular(factor, centered.T, upper=False).T


def compare(replicas: int, samples: int) -> tuple[Tensor, float, float]:
    """The output on replicas; how far it, and the input gradient, are from those on one device."""
    torch.manual_seed(0)
    x = torch.randn(samples, 4, dtype=torch.float64) @ torch.randn(4, 4, dtype=torch.float64)
    upstream = torch.randn_like(x)
    outputs, grads = [], []
    for model in (Whiten(), DataParallel(Whiten(), ["cpu"] * replicas)):
        inputs = x.clone().requires_grad_()
        outputs.append(model(inputs))
        outputs[-1].backward(upstream)
        grads.append(inputs.grad)
    y = outputs[1].detach()
    return y, (y - outputs[0]).abs().max().item(), (grads[1] - grads[0]).abs().max().item()


if __name__ == "__main__":
    output, *distances = compare(4, 50)
    print("covariance on 4 replicas:", output.T.cov(correction=0).round(decimals=3), sep="\n")
    print("off by {:.0e} in the output, {:.0e} in the gradients".format(*distances))
