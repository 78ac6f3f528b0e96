"""The interpreter ends while a daemon thread makes one forward after the other."""

import threading

import torch
from torch import nn

from replication import DataParallel

model, has_run = DataParallel(nn.Linear(64, 64), ["cpu"] * 2), threading.Event()


def loop():
    with torch.no_grad():
        while True:
            model(torch.ones(64, 64))
            has_run.set()


threading.Thread(target=loop, daemon=True).start()
has_run.wait(20)
print("end")
