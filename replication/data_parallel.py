"""`DataParallel`: one forward on several replicas, in four steps that subclasses may override."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import nn

from replication._torch import check_balance, uncompiled
from replication.callbacks import execute_replication_callbacks
from replication.devices import (
    DeviceLike,
    accelerator,
    check_available,
    check_module,
    checked_names,
    default_devices,
    device_order,
    is_int,
    parse_device,
    usable_devices,
)
from replication.patch import RUNS_CALLBACKS
from replication.steps.gather import gather, join_leaves
from replication.steps.parallel_apply import parallel_apply
from replication.steps.replicate import replicate
from replication.steps.scatter import scatter_kwargs
from replication.sync.lifecycle import first_failure_wins, limit_time
from replication.tree import Scattered
from replication.warning import UnsynchronizedWarning, warn, warn_of_plain_batch_norm

__all__ = [
    "DataParallel",
    "DataParallelWithCallback",
    "ReplicationCallbackDataParallel",
    "data_parallel",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Of a forward, in profiles.
_RANGE = "DataParallel.forward"


class DataParallel(nn.DataParallel[ModuleT]):
    """Splits a batch between replicas of a module, runs them side by side, joins their outputs.

    In addition to what `torch.nn.DataParallel` does:

    * it runs on any devices: accelerators, the CPU, or one device several times;
    * after replication, ``__data_parallel_replicate__(ctx, copy_id)`` is called on every layer
      that has it (see `execute_replication_callbacks`), so that copies of a layer can talk;
    * a replica that fails or ends never leaves the others waiting, and its error arrives as it
      was raised, with notes that name the replica, its device and the module;
    * what is `Scattered` among the arguments is not split again: entry i goes to replica i, and
      tensors beside it are split by its sizes (see `scatter`).

    >>> net = DataParallel(nn.Linear(3, 2), device_ids=["cpu", "cpu"])
    >>> net(torch.ones(5, 3)).shape
    torch.Size([5, 2])

    Args:
        module: The module. Its parameters and buffers are on ``device_ids[0]``.
        device_ids: One device per replica: indices of accelerators, strings, or `torch.device`;
            may repeat. By default all accelerators. Without an accelerator, by default or where
            indices are given, the module is called directly, as torch does. Several indices then
            come with a warning.
        output_device: Where outputs are joined; by default ``device_ids[0]``. May be the CPU.
        dim: The batch dimension of inputs and outputs.
        gather_to_one_device: If false, outputs stay where they were computed: each leaf of the
            output becomes a `Scattered`, also on a single device. ``None`` stays ``None``.

            >>> extract = DataParallel(
            ...     nn.Linear(3, 2), ["cpu"] * 2, gather_to_one_device=False
            ... )
            >>> [tuple(part.shape) for part in extract(torch.ones(5, 3))]
            [(3, 2), (2, 2)]
            >>> classify = DataParallel(nn.Linear(2, 1), ["cpu"] * 2)
            >>> classify(extract(torch.ones(5, 3))).shape
            torch.Size([5, 1])

        inputs_are_scattered: If true, each argument is a list, tuple or `Scattered` of one entry
            per replica, which is moved to its replica's device, whatever it is. Parts may differ
            in length.

            >>> net = DataParallel(nn.Linear(3, 2), ["cpu"] * 2, inputs_are_scattered=True)
            >>> net([torch.ones(4, 3), torch.ones(1, 3)]).shape
            torch.Size([5, 2])

        except_keywords: Names of outputs that stay `Scattered` while all others are gathered: keys
            of mappings (or names of fields) at any depth, or dotted paths that begin at the
            output. A name that the output does not have is warned of.

            >>> class Features(nn.Module):
            ...     def forward(self, x):
            ...         return {"features": x + 1, "score": x.sum(1)}
            >>> net = DataParallel(Features(), ["cpu"] * 2, except_keywords=["features"])
            >>> {name: type(value).__name__ for name, value in net(torch.ones(5, 3)).items()}
            {'features': 'Scattered', 'score': 'Tensor'}

        sort_and_gather: If true, outputs are put in the order of their devices' indices before
            they are gathered; what is on the same device keeps its order. All leaves alike, those
            that stay `Scattered` too. One needs it only if ``device_ids`` do not ascend and the
            outputs have to line up with something in the order of the devices; with ``[1, 0]``
            the second half of the batch comes first, and labels must be put in that order, too.

            >>> net = DataParallel(nn.Linear(3, 2), ["cpu"] * 2, sort_and_gather=True)
            >>> net(torch.ones(5, 3)).shape
            torch.Size([5, 2])

        cpu_keywords: Names of keyword arguments that are split like the others but not moved.
            One that is not as long as the batch is split as evenly as can be. A name that is no
            argument of the module, or is passed by position, is warned of.

            >>> class Crops(nn.Module):
            ...     def forward(self, x, boxes):
            ...         return x.sum(1) + len(boxes)
            >>> net = DataParallel(Crops(), ["cpu"] * 2, cpu_keywords=["boxes"])
            >>> net(torch.ones(4, 3), boxes=torch.zeros(7, 4))
            tensor([7., 7., 6., 6.])

        timeout: Seconds that the replicas may take for a forward, wherever they spend them: in
            computing, in waiting for each other, or in code that hangs. Then `ReplicasTimedOut`
            is raised, with a table of where each replica is, and replicas that still run are
            abandoned. A last resort, so allow for the slowest forward. By default there is no
            limit. A `parallel_apply` of your own is limited only where its replicas wait for each
            other.

    Raises:
        ValueError: ``device_ids`` is empty, or this machine has no such device; or ``timeout`` is
            not above 0.
        TypeError: ``module`` is no module, an item of ``device_ids`` is no device, ``dim`` is no
            int, names are not given as a list, or ``timeout`` is no number.

        And when it is called:

        ValueError: Arguments cannot be split, or outputs not be joined (see `scatter`, `gather`).
        RuntimeError: A parameter or buffer is not on ``device_ids[0]``, or it is in a transform of
            `torch.func`.
        BaseException: The first error of a replica. The other replicas are given 5 seconds to
            end and are abandoned then (see `parallel_apply`).
    """

    # On the class, too, for objects that become one of this class later.
    dim = 0
    gather_to_one_device = True
    inputs_are_scattered = False
    except_keywords: Collection[str] = ()
    sort_and_gather = False
    cpu_keywords: Collection[str] = ()
    timeout: float | None = None

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
        timeout: float | None = None,
    ) -> None:
        nn.Module.__init__(self)  # the constructor of torch's class knows accelerators only
        check_module(module)
        if not is_int(dim):
            raise TypeError(f"dim must be an int (got {dim!r})")
        self.module = module
        self.dim = dim
        self.gather_to_one_device = gather_to_one_device
        self.inputs_are_scattered = inputs_are_scattered
        self.except_keywords = checked_names("except_keywords", except_keywords)
        self.sort_and_gather = sort_and_gather
        self.cpu_keywords = checked_names("cpu_keywords", cpu_keywords)
        self.timeout = _seconds(timeout)
        devices = _devices_to_use(device_ids)
        self.device_ids = [_as_torch_spells(device) for device in devices]
        if not devices:
            return
        target = devices[0] if output_device is None else parse_device(output_device)
        check_available(target)
        self.src_device_obj = devices[0]
        self.output_device = _as_torch_spells(target)
        if all(device.type == "cuda" for device in devices):
            check_balance(self.device_ids)
        if len(devices) == 1:
            self.module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if len(self.device_ids) > 1:
            return self._on_replicas(inputs, kwargs)
        if not self.device_ids:
            return self._alone(*self._scatter(inputs, kwargs, None))
        with torch.autograd.profiler.record_function(_RANGE):
            return self._alone(*self._parts(inputs, kwargs))

    @uncompiled  # what runs in threads of its own is out of the compiler's sight
    def _on_replicas(self, inputs: Any, kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(_RANGE):
            inputs, kwargs_tup = self._parts(inputs, kwargs)
            if len(inputs) > 1:
                warn_of_plain_batch_norm(self, self.module)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            limit_time(replicas, self.timeout)
            outputs = first_failure_wins(self.parallel_apply, replicas, inputs, kwargs_tup)
            return self.gather(outputs, self.output_device)

    def _parts(self, inputs: Any, kwargs: Any) -> Any:
        _check_placement(self.module, self.src_device_obj)
        inputs, kwargs_tup = self.scatter(inputs, kwargs, self.device_ids)
        if not inputs and not kwargs_tup:  # torch's scatter, without any argument
            return ((),), ({},)
        return inputs, kwargs_tup

    def _alone(self, inputs: Any, kwargs: Any) -> Any:
        """On one device there is nothing to join: the output of the module, as it is."""
        output = self.module(*inputs[0], **kwargs[0])
        if self.gather_to_one_device and not self.except_keywords:
            return output
        return join_leaves([output], lambda leaf, entries: entries[0], **self._stay_scattered())

    def _stay_scattered(self) -> dict[str, Any]:
        return {
            "gather_to_one_device": self.gather_to_one_device,
            "except_keywords": self.except_keywords,
        }

    def _scatter(self, inputs: Any, kwargs: Any, devices: Any) -> Any:
        missing = [name for name in self.cpu_keywords if name not in kwargs]
        if missing:
            self._report_misplaced(missing, inputs)
        return scatter_kwargs(
            inputs,
            kwargs,
            devices,
            self.dim,
            inputs_are_scattered=self.inputs_are_scattered,
            cpu_keywords=self.cpu_keywords,
        )

    def _report_misplaced(self, names: list[str], inputs: tuple[Any, ...]) -> None:
        """Warns of names of keyword arguments that the module cannot mean."""
        parameters = inspect.signature(self.module.forward).parameters
        positional = list(parameters)[: len(inputs)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in names:
            if name in positional:
                why = "was passed by position, and is moved"
            elif name not in parameters and not takes_any:
                why = f"is no argument of the module, which has {list(parameters)}"
            else:
                continue  # left out in this call
            warn(f"cpu_keywords names {name!r}, which {why}")

    def replicate(self, module: ModuleT, device_ids: Sequence[DeviceLike]) -> list[ModuleT]:
        """Makes the replicas and runs their callbacks."""
        replicas = replicate(module, device_ids, detach=not torch.is_grad_enabled())
        execute_replication_callbacks(replicas, device_ids)
        return replicas

    # What `patch_replication_callback` adds, this method has, unless a derived class replaces it.
    setattr(replicate, RUNS_CALLBACKS, True)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any
    ) -> Any:
        """Splits the arguments; as many parts as replicas that have data."""
        return self._scatter(inputs, kwargs, device_ids)

    def parallel_apply(self, replicas: Sequence[ModuleT], inputs: Any, kwargs: Any) -> list[Any]:
        """Calls each replica with its part."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the outputs, but for what is to stay `Scattered`."""
        if self.sort_and_gather:
            order = device_order(self.device_ids[: len(outputs)])
            outputs = [outputs[replica] for replica in order]
        return gather(outputs, output_device, self.dim, **self._stay_scattered())


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
    **policies: Any,
) -> Any:
    """Evaluates ``module(*inputs, **module_kwargs)`` on several replicas, as `DataParallel` does.

    Args:
        module: The module; its parameters and buffers are on ``device_ids[0]``.
        inputs: A tuple of positional arguments, or a single one; ``None`` for none.
        device_ids: See `DataParallel`.
        output_device: See `DataParallel`.
        dim: See `DataParallel`.
        module_kwargs: Keyword arguments.
        policies: The keyword-only arguments of `DataParallel`.

    Returns:
        What the `DataParallel` returns.

    Raises:
        ValueError: As `DataParallel`.
        TypeError: As `DataParallel`.
        RuntimeError: As `DataParallel`; also on a single device, if the module is not there: it is
            not moved.
    """
    if not isinstance(inputs, tuple) or isinstance(inputs, Scattered):
        inputs = () if inputs is None else (inputs,)
    check_module(module)
    devices = _devices_to_use(device_ids)
    if len(devices) == 1:  # to which the class would move it
        _check_placement(module, devices[0])
    model = DataParallel(module, devices or None, output_device, dim, **policies)
    return model(*inputs, **(module_kwargs or {}))


