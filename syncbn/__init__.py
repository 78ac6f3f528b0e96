"""Batch normalization over the whole batch of all replicas, with the results of one device."""

from replication import (
    DataParallel,
    DataParallelWithCallback,
    Difference,
    Verification,
    patch_replication_callback,
    verify,
    verify_ranks,
)
from replication import __version__ as __version__
from syncbn.batchnorm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
    set_sbn_eps_mode,
)
from syncbn.compat import patch_sync_batchnorm, stand_in_for
from syncbn.conversion import convert_model, revert_model
from syncbn.kinds import Summary, summary

__all__ = [
    "DataParallel",
    "DataParallelWithCallback",
    "Difference",
    "Summary",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "SynchronizedBatchNormNd",
    "Verification",
    "convert_model",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "revert_model",
    "set_sbn_eps_mode",
    "stand_in_for",
    "summary",
    "verify",
    "verify_ranks",
]
