"""`DataParallel`: one forward on several replicas, in four steps that subclasses may override."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from replication.callback import execute_replication_callbacks
from replication.devices import (
    DeviceLike,
    accelerator,
    check_available,
    default_devices,
    parse_device,
    parse_devices,
)
from replication.parallel_apply import parallel_apply
from replication.replicate import replicate
from replication.scatter_gather import gather, scatter_kwargs
from replication.torch_internals import check_balance
from replication.watch import first_failure_wins

__all__ = [
    "DataParallel",
    "DataParallelWithCallback",
    "ReplicationCallbackDataParallel",
    "data_parallel",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class DataParallel(nn.DataParallel[ModuleT]):
    """Splits a batch between replicas of a module, runs them side by side, joins their outputs.

    In addition to what `torch.nn.DataParallel` does:

    * it runs on any devices: accelerators, the CPU, or one device several times;
    * after replication, ``__data_parallel_replicate__(ctx, copy_id)`` is called on every layer
      that has it (see `execute_replication_callbacks`), so that copies of a layer can talk;
    * a replica that fails or ends never leaves the others waiting, and its error arrives as it
      was raised, with notes that name the replica, its device and the module.

    >>> net = DataParallel(nn.Linear(3, 2), device_ids=["cpu", "cpu"])
    >>> net(torch.ones(5, 3)).shape
    torch.Size([5, 2])

    Args:
        module: The module. Its parameters and buffers are on ``device_ids[0]``.
        device_ids: One device per replica: indices of accelerators, strings, or `torch.device`;
            may repeat. By default all accelerators. Without an accelerator, by default or where
            indices are given, the module is called directly, as torch does.
        output_device: Where outputs are joined; by default ``device_ids[0]``. May be the CPU.
        dim: The batch dimension of inputs and outputs.

    Raises:
        ValueError: ``device_ids`` is empty, or this machine has no such device.
        TypeError: ``module`` is no module, or an item of ``device_ids`` is no device.
    """

    #: What `patch_replication_callback` adds, this class has.
    runs_replication_callbacks = True

    def __init__(
        self,
        module: ModuleT,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)  # the constructor of torch's class knows accelerators only
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module (got {type(module).__name__})")
        self.module = module
        self.dim = dim
        devices = _devices_to_use(device_ids)
        self.device_ids = [_as_torch_spells(device) for device in devices]
        if not devices:
            return
        target = devices[0] if output_device is None else parse_device(output_device)
        for device in (*devices, target):
            check_available(device)
        self.src_device_obj = devices[0]
        self.output_device = _as_torch_spells(target)
        if all(device.type == "cuda" for device in devices):
            check_balance(self.device_ids)
        if len(devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            self._check_placement()
            inputs, kwargs_tup = self.scatter(inputs, kwargs, self.device_ids)
            if not inputs and not kwargs_tup:  # torch's scatter, without any argument
                inputs, kwargs_tup = ((),), ({},)
            if len(self.device_ids) == 1:
                return self.module(*inputs[0], **kwargs_tup[0])
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            outputs = first_failure_wins(self.parallel_apply, replicas, inputs, kwargs_tup)
            return self.gather(outputs, self.output_device)

    def replicate(self, module: ModuleT, device_ids: Sequence[DeviceLike]) -> list[ModuleT]:
        """Makes the replicas and runs their callbacks."""
        replicas = replicate(module, device_ids, detach=not torch.is_grad_enabled())
        execute_replication_callbacks(replicas)
        return replicas

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any
    ) -> Any:
        """Splits the arguments; as many parts as replicas that have data."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def parallel_apply(self, replicas: Sequence[ModuleT], inputs: Any, kwargs: Any) -> list[Any]:
        """Calls each replica with its part."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the outputs."""
        return gather(outputs, output_device, self.dim)

    def _check_placement(self) -> None:
        for tensors in (self.module.parameters(), self.module.buffers()):
            for tensor in tensors:
                if tensor.device != self.src_device_obj:
                    raise RuntimeError(
                        "module must have its parameters and buffers on device "
                        f"{self.src_device_obj} (device_ids[0]) but found one of them on device: "
                        f"{tensor.device}"
                    )


#: The names under which older toolkits offer it.
DataParallelWithCallback = DataParallel
ReplicationCallbackDataParallel = DataParallel


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Evaluates ``module(*inputs, **module_kwargs)`` on several replicas, as `DataParallel` does.

    Args:
        module: The module; its parameters and buffers are on ``device_ids[0]``.
        inputs: A tuple of positional arguments, or a single one; ``None`` for none.
        device_ids: See `DataParallel`.
        output_device: See `DataParallel`.
        dim: See `DataParallel`.
        module_kwargs: Keyword arguments.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*inputs, **(module_kwargs or {}))


def _devices_to_use(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    if device_ids is None:
        return default_devices()
    if isinstance(device_ids, (list, tuple)) and not device_ids:
        raise ValueError("device_ids must name at least one device (got none)")
    only_indices = isinstance(device_ids, (list, tuple)) and {*map(type, device_ids)} == {int}
    if only_indices and any(index < 0 for index in device_ids):  # type: ignore[operator]
        raise ValueError(f"device_ids must be indices of devices (got {device_ids})")
    return [] if only_indices and accelerator() is None else parse_devices(device_ids)


def _as_torch_spells(device: torch.device) -> Any:
    """This machine's accelerators by index, as the attributes of torch's class have them."""
    by_index = device.type == accelerator() and device.index is not None
    return device.index if by_index else device
