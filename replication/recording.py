"""One training step of a copy of a model: what its layers compute, gradients, and buffers."""

from __future__ import annotations

import copy
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import string_at
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from replication._torch import compiled_module, is_dtensor, timeout_of
from replication.errors import ReplicationError, add_note, describe_error, listed
from replication.groups.processes import ProcessGroup
from replication.sync.lifecycle import current_replica, is_recomputation
from replication.tree import flatten, replace_leaves

#: The kinds of quantities, in the order in which they are computed. Where the output of a layer
#: differs, that of the model differs as well if it matters.
LAYERS, OUTPUTS, GRADIENTS, BUFFERS = "outputs of layers", "outputs", "gradients", "buffers"
KINDS = LAYERS, OUTPUTS, GRADIENTS, BUFFERS
_UPSTREAM = "upstream gradients"

#: A quantity in each replica or rank.
Parts = dict[int, Tensor]
#: Quantities by kind and name. The outputs of layers are in the order of calls.
Quantities = dict[str, dict[str, Parts]]
#: What a model is wrapped in before it runs.
Wrap = Callable[[nn.Module], Callable[..., Any]]


class Step(NamedTuple):
    """What a training step computes with.

    With a loss, backward begins with ``loss(outputs, targets)``, or ``loss(outputs)`` if there are
    no targets. Without one, it begins with random upstream gradients.
    """

    batch: Any
    dtype: torch.dtype
    loss: Callable[..., Tensor] | None = None
    targets: Any = None


