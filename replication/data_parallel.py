"""`DataParallel`: one forward on several replicas, in four steps that subclasses may override."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from replication._torch import (
    check_balance,
    is_exporting,
    named_range,
    shared_by_replicas,
    uncompiled,
)
from replication.callbacks import CALLBACK, execute_replication_callbacks, with_callbacks
from replication.checks import check_list, check_module, checked_names, is_int
from replication.containers import Scattered
from replication.devices import DeviceLike, default_devices, parse_device, parse_devices
from replication.groups.registry import has_other_processes
from replication.modules import layers_of, with_class
from replication.steps.gather import gather, join_leaves
from replication.steps.parallel_apply import parallel_apply
from replication.steps.replicate import replicate
from replication.steps.scatter import scatter_kwargs
from replication.sync.lifecycle import first_failure_wins, this_thread
from replication.texts import first_of
from replication.warning import UnsynchronizedWarning, once_for, warn

__all__ = [
    "DataParallel",
    "DataParallelWithCallback",
    "ReplicationCallbackDataParallel",
    "data_parallel",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_RANGE = "DataParallel.forward"


class DataParallel(nn.DataParallel[ModuleT]):
    """Splits a batch between replicas of a module, runs them in parallel and joins their outputs.

    Unlike `torch.nn.DataParallel` it runs on any devices (accelerators, the CPU, or one device
    several times), connects the copies of a layer (see `ReplicaAware`), and raises the first error
    of a replica as it is, with notes that name the replica, its device and the module.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel
    >>> net = DataParallel(nn.Linear(3, 2), device_ids=["cpu", "cpu"])
    >>> net(torch.ones(5, 3)).shape
    torch.Size([5, 2])

    Args:
        module: The module. Its parameters and buffers must be on ``device_ids[0]``.
        device_ids: One device per replica: indices of accelerators, strings or `torch.device`.
            Devices may repeat. The default is all accelerators. On a machine without accelerators,
            the default and a list of indices run no replicas: the module is called directly,
            like in torch, with a warning if several replicas are expected.
        output_device: The device of the joined outputs, by default ``device_ids[0]``.
        dim: The batch dimension of inputs and outputs.
        gather_to_one_device: If False, outputs stay on the devices that computed them: each leaf
            of the output becomes a `Scattered`, even on a single device. ``None`` stays ``None``.
        inputs_are_scattered: If True, each argument is a list, tuple or `Scattered` with one entry
            per replica, of any type and length. Tensors in it move to the replica's device.
        except_keywords: Names of outputs that stay `Scattered` while all others are gathered: keys
            of mappings or fields, at any depth, with all that is under them. A name that the
            output does not have raises a warning.
        sort_and_gather: If True, all outputs, including `Scattered` ones, are in the order of the
            device indices, so with ``device_ids=[1, 0]`` labels must be reordered as well.
        cpu_keywords: Names of keyword arguments that are split like the batch but not moved.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``device_ids`` is empty, or a device is missing. In a call: arguments cannot be
            split, or outputs not joined (see `scatter`, `gather`).
        RuntimeError: In a call: a parameter or buffer is not on ``device_ids[0]``, a lazy layer
            is not initialized, or torch transforms, exports or traces the call.
        BaseException: In a call: any error that a replica raises. If several fail, the first one
            (see `parallel_apply`).
    """

    # For a `torch.nn.DataParallel` that `syncbn.convert_model` makes one of this class.
    dim = 0
    gather_to_one_device = True
    inputs_are_scattered = False
    except_keywords: Collection[str] = ()
    sort_and_gather = False
    cpu_keywords: Collection[str] = ()

    def __init__(
        self,
        module: ModuleT,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        gather_to_one_device: bool = True,
        inputs_are_scattered: bool = False,
        except_keywords: Collection[str] = (),
        sort_and_gather: bool = False,
        cpu_keywords: Collection[str] = (),
    ) -> None:
        nn.Module.__init__(self)  # torch's constructor accepts accelerators only
        devices = _devices_to_use(module, device_ids)
        if not is_int(dim):
            raise TypeError(f"dim must be an int (got {dim!r})")
        self.module = module
        self.dim = dim
        self.gather_to_one_device = gather_to_one_device
        self.inputs_are_scattered = inputs_are_scattered
        self.except_keywords = checked_names("except_keywords", except_keywords)
        self.sort_and_gather = sort_and_gather
        self.cpu_keywords = checked_names("cpu_keywords", cpu_keywords)
        self.device_ids = [_torch_spelling(device) for device in devices]
        if not devices:
            return
        target = devices[0] if output_device is None else parse_device(output_device)
        self.src_device_obj = devices[0]
        self.output_device = _torch_spelling(target)
        if all(device.type == "cuda" for device in devices):
            check_balance(self.device_ids)
        if len(devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(self.device_ids) < 2:
            return self._alone(inputs, kwargs)
        if is_exporting():  # it would miss what the threads of the replicas do
            raise RuntimeError("replicas cannot be exported or traced; export model.module")
        return self._on_replicas(inputs, kwargs)

    def _alone(self, inputs: Any, kwargs: Any) -> Any:
        with named_range(_RANGE):
            inputs, kwargs_tup = self._split_arguments(inputs, kwargs)
            output = self.module(*inputs[0], **kwargs_tup[0])
        if self.gather_to_one_device and not self.except_keywords:
            return output
        joins, names = self.gather_to_one_device, self.except_keywords
        return join_leaves([output], lambda path, entries: entries[0], joins, names)

    @uncompiled  # the compiler cannot follow threads
    def _on_replicas(self, inputs: Any, kwargs: Any) -> Any:
        with named_range(_RANGE):
            # 1. Split the arguments between the replicas that have data.
            inputs, kwargs_tup = self._split_arguments(inputs, kwargs)
            count = len(inputs)
            if count > 1:
                _warn_of_plain_batch_norm(self)
                _warn_inside_a_replica(self)
            # 2. Make the replicas, and connect the copies of each layer.
            replicas = self.replicate(self.module, self.device_ids[:count])
            # 3. Run each replica in its thread.
            outputs = first_failure_wins(self.parallel_apply, replicas, inputs, kwargs_tup)
            # 4. Join the outputs.
            return self.gather(outputs, self.output_device)

    def _split_arguments(self, inputs: Any, kwargs: Any) -> Any:
        if not self.device_ids:  # the method of a subclass may not expect that
            return DataParallel.scatter(self, inputs, kwargs, None)
        _check_placement(self.module, self.src_device_obj)
        inputs, kwargs_tup = self.scatter(inputs, kwargs, self.device_ids)
        if not inputs and not kwargs_tup:  # torch's scatter returns this for no arguments
            return ((),), ({},)
        return inputs, kwargs_tup

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any
    ) -> Any:
        """Splits the arguments into one part for each replica that has data."""
        return scatter_kwargs(
            inputs,
            kwargs,
            device_ids,
            self.dim,
            inputs_are_scattered=self.inputs_are_scattered,
            cpu_keywords=self.cpu_keywords,
        )

    @with_callbacks
    def replicate(self, module: ModuleT, device_ids: Sequence[DeviceLike]) -> list[ModuleT]:
        """Makes the replicas and runs their callbacks."""
        replicas = replicate(module, device_ids, detach=not torch.is_grad_enabled())
        execute_replication_callbacks(replicas, device_ids)
        return replicas

    def parallel_apply(self, replicas: Sequence[ModuleT], inputs: Any, kwargs: Any) -> list[Any]:
        """Calls each replica with its part of the arguments."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the outputs, except for those that stay `Scattered`."""
        if self.sort_and_gather:
            devices = parse_devices(self.device_ids[: len(outputs)])
            keys = [(device.type, device.index or 0) for device in devices]
            outputs = [outputs[i] for i in sorted(range(len(keys)), key=keys.__getitem__)]
        return gather(
            outputs,
            output_device,
            self.dim,
            gather_to_one_device=self.gather_to_one_device,
            except_keywords=self.except_keywords,
        )


