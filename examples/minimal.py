"""Trains a network with BatchNorm on two CPU replicas: ``python examples/minimal.py``."""

import torch
from torch import nn

from syncbn import DataParallel, convert_model

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
model = DataParallel(convert_model(net), device_ids=["cpu", "cpu"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

points = torch.randn(64, 2)
inside = (points.norm(dim=1) < 1).long()  # which points are inside the unit circle?

losses = []
for step in range(31):
    loss = nn.functional.cross_entropy(model(points), inside)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step:>2}: loss {losses[-1]:.3f}")
assert losses[-1] < losses[0] / 2, "the loss should fall"
