"""The collectives of a process, and which modules they import."""

import sys
import weakref

import torch
from torch import distributed

from replication import ProcessGroup

distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
group, x = ProcessGroup(), torch.ones(2, requires_grad=True)
(group.all_reduce(x) + group.all_gather(x)[0] + group.reduce_scatter([x])).sum().backward()
world = weakref.ref(distributed.group.WORLD)
distributed.destroy_process_group()
print(world(), [name for name in ("torch._dynamo", "torch.distributed.nn") if name in sys.modules])
