"""Replicas of a module side by side, whose layers can talk to their copies."""

from replication.callback import (
    exec_data_parallel_replication_callback,
    execute_replication_callbacks,
    patch_replication_callback,
    register_replication_callback,
)
from replication.context import CallbackContext
from replication.data_parallel import (
    DataParallel,
    DataParallelWithCallback,
    ReplicationCallbackDataParallel,
    data_parallel,
)
from replication.errors import ReplicaFailed, ReplicasDiverged, ReplicasTimedOut, ReplicationError
from replication.future import FutureResult
from replication.gather import gather
from replication.group import Group, SoloGroup
from replication.observation import WaitReport, wait_report
from replication.parallel_apply import parallel_apply
from replication.pipe import SlavePipe, SyncMaster
from replication.process_group import ProcessGroup
from replication.replica_aware import ReplicaAware
from replication.replica_group import ReplicaGroup
from replication.replicate import replicate
from replication.scatter import scatter, scatter_kwargs
from replication.tree import Scattered
from replication.warning import UnsynchronizedWarning

__all__ = [
    "CallbackContext",
    "DataParallel",
    "DataParallelWithCallback",
    "FutureResult",
    "Group",
    "ProcessGroup",
    "ReplicaAware",
    "ReplicaFailed",
    "ReplicaGroup",
    "ReplicasDiverged",
    "ReplicasTimedOut",
    "ReplicationCallbackDataParallel",
    "ReplicationError",
    "Scattered",
    "SlavePipe",
    "SoloGroup",
    "SyncMaster",
    "UnsynchronizedWarning",
    "WaitReport",
    "data_parallel",
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "gather",
    "parallel_apply",
    "patch_replication_callback",
    "register_replication_callback",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "wait_report",
]
