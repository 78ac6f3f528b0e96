"""`JoinableStep`: training steps on ranks that have unequal numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from replication._torch import device_of_group
from replication.groups.processes import ProcessGroup

__all__ = ["JoinableStep"]

T = TypeVar("T")


class JoinableStep(Joinable, JoinHook, Generic[T]):
    """A training step for `torch.distributed.algorithms.Join`, for ranks that run out of data.

    While other ranks still have batches, a rank that has left its loop runs the step on an empty
    batch, so it takes part in every collective, and all ranks keep equal parameters::

        from torch.distributed.algorithms import Join

        empty = torch.empty(0, 3, 32, 32), torch.empty(0, dtype=torch.long)
        step = JoinableStep(train_one_batch, empty)
        with Join([step]):
            for images, labels in loader:
                step(images, labels)

    Do not pass the DistributedDataParallel to ``Join`` as well, because the step already runs it.
    Gradients are divided by the number of all ranks. They equal the gradients of one device if the
    loss of a rank is ``loss_sum * world_size / samples_on_all_ranks``, which `global_mean`
    computes. Outside ``Join``, or in one process, it only calls the step:

    >>> import torch
    >>> from replication import JoinableStep
    >>> step = JoinableStep(lambda x: x.sum(), empty=(torch.empty(0, 3),))
    >>> step(torch.ones(2, 3))
    tensor(6.)

    Args:
        step: Trains on one batch: forward, backward, and the optimizer's step. All layers with
            statistics over a batch must be synchronized.
        empty: A tuple of the arguments of the step for an empty batch, such as tensors of shape
            ``(0, 3, 32, 32)`` and ``(0,)``. The step must call the same layers with it.
        process_group: The ranks that train together, by default all.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: This process is not in ``process_group``.
        RuntimeError: In ``Join``, `torch.distributed` is not initialized.
    """

    def __init__(
        self, step: Callable[..., T], empty: Sequence[Any], process_group: Any = None
    ) -> None:
        super().__init__()
        if not callable(step) or not isinstance(empty, (tuple, list)):
            raise TypeError(
                "step must be a function, and empty a tuple of its arguments for a batch without "
                f"samples (got {type(step).__name__} and {type(empty).__name__})"
            )
        self._step = step
        self._empty = empty
        self._process_group = process_group
        if process_group is not None:
            _ = self.join_process_group  # raises

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        if (notification := Join.notify_join_context(self)) is not None:
            notification.wait()
        return self._step(*args, **kwargs)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    def main_hook(self) -> None:
        """Runs the step on the empty batch. `Join` calls this while other ranks have data."""
        self._step(*self._empty)

    @property
    def join_device(self) -> torch.device:
        """The device on which the ranks count who has data."""
        return device_of_group(self.join_process_group)

    @property
    def join_process_group(self) -> Any:
        """The ranks that train together."""
        return ProcessGroup(self._process_group, type(self).__name__).process_group
