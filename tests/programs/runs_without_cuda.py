"""A training step with a torch that has no functions for CUDA."""

import torch

for name in ("_broadcast_coalesced", "_broadcast", "_scatter", "_gather", "_cuda_getDeviceCount"):
    if hasattr(torch._C, name):
        delattr(torch._C, name)


def refuse(*args):
    raise AssertionError("CUDA was asked for")


torch.cuda._lazy_init = torch.cuda.init = refuse
import replication  # noqa: E402
import syncbn  # noqa: E402

net = syncbn.convert_model(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
model = replication.DataParallel(net, ["cpu"] * 3)
y = model(torch.randn(8, 3))
y.backward(torch.randn_like(y))
print(net[1].num_batches_tracked.item())
