"""Signal handlers and finalizers run the model that they interrupt."""

import gc
import random
import signal

from tests.programs.connected import model, x


def run_another():
    outputs.append(model(x).tolist())


outputs, inside = [], 0


def handle(signum, frame):
    global inside
    if not inside:
        inside = 1
        run_another()
        inside = 0


class Last:
    def __init__(self):
        self.itself = self

    def __del__(self):
        run_another()


signal.signal(signal.SIGALRM, handle)
gc.set_threshold(200)
random.seed(0)
while len(outputs) < 300:
    signal.setitimer(signal.ITIMER_REAL, random.random() / 300)
    Last()
    run_another()
gc.collect()  # free-threaded builds collect less often
assert all(output == [[7.0]] * 6 for output in outputs)
print("done")
