"""The interpreter ends while an abandoned replica still runs."""

import sys
import time

from torch import nn

from replication import parallel_apply

sys.modules["replication.steps.parallel_apply"].SHUTDOWN_GRACE = 0.0


class Late(nn.Module):
    def forward(self, index):
        if index:
            raise ValueError
        time.sleep(0.3)  # longer than the caller waits
        print("ended", flush=True)


try:
    parallel_apply([Late(), Late()], [0, 1])
except ValueError:
    print("abandoned", flush=True)
