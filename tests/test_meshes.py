"""A `DeviceMesh` as process group, and what tensor parallelism puts before a layer."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from replication import ProcessGroup
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.kit.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

#: The batch of two ranks.
X = torch.arange(16.0).view(4, 4).cos()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def with_meshes(rank: int) -> dict[str, Tensor]:
    warnings.filterwarnings("ignore", "DTensor random operators")  # of torch 2.6
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    parallel = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    rows = X.split(2)[rank]
    found = {
        "layer": SynchronizedBatchNorm1d(4, process_group=mesh["dp"])(rows),
        "converted": convert_model(nn.BatchNorm1d(4), process_group=mesh["dp"])(rows),
        "of one": SynchronizedBatchNorm1d(4, process_group=mesh["tp"])(rows),
        "group": ProcessGroup(mesh["dp"]).all_reduce(rows),
    }
    with pytest.raises(ValueError, match=r"mesh \(got 2\).* mesh\['dp'\], or None"):
        SynchronizedBatchNorm1d(4, process_group=mesh)

    # Tensor parallelism: the ranks see the same batch, and each computes a part of the channels.
    for group in (None, parallel["dp"]):
        net = convert_model(network(), process_group=group)
        net = parallelize_module(net, parallel["tp"], {"0": ColwiseParallel()})
        with pytest.raises(ValueError, match=r"`1` .* ColwiseParallel .*output_layouts=Replicate"):
            net(X)
    net = convert_model(network(), process_group=parallel["dp"])
    whole = ColwiseParallel(output_layouts=Replicate())
    found["whole"] = parallelize_module(net, parallel["tp"], {"0": whole})(X)

    distributed = distribute_tensor(X, mesh["dp"], [Shard(0)])
    layer = convert_model(nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(TypeError, match=r"`0` .*got a DTensor.*to_local.*process_group=mesh"):
        layer(distributed)
    with pytest.raises(TypeError, match=r"all_reduce.*local tensors.*\(got DTensor .*to_local"):
        ProcessGroup().all_reduce(distributed)
    found["local"] = layer(distributed.to_local())
    return found


def test_meshes_are_groups_and_distributed_tensors_are_refused():
    results = run_ranks(2, with_meshes)
    torch.manual_seed(0)
    normalized, plain = nn.BatchNorm1d(4)(X), network()(X)
    for rank, found in enumerate(results):
        for name in ("layer", "converted", "local"):
            torch.testing.assert_close(found[name], normalized.split(2)[rank])
        torch.testing.assert_close(found["of one"], nn.BatchNorm1d(4)(X.split(2)[rank]))
        torch.testing.assert_close(found["group"], sum(X.split(2)))
        torch.testing.assert_close(found["whole"], plain)
