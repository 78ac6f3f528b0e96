"""A finalizer runs a model while the interpreter ends."""

import torch

from replication import DataParallel


class Late:
    def __init__(self):
        self.itself = self

    def __del__(self):
        try:
            model(torch.ones(4, 3))
        except RuntimeError as error:
            print(error, flush=True)


model = DataParallel(torch.nn.Linear(3, 3), ["cpu"] * 2)
model(torch.ones(4, 3))
Late()
