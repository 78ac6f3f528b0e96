"""`ReplicaAware`: a mixin for layers that communicate with their copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from replication._torch import IS_REPLICA, shared_by_replicas
from replication.errors import ReplicationError
from replication.groups.base import Group, SoloGroup
from replication.groups.processes import process_group_of
from replication.groups.registry import ProcessGroupHandle, as_process_group, has_other_processes
from replication.groups.replicas import CallbackContext
from replication.sync.lifecycle import this_thread
from replication.warning import UnsynchronizedWarning, once_for, warn

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object

__all__ = ["ReplicaAware"]


class Connection(NamedTuple):
    """What connects a copy of a layer with the others in one forward."""

    group: Group
    #: The ``_parameters`` of the copy. A replica of that copy (in a DataParallel inside another)
    #: inherits the connection, which does not belong to it: it has other ``_parameters``.
    parameters: object
    #: Whether there were no other processes when the copy was connected. Asked once per forward,
    #: because it takes calls in Python.
    is_one_process: bool


class ReplicaAware(_Base):
    """A mixin in front of `torch.nn.Module`: ``self.group`` connects a layer in replicas or ranks.

    The same layer in every replica of a forward, or in every process of `torch.distributed`, is a
    member of the group. Read ``self.group`` in ``forward``, each time. Gradients are derivatives
    of the sum of what all members return (see `Group`), and `verify` checks a layer against one
    device.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel, ReplicaAware
    >>> class Center(ReplicaAware, nn.Module):
    ...     def forward(self, x):
    ...         count = self.group.all_reduce(torch.tensor(len(x), device=x.device))
    ...         return x - self.group.all_reduce(x.sum(0)) / count
    >>> x = torch.tensor([[1.0], [2.0], [6.0]])
    >>> DataParallel(Center(), ["cpu"] * 2)(x).tolist() == Center()(x).tolist()
    True

    Attributes:
        group_size: If not None, the copies are divided into parts of this size, and ``group`` is
            the layer's part (see `Group.split`).
        process_group: If not None, a group of `torch.distributed` to which ``group`` is limited.
            A `DeviceMesh` of one dimension stands for its group. Copies of the layer keep it.
            Pickling drops it with a warning.
    """

    group_size: int | None = None

    _process_group: ProcessGroupHandle | None = None

    #: The name of the layer in messages. By default it is the name of the class.
    _layer_name: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if nn.Module in order and order.index(nn.Module) < order.index(ReplicaAware):
            bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not ReplicaAware)
            raise TypeError(
                f"ReplicaAware must be in front: class {cls.__name__}(ReplicaAware, {bases})"
            )

    _connection: Connection | None = None

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        """Connects this copy with the others. Overrides must call it."""
        # The context of another toolkit has no group. If its DataParallel is patched, this method
        # is called again with a context of ours.
        if isinstance(ctx, CallbackContext):
            # By the class, because a copy may have overwritten `ctx.group`, and by the dictionary,
            # because setting an attribute is slow on a module.
            group = CallbackContext.group(ctx, copy_id)
            connection = Connection(group, self._parameters, not has_other_processes())
            vars(self)["_connection"] = connection

    @property
    def group(self) -> Group:
        """The group of the copies of this layer.

        It connects the replicas of this forward; outside replicas, and in a single one, the
        processes of `torch.distributed`, or nothing.

        Raises:
            ReplicationError: There are several replicas in each of several processes.
            ValueError: This process is not in ``process_group``, or ``group_size`` is less than 1.
            TypeError: ``group_size`` is not an int, or a submodule is named ``group``.
        """
        if "group" in self._modules:
            raise TypeError(
                f"ReplicaAware reserves the name `group`, but this {type(self).__name__} has a "
                "submodule of that name; rename the submodule"
            )
        connection = self._connection
        if connection is not None and connection.parameters is not self._parameters:
            connection = None  # it was inherited
        if connection is None:
            group = SoloGroup() if self._is_isolated() else self._group_of_processes()
        elif connection.group.size == 1:
            group = self._group_of_processes()
        else:
            group = connection.group
            if self._process_group is not None or not connection.is_one_process:
                self._check_is_one_process()
        return group if self.group_size is None else group.split(self.group_size)

    def _group_of_processes(self) -> Group:
        name = self._layer_name or type(self).__name__
        return process_group_of(self.process_group, name) or SoloGroup()

    def _check_is_one_process(self) -> None:
        """Raises if the group of this layer, which is in several replicas, has other processes."""
        if self._group_of_processes().size > 1:
            raise ReplicationError(
                f"`{self._layer_name or type(self).__name__}` must run either in several replicas "
                "or in several processes (got both); use one process per device, or, to "
                "synchronize only within this process, pass a process_group that contains just "
                "this rank"
            )

    @property
    def process_group(self) -> Any:
        """The group of `torch.distributed` to which `group` is limited, or None."""
        return self._process_group and self._process_group.process_group

    @process_group.setter
    def process_group(self, value: Any) -> None:
        group = as_process_group(value)
        self._process_group = None if group is None else ProcessGroupHandle(group)

    def _is_in_replica(self) -> bool:
        # By `getattr`: torch 2.6 cannot compile `vars` of a module.
        return getattr(self, IS_REPLICA, False) or this_thread.current is not None

    def _is_isolated(self) -> bool:
        """Whether a replica calls this layer without its copies. Warns if in a forward."""
        current = this_thread.current
        if IS_REPLICA in vars(self):  # `getattr` would search, and then make an error
            what = (
                "is not synchronized, because its replica is not connected to the others. Use "
                "replication.DataParallel, or derive the wrapper's class from "
                "torch.nn.DataParallel and call replication.patch_replication_callback(model). If "
                "the layer overrides __data_parallel_replicate__, call super's there"
            )
        elif current is None or current.rendezvous.size < 2:
            return False
        elif current.path:  # a callback runs, or a signal handler that has interrupted it
            return True
        else:
            what = (
                "is not synchronized, because the replica uses the original layer instead of its "
                "own copy. Usually the layer is stored in a plain Python list (use "
                "nn.ModuleList), or a function that __init__ makes refers to it (look it up in "
                "forward)"
            )
        # Once for the original and all its replicas, which come here at the same time.
        if once_for(shared_by_replicas(self)):
            path = f"`{self._layer_name}`: " if self._layer_name else ""
            warn(f"{path}{self!r} {what}", UnsynchronizedWarning)
        return True
