"""The door for packages that build on `replication`: what they may import beside its public names.

`replication` exports what programs need. A package that defines layers of its own needs more, and
imports it from here, so that everything else can change its place and its name. `syncbn` does.
These names keep their meaning within a minor version, and the changelog has their changes.

For layers with their own autograd nodes, beside `ReplicaGroup.exchange` and the methods `gather`,
`add` and `sum` of `ProcessGroup`:

- what must match: `Signature`
- derivatives: `WithDerivative`, `apply_of`, `has_other_derivatives`, `lost_derivatives`
- hooks on saved tensors, and checkpoints: `Phase`, `phase`, `hidden_from_hooks`,
  `sees_saved_tensors`, `unseen_by_checkpoints`, `dispatch_modes`
- devices and streams: `current_stream`, `current_streams`, `use_streams`, `record_stream`,
  `is_capturing`, `to_device`, `has_kernels`
- compilers, processes and distributed tensors: `uncompiled`, `name_in_graph`, `is_dtensor`,
  `has_other_processes`, `as_process_group`

For tools that convert, describe or check networks: the other names, which are about the modules
of a network, the callbacks of its wrappers, processes, and messages.
"""

from __future__ import annotations

from replication._torch import (
    HOOKS,
    apply_of,
    destroy_group,
    dispatch_modes,
    has_kernels,
    has_other_derivatives,
    is_dtensor,
    sees_saved_tensors,
    uncompiled,
    unseen_by_checkpoints,
)
from replication.callbacks import CALLBACK, check_methods, runs_callbacks
from replication.checks import check_module, is_int
from replication.containers import open_builtin
from replication.devices import (
    current_stream,
    current_streams,
    default_devices,
    is_capturing,
    record_stream,
    to_device,
    use_streams,
)
from replication.errors import lost_derivatives
from replication.groups.base import Signature, WithDerivative
from replication.groups.registry import as_process_group, has_other_processes, name_in_graph
from replication.groups.replicas import hidden_from_hooks
from replication.modules import with_class
from replication.sync.lifecycle import Phase, phase
from replication.texts import first_of, path_or_root, table
from replication.tree import leaves_of
from replication.verify.ranks import in_ranks, join_launched
from replication.verify.supervision import end
from replication.warning import warn

__all__ = [
    "CALLBACK",
    "HOOKS",
    "Phase",
    "Signature",
    "WithDerivative",
    "apply_of",
    "as_process_group",
    "check_methods",
    "check_module",
    "current_stream",
    "current_streams",
    "default_devices",
    "destroy_group",
    "dispatch_modes",
    "end",
    "first_of",
    "has_kernels",
    "has_other_derivatives",
    "has_other_processes",
    "hidden_from_hooks",
    "in_ranks",
    "is_capturing",
    "is_dtensor",
    "is_int",
    "join_launched",
    "leaves_of",
    "lost_derivatives",
    "name_in_graph",
    "open_builtin",
    "path_or_root",
    "phase",
    "record_stream",
    "runs_callbacks",
    "sees_saved_tensors",
    "table",
    "to_device",
    "uncompiled",
    "unseen_by_checkpoints",
    "use_streams",
    "warn",
    "with_class",
]
