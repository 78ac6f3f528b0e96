"""Uses of every public name that type checkers must accept, each with the type that they infer."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh

import replication
import syncbn
from replication import (
    CallbackContext,
    DataParallel,
    DataParallelCriterion,
    DataParallelWithCallback,
    FutureResult,
    Group,
    JoinableStep,
    ProcessGroup,
    ReplicaAware,
    ReplicaFailed,
    ReplicaGroup,
    ReplicasDiverged,
    ReplicationCallbackDataParallel,
    ReplicationError,
    Scattered,
    SlavePipe,
    SoloGroup,
    SyncMaster,
    UnsynchronizedWarning,
    data_parallel,
    exec_data_parallel_replication_callback,
    execute_replication_callbacks,
    functional,
    gather,
    global_mean,
    parallel_apply,
    patch_replication_callback,
    replicate,
    scatter,
    scatter_kwargs,
)
from syncbn import (
    Difference,
    Summary,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
    Verification,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
    set_sbn_eps_mode,
    stand_in_for,
    summary,
    verify,
    verify_ranks,
)


class Center(ReplicaAware, nn.Module):
    """Subtracts the mean of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        assert_type(group, Group)
        assert_type(group.split(2), Group)
        assert_type(group.all_gather(x), tuple[Tensor, ...])
        assert_type(group.all_gather_object(len(x)), tuple[int, ...])
        assert_type(group.reduce_scatter([x, x], op="max"), Tensor)
        assert_type(group.broadcast(x, src=0), Tensor)
        group.barrier()
        return x - group.all_reduce(x.mean(0), op="mean")


class Older(nn.Module):
    """Has the replication callback of the older toolkits."""

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.master = SyncMaster(self.answered)
        assert_type(self.master.register_slave(copy_id), SlavePipe)

    def answered(self, messages: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        return messages


def converts(net: nn.Sequential) -> None:
    assert_type(convert_model(net, report=True), nn.Sequential)
    assert_type(convert_model(net, 2), nn.Sequential)
    classes = {nn.BatchNorm2d: SynchronizedBatchNorm2d}
    assert_type(convert_model(net, classes=classes), nn.Sequential)
    assert_type(revert_model(net), nn.Sequential)
    stand_in_for("sync_batchnorm")
    set_sbn_eps_mode("clamp")
    with patch_sync_batchnorm():
        pass
    layer = SynchronizedBatchNorm2d(8, momentum=None, group_size=2, device="cpu")
    normalized: list[nn.modules.batchnorm._BatchNorm] = [
        SynchronizedBatchNorm1d(8),
        layer,
        SynchronizedBatchNorm3d(8, affine=False),
        SynchronizedBatchNormNd(8),
    ]
    x = torch.ones(2, 8, 4, 4)
    normalized_in_part: Tensor = layer(x, mask=x[:, 0] > 0)
    assert_type(layer.forward(x, mask=None), Tensor)
    assert_type(layer.group, Group)
    assert len(normalized) == len(normalized_in_part) == 4


def checks(net: nn.Module, batch: Tensor) -> None:
    assert_type(summary(net), Summary)
    assert_type(summary(net).paths("plain"), list[str])
    result = verify(net, (batch, batch), ["cpu", 0, torch.device("cpu")], dtype=torch.float32)
    assert_type(result, Verification)
    assert_type(result.first_difference, Difference | None)
    assert_type(verify_ranks(lambda: {"model": net, "batch": batch}, 2).check(), Verification)


def trains(net: nn.Sequential, batch: Tensor) -> None:
    model = DataParallel(net, device_ids=["cpu"] * 4, output_device="cpu")
    assert_type(model, DataParallel[nn.Sequential])
    assert_type(model.module, nn.Sequential)
    assert_type(syncbn.DataParallel(net, [0, 1]), DataParallel[nn.Sequential])
    assert_type(DataParallelWithCallback(net), DataParallel[nn.Sequential])
    assert_type(ReplicationCallbackDataParallel(net), DataParallel[nn.Sequential])
    patch_replication_callback(nn.DataParallel(net))
    loss: Tensor = DataParallelCriterion(nn.CrossEntropyLoss())(model(batch), batch)
    loss.backward()
    output: Tensor = data_parallel(net, (batch,), ["cpu"] * 2)
    assert len(output) == len(batch)
    doubled = Scattered(2 * part for part in (batch, batch))
    model(doubled)


def trains_on_uneven_data(layer: Center, batch: Tensor) -> None:
    step = JoinableStep(layer.forward, empty=(batch[:0],))
    with Join([step]):
        assert_type(step(batch), Tensor)


def writes_the_steps_itself(net: nn.Sequential, batch: Tensor) -> None:
    devices = ["cpu", "cpu"]
    parts = scatter(batch, devices, dim=0)
    inputs, kwargs = scatter_kwargs((batch,), {"scale": 2}, devices)
    replicas = replicate(net, devices)
    assert_type(replicas, list[nn.Sequential])
    outputs = parallel_apply(replicas, inputs, kwargs, devices)
    assert_type(outputs, list[Any])
    joined: Tensor = gather(outputs, "cpu", 0, except_keywords=["features"])
    assert len(joined) == len(parts)


def writes_callbacks(net: nn.Module) -> None:
    execute_replication_callbacks([net, net])
    exec_data_parallel_replication_callback([net, net])
    result = FutureResult()
    result.put(1)


def names_groups(replicas: ReplicaGroup, processes: ProcessGroup) -> list[Group]:
    return [replicas, processes, SoloGroup()]


def computes_losses(losses: Tensor, mask: Tensor, groups: list[Group], mesh: DeviceMesh) -> Tensor:
    assert_type(global_mean(losses), Tensor)
    assert_type(global_mean(losses, mask, count=8, averages=False, group=groups[0]), Tensor)
    assert_type(functional.all_gather(losses, mesh["dp"], same_shape=True), tuple[Tensor, ...])
    assert_type(functional.all_gather_object({"a": 1}), tuple[dict[str, int], ...])
    functional.broadcast(losses, 0)
    return functional.reduce_scatter([losses, mask]) + functional.all_reduce(losses, "max")


def catches(error: ReplicationError) -> str:
    kinds: tuple[type[ReplicationError], ...] = (ReplicasDiverged, ReplicaFailed)
    assert issubclass(UnsynchronizedWarning, Warning) and isinstance(error, kinds)
    return replication.__version__ + syncbn.__version__
