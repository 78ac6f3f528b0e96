"""Misuses of public names. The comment of a line has the error of mypy and of pyright there."""

from __future__ import annotations

from torch import Tensor, nn

import syncbn
from replication import (
    DataParallel,
    DataParallelCriterion,
    Group,
    Scattered,
    data_parallel,
    gather,
    replicate,
    scatter,
)
from syncbn import SynchronizedBatchNorm2d, convert_model, set_sbn_eps_mode, summary, verify


def misuses(net: nn.Sequential, batch: Tensor, group: Group) -> None:
    DataParallel([net])  # type-var reportArgumentType
    DataParallel(net, device_ids=[0.5])  # list-item reportArgumentType
    DataParallel(net, device_ids=2)  # arg-type reportArgumentType
    DataParallel(net, gather=False)  # call-arg reportCallIssue
    DataParallel(net, [0], None, 0, True)  # call-arg reportCallIssue
    linear: nn.Linear = DataParallel(net).module  # assignment reportAssignmentType
    DataParallelCriterion("mean")  # arg-type reportArgumentType
    data_parallel(batch, net)  # arg-type reportArgumentType
    Scattered(2)  # arg-type reportArgumentType
    scatter(batch)  # call-arg reportCallIssue
    gather([batch], None)  # arg-type reportArgumentType
    replicate(net, "cpu", True, 2)  # call-arg reportCallIssue

    group.all_reduce(batch, op="average")  # arg-type reportArgumentType
    group.all_reduce(2.0)  # arg-type reportArgumentType
    group.all_gather(batch).sum()  # attr-defined reportAttributeAccessIssue
    group.broadcast(batch, src="0")  # arg-type reportArgumentType
    group.size()  # operator reportCallIssue

    linear = convert_model(net)  # assignment reportAssignmentType
    convert_model(net, "2")  # arg-type reportArgumentType
    convert_model(net, 2, None, True)  # call-arg reportCallIssue
    SynchronizedBatchNorm2d("8")  # arg-type reportArgumentType
    SynchronizedBatchNorm2d(8, sync=True)  # call-arg reportCallIssue
    set_sbn_eps_mode(1)  # arg-type reportArgumentType
    summary(net).paths("synchronised")  # arg-type reportArgumentType
    summary(batch)  # arg-type reportArgumentType
    verify(net, batch, dtype="float64")  # arg-type reportArgumentType
    verify(net, batch, ["cpu"], None)  # call-arg reportCallIssue
    print(syncbn.SyncBatchNorm)  # attr-defined reportAttributeAccessIssue
    linear.reset_parameters()
