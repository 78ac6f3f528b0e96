"""What the pages and the packages say of torch's own steps and layers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import scatter_gather
from torch.testing._internal.distributed.fake_pg import FakeStore

import replication


def test_torchs_layer_refuses_the_cpu():
    """As the README says, once processes are connected."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            nn.SyncBatchNorm(3)(torch.randn(4, 3))
    finally:
        distributed.destroy_process_group()


STEPS = ("replicate", "scatter", "parallel_apply", "gather")


@pytest.mark.parametrize(
    ("ours", "of_torch"),
    [
        *[(getattr(replication, name), getattr(nn.parallel, name)) for name in STEPS],
        *[(getattr(replication.DataParallel, n), getattr(nn.DataParallel, n)) for n in STEPS],
        (replication.scatter_kwargs, scatter_gather.scatter_kwargs),
        (replication.data_parallel, nn.parallel.data_parallel),
        (replication.DataParallel, nn.DataParallel),
    ],
)
def test_arguments_have_the_names_and_the_order_of_torch(ours, of_torch):
    names = list(inspect.signature(of_torch).parameters)
    assert list(inspect.signature(ours).parameters)[: len(names)] == names
