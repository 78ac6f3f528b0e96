"""Runs replicas of a module side by side, and lets the copies of each layer communicate."""

from replication.callbacks import (
    exec_data_parallel_replication_callback,
    execute_replication_callbacks,
    patch_replication_callback,
)
from replication.containers import Scattered
from replication.criterion import DataParallelCriterion
from replication.data_parallel import (
    DataParallel,
    DataParallelWithCallback,
    ReplicationCallbackDataParallel,
    data_parallel,
)
from replication.errors import ReplicaFailed, ReplicasDiverged, ReplicationError
from replication.functional import global_mean
from replication.groups.base import Group, SoloGroup
from replication.groups.layer import ReplicaAware
from replication.groups.processes import ProcessGroup
from replication.groups.replicas import CallbackContext, ReplicaGroup
from replication.join import JoinableStep
from replication.pipes import FutureResult, SlavePipe, SyncMaster
from replication.steps.gather import gather
from replication.steps.parallel_apply import parallel_apply
from replication.steps.replicate import replicate
from replication.steps.scatter import scatter, scatter_kwargs
from replication.verify import Difference, Verification, verify, verify_ranks
from replication.version import __version__ as __version__
from replication.warning import UnsynchronizedWarning

__all__ = [
    "CallbackContext",
    "DataParallel",
    "DataParallelCriterion",
    "DataParallelWithCallback",
    "Difference",
    "FutureResult",
    "Group",
    "JoinableStep",
    "ProcessGroup",
    "ReplicaAware",
    "ReplicaFailed",
    "ReplicaGroup",
    "ReplicasDiverged",
    "ReplicationCallbackDataParallel",
    "ReplicationError",
    "Scattered",
    "SlavePipe",
    "SoloGroup",
    "SyncMaster",
    "UnsynchronizedWarning",
    "Verification",
    "data_parallel",
    "exec_data_parallel_replication_callback",
    "execute_replication_callbacks",
    "gather",
    "global_mean",
    "parallel_apply",
    "patch_replication_callback",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "verify",
    "verify_ranks",
]