#: Names of `DataParallel` in older toolkits.
DataParallelWithCallback = DataParallel
ReplicationCallbackDataParallel = DataParallel


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    **policies: Any,
) -> Any:
    """Evaluates ``module(*inputs, **module_kwargs)`` on several replicas, like `DataParallel`.

    Unlike the class, this function never moves the module to ``device_ids[0]``.

    >>> import torch
    >>> from torch import nn
    >>> from replication import data_parallel
    >>> data_parallel(nn.Linear(3, 2), torch.ones(5, 3), ["cpu"] * 2).shape
    torch.Size([5, 2])

    Args:
        inputs: A tuple of positional arguments, or a single one. ``None`` means none.
        policies: The keyword-only arguments of `DataParallel`. See there for the other arguments
            and for the errors.
    """
    if not isinstance(inputs, tuple) or isinstance(inputs, Scattered):
        inputs = () if inputs is None else (inputs,)
    devices = _devices_to_use(module, device_ids)
    if len(devices) == 1:  # the class would move the module
        _check_placement(module, devices[0])
    # If there is no accelerator, [0] calls the module directly, and None would warn again.
    model = DataParallel(module, devices or [0], output_device, dim, **policies)
    return model(*inputs, **(module_kwargs or {}))


def _check_placement(module: nn.Module, first_device: torch.device) -> None:
    for path, layer in layers_of(module):
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None and tensor.device != first_device:
                where = f"{path}.{name}" if path else name
                raise RuntimeError(  # begins like torch's error, which programs may look for
                    f"module must have its parameters and buffers on device {first_device} "
                    f"(device_ids[0]) but found one of them on device: {tensor.device} "
                    f"(`{where}`); call module.to({str(first_device)!r})"
                )


