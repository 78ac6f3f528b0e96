"""Forks while another thread is at any place of a forward."""

import os
import signal
import threading
import warnings

import torch

from tests.programs.connected import model, x

warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about threads and fork
torch.set_num_threads(1)
over = threading.Event()


def train():
    while not over.is_set():
        model(x)


model(x)  # a fork while an operator of torch is called for the first time may hang the child
thread = threading.Thread(target=train, daemon=True)
thread.start()
for step in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        assert model(x).tolist() == [[7.0]] * 6
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, step
over.set()
thread.join()
print("done")
