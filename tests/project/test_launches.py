"""torch's own layer, as the pages compare with it."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore


def test_torchs_layer_refuses_the_cpu():
    """As the README says, once processes are connected."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            nn.SyncBatchNorm(3)(torch.randn(4, 3))
    finally:
        distributed.destroy_process_group()
