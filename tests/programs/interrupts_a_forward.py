"""A Ctrl-C arrives while replicas are in the middle of operations of torch."""

import _thread
import sys
import threading

import torch
from torch import nn

from replication import DataParallel

started = threading.Barrier(3)


class Busy(nn.Module):
    def forward(self, x):
        started.wait(20)
        for _ in range(10):
            x = torch.tanh(x @ x)
        return x


def interrupt():
    started.wait(20)
    _thread.interrupt_main()


threading.Thread(target=interrupt, daemon=True).start()
try:
    DataParallel(Busy(), ["cpu"] * 2)(torch.randn(2, 500, 500).repeat(1, 1, 1))
except KeyboardInterrupt:
    sys.exit(3)
