"""The main thread is interrupted twice while two replicas hang, and the interpreter ends."""

import signal
import threading

from torch import nn

from replication import parallel_apply


class Stuck(nn.Module):
    def forward(self):
        while True:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(0.05)


interrupts = []


def interrupt(signum, frame):
    interrupts.append(frame)
    if len(interrupts) == 2:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


signal.signal(signal.SIGINT, interrupt)
try:
    parallel_apply([Stuck(), Stuck()], [(), ()])
except KeyboardInterrupt:
    print("interrupted")