#: Captured on import, because programs may replace these names.
TORCH_BATCH_NORM = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
_SyncBatchNorm = nn.SyncBatchNorm


def _warn_of_plain_batch_norm(model: DataParallel[Any]) -> None:
    paths = [
        with_class(path, layer)
        for path, layer in layers_of(model.module)
        if layer.training
        and (type(layer) in TORCH_BATCH_NORM or isinstance(layer, _SyncBatchNorm))
        and not hasattr(type(layer), CALLBACK)
    ]
    if paths and once_for(model):
        warn(
            f"each replica normalizes over its own part of the batch in {first_of(paths)}; call "
            "syncbn.convert_model(model), or filter replication.UnsynchronizedWarning",
            UnsynchronizedWarning,
        )


def _warn_inside_a_replica(model: DataParallel[Any]) -> None:
    outer = this_thread.current
    if (
        outer is not None
        and outer.rendezvous.size > 1
        and any(m.training and hasattr(type(m), CALLBACK) for _, m in layers_of(model.module))
        # One answer for all replicas of this DataParallel, in all forwards.
        and once_for(shared_by_replicas(model))
    ):
        warn(
            f"a DataParallel runs {type(model.module).__name__} inside a replica of another one, "
            "so each replica synchronizes its layers apart from the others; use a single "
            "DataParallel, around everything",
            UnsynchronizedWarning,
        )


def _devices_to_use(
    module: nn.Module, device_ids: Sequence[DeviceLike] | None
) -> list[torch.device]:
    """The devices of the replicas; none if the module is called directly."""
    check_module(module)
    if device_ids is None:
        if devices := default_devices():
            return devices
        communicates = any(hasattr(type(layer), CALLBACK) for _, layer in layers_of(module))
        # Only the first in a program warns: one for any machine may not need replicas.
        if communicates and not has_other_processes() and once_for(DataParallel):
            _warn_of_no_replicas("no GPU or other accelerator found", 4)
        return []
    check_list("device_ids", device_ids)
    if not len(device_ids):
        raise ValueError("device_ids must name a device, such as ['cpu'] * n (got none)")
    indices = [device for device in device_ids if is_int(device) and device >= 0]
    if len(indices) < len(device_ids) or default_devices():
        return parse_devices(device_ids)
    if len(indices) > 1:
        why = f"device_ids={indices} are indices of accelerators, and none was found"
        _warn_of_no_replicas(why, len(indices))
    return []


def _warn_of_no_replicas(why: str, count: int) -> None:
    warn(
        f"{why}, so the model runs once, without replicas. To use CPU replicas, for example for "
        f"testing, pass device_ids=['cpu'] * {count}",
        UnsynchronizedWarning,
    )


def _torch_spelling(device: torch.device) -> Any:
    """A device as torch's class stores it: an accelerator by its index."""
    return device.index if device in default_devices() else device