class Recording:
    """What a training step of ``net`` computes, on the CPU.

    Args:
        on: Who runs it, for messages.
        index: The rank that runs it. In replicas, their indices take its place.
        divisor: By what a wrapper divides the gradients of parameters. Random upstream gradients
            are multiplied by it. Gradients of inputs, which no wrapper sees, are divided by it.
        upstream: The random upstream gradients of ranks, which one device joins.
    """

    @torch.inference_mode(False)  # computes gradients, whatever the mode of the caller
    def __init__(
        self,
        net: nn.Module,
        step: Step,
        device: torch.device,
        wrap: Wrap = lambda net: net,
        *,
        on: str,
        index: int = 0,
        divisor: int = 1,
        upstream: Quantities | None = None,
    ) -> None:
        self.quantities: Quantities = {kind: {} for kind in (*KINDS, _UPSTREAM)}
        #: The number of calls, by path and replica.
        self.calls: Counter[tuple[str, int]] = Counter()
        self._index, self._upstream = index, (upstream or self.quantities)[_UPSTREAM]
        random_numbers = _random_numbers(device)
        try:
            self._run(net, step, device, wrap, divisor)
        except BaseException as error:
            add_note(error, f"while verify ran a copy of the model, cast to {step.dtype}, on {on}")
            raise
        if not all(map(torch.equal, random_numbers, _random_numbers(device))):
            raise ValueError(
                "the model must not draw random numbers, which differ in each run (got one that "
                "does); call eval() on its dropout layers"
            )

    def _run(
        self, net: nn.Module, step: Step, device: torch.device, wrap: Wrap, divisor: int
    ) -> None:
        self._record_calls_of(net)
        runner = wrap(net)
        args, kwargs, inputs = _arguments(step.batch, device, step.dtype)
        result = runner(*args, **kwargs)
        outputs = _tensors(result)
        self._add(OUTPUTS, {f"`{key}`" if key else "the model": y for key, y in outputs.items()})
        # Before the backward: a recomputation updates the buffers of torch's layers once more.
        self._add(BUFFERS, {f"`{name}`": buffer for name, buffer in net.named_buffers()})
        if step.loss is None:
            trained = {key: y for key, y in outputs.items() if y.requires_grad}
            upstream = [divisor * self._upstream_of(key, y) for key, y in trained.items()]
            torch.autograd.backward(list(trained.values()), upstream)
        else:
            targets = replace_leaves(partial(_moved, device, step.dtype), step.targets)
            step.loss(*([result] if targets is None else [result, targets])).backward()
        gradients = {n: x.grad / divisor for n, x in inputs.items() if x.grad is not None}
        named = net.named_parameters()
        gradients |= {f"`{name}`": p.grad for name, p in named if p.grad is not None}
        self._add(GRADIENTS, gradients)

    def _add(self, kind: str, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.quantities[kind][f"{kind[:-1]} of {name}"] = {self._index: _plain(tensor)}

    def _upstream_of(self, key: str, output: Tensor) -> Tensor:
        if not output.dim():
            raise ValueError(
                "outputs must have a batch dimension (got a scalar, and each replica has its own);"
                " return one loss per sample (reduction='none'), or pass a function as loss"
            )
        whole = None
        if parts := list(self._upstream.get(key, {}).values()):
            # Outputs that depend on parameters alone are whole in each rank.
            is_repeated = all(part.shape == output.shape for part in parts)
            whole = torch.stack(parts).sum(0) if is_repeated else joined(parts, output.shape)
        if whole is None:
            generator = torch.Generator("cpu").manual_seed(self._index)
            whole = torch.randn(
                output.shape, generator=generator, dtype=output.dtype, device="cpu"
            )
        self.quantities[_UPSTREAM][key] = {self._index: whole}
        return whole.to(output.device)

    def _record_calls_of(self, net: nn.Module) -> None:
        layers = dict(net.named_modules())
        # A DataParallel inside the network has other replicas.
        inner = tuple(f"{path}." for path, m in layers.items() if isinstance(m, nn.DataParallel))
        for path, layer in layers.items():
            if not path.startswith(inner):
                # The class as it is before `fully_shard` derives one from it.
                kind = type(layer).__name__
                layer.register_forward_hook(partial(self._record_call, path, kind))

    def _record_call(self, path: str, kind: str, layer: nn.Module, args: Any, output: Any) -> None:
        if is_recomputation():
            return
        current = current_replica()
        replica = self._index if current is None else current.replica
        self.calls[path, replica] += 1
        later = f", call {number}" if (number := self.calls[path, replica]) > 1 else ""
        for key, tensor in _tensors(output).items() if path else ():  # `OUTPUTS` has the model's
            name = f"output `{key}`" if key else "output"
            parts = self.quantities[LAYERS].setdefault(f"{name} of `{path}` ({kind}{later})", {})
            parts[replica] = _plain(tensor)


def joined(parts: Sequence[Tensor], shape: torch.Size) -> Tensor | None:
    """Joins parts in the dimension, if there is one, in which they add up to a shape."""
    for dim in range(len(shape)):
        with suppress(RuntimeError, IndexError):  # the parts differ in another dimension
            whole = torch.cat(list(parts), dim)
            if whole.shape == shape:
                return whole
    return None


@torch.inference_mode(False)
def copied(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Copies a model without the wrappers of `torch.compile`, whose modules replicas run."""
    net = copy.deepcopy(model).to(device)
    for module in list(net.modules()):
        for name, child in module._modules.items():
            module._modules[name] = compiled_module(child)
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = _cast(tensor.data, dtype)
    return net


def _arguments(
    batch: Any, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
    """Returns arguments for a model, and the leaves among them, which get gradients."""
    is_named = isinstance(batch, Mapping)
    listed = batch if isinstance(batch, (tuple, list)) else (batch,)
    named = dict(batch) if is_named else {f"args[{i}]": value for i, value in enumerate(listed)}
    leaves, rebuild = flatten(named)
    inputs, values = {}, []
    for path, value in leaves:
        value = _moved(device, dtype, value)
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs[f"input `{path}`"] = value.requires_grad_()
            value = value.clone()  # a layer may change its input in place
        values.append(value)
    named = rebuild(values)
    return ((), named, inputs) if is_named else (tuple(named.values()), {}, inputs)


def _moved(device: torch.device, dtype: torch.dtype, value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return _cast(value.detach().to(device, copy=True), dtype) if is_tensor else value


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not has_fractions(tensor):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(tree: Any) -> dict[str, Tensor]:
    return {str(path): leaf for path, leaf in flatten(tree)[0] if isinstance(leaf, Tensor)}


def _plain(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU. All ranks must do so with one that `fully_shard` has split."""
    whole = getattr(tensor, "full_tensor", tensor.detach)()
    return whole.detach().to_dense().to("cpu", copy=True)


def _random_numbers(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators that layers use on a device."""
    of_device = getattr(torch.get_device_module(device), "get_rng_state", None)
    return [torch.get_rng_state(), *([of_device(device)] if of_device else [])]


# -- runs ----------------------------------------------------------------------------------------


def run_alone(
    model: nn.Module, step: Step, device: torch.device, upstream: Quantities | None = None
) -> Recording:
    net = ungrouped(copied(model, device, step.dtype))
    return Recording(net, step, device, on="one device", upstream=upstream)


def ungrouped(net: nn.Module, group: Any = None) -> nn.Module:
    """Lets layers use all processes instead of a process group, by default of any."""
    layer: Any
    for layer in net.modules():
        own = getattr(layer, "process_group", None)
        if own is not None and group in (None, own):
            layer.process_group = None
    return net


@contextmanager
def processes(group: Any) -> Iterator[None]:
    """Lets a group be all processes of `torch.distributed`. With None, it is not initialized."""
    if not distributed.is_available():
        yield
        return
    # Its functions keep what is the default group when they are defined, and DDP imports them.
    import_module("torch.distributed.nn")
    world = distributed.group.WORLD
    distributed.group.WORLD = group
    try:
        yield
    finally:
        distributed.group.WORLD = world


def run_rank(
    net: nn.Module, step: Step, device: torch.device, wrap: Wrap | None, times: list[float]
) -> Recording:
    # A rank that raises must wake those that wait for its next call, which its report of the error
    # must not meet. So copies run in a process group of their own, which ends with the run.
    own = distributed.new_group(timeout=timeout_of(distributed.group.WORLD))
    rank, size = own.rank(), own.size()
    options: Any = {} if wrap is None else {"wrap": wrap, "divisor": size}
    try:
        with processes(own):
            return Recording(net, step, device, on=f"rank {rank} of {size}", index=rank, **options)
    except Exception as error:
        times.append(time.time())
        # Frees a DistributedDataParallel, which may hang if its group ends before.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # torch remembers the groups of DTensors, such as the parameters of `fully_shard`, and uses
        # them again in later steps of the program.
        if not any(map(is_dtensor, net.parameters())):
            distributed.destroy_process_group(own)
        del own  # the last reference, with which connections close


# -- what ranks report ---------------------------------------------------------------------------


@contextmanager
def all_or_none(group: ProcessGroup) -> Iterator[list[float]]:
    """Raises on all ranks if a ``with`` block raises on one.

    It yields a list, to which the block may append the time of an error.
    """
    own: Exception | None = None
    times = list[float]()
    try:
        yield times
    except Exception as error:
        own = error
    text = "" if own is None else describe_error(own)
    every = group.all_gather_object((min(times, default=time.time()), text))
    failed = sorted((when, rank, text) for rank, (when, text) in enumerate(every) if text)
    # The first is the origin. Others may only say that their connections are closed.
    if own is not None and text == failed[0][2]:
        raise own
    if failed:
        what = "; ".join(f"rank {rank} raised {text}" for _, rank, text in failed)
        raise ReplicationError(f"verify ends on every rank, because {what}") from own


def digests_of(
    model: nn.Module, step: Step, wrap: Wrap | None, tolerance: float
) -> dict[str, str]:
    """Returns a digest of each thing that must be the same on all ranks."""
    tensors = (*model.named_parameters(), *model.named_buffers())  # rank 0's values will be taken
    layouts = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors]
    text = f"{model} {layouts} {[layer.training for layer in model.modules()]}"
    texts = {
        "model": re.sub(" at 0x[0-9a-f]+", "", text),  # without addresses
        "options": f"{step.dtype} {tolerance} {step.loss is None} {wrap is None}",
    }
    for path, leaf in flatten({"batch": step.batch, "targets": step.targets})[0]:
        texts[f"`{path}`"] = type(leaf).__name__
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous()
            data = string_at(values.data_ptr(), values.nbytes)  # NumPy may not be installed
            texts[f"`{path}`"] = f"{values.dtype} {values.shape} {sha256(data).hexdigest()}"
    return {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}


def check_equal(digests: Sequence[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for of_rank in digests for name in of_rank):
        of_name = [of_rank.get(name) for of_rank in digests]
        if others := [rank for rank, digest in enumerate(of_name) if digest != of_name[0]]:
            raise ValueError(
                f"every rank must pass the same {name} (got another on {listed(others, 'rank')} "
                "than on rank 0); verify splits the whole batch, and takes rank 0's parameters"
            )