def _check_placement(module: nn.Module, home: torch.device) -> None:
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            if tensor.device != home:
                raise RuntimeError(  # torch's own words, which programs may look for
                    f"module must have its parameters and buffers on device {home} "
                    f"(device_ids[0]) but found one of them on device: {tensor.device}; it is "
                    f"`{name}`, and module.to({str(home)!r}) moves all"
                )


def _seconds(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds or None (got {timeout!r})")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 s (got {timeout})")
    return timeout


def _devices_to_use(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    if device_ids is None:
        return default_devices()
    if isinstance(device_ids, Iterable) and not isinstance(device_ids, str):
        device_ids = list(device_ids)
        if not device_ids:
            raise ValueError("device_ids must name at least one device (got none)")
        indices = [device for device in device_ids if is_int(device)]
        if any(index < 0 for index in indices):
            raise ValueError(f"device_ids must be indices of devices (got {device_ids})")
        if len(indices) == len(device_ids) and accelerator() is None:
            if len(indices) > 1:
                warn(
                    f"device_ids={device_ids} are indices of accelerators, and this machine has "
                    "none: the module is called directly, without replicas; "
                    f"device_ids=['cpu'] * {len(indices)} makes replicas on the CPU",
                    UnsynchronizedWarning,
                )
            return []
    return usable_devices(device_ids)


def _as_torch_spells(device: torch.device) -> Any:
    """This machine's accelerators by index, as the attributes of torch's class have them."""
    by_index = device.type == accelerator() and device.index is not None
    return device.index if by_index else device
