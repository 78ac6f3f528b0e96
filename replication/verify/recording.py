"""One training step of a copy of a model: what its layers compute, gradients, and buffers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from replication._torch import compiled_module, destroy_group, is_dtensor, timeout_of
from replication.errors import add_note
from replication.sync.lifecycle import Phase, phase, this_thread
from replication.tree import flatten, replace_leaves

#: The kinds of quantities, in the order in which they are computed. If the output of a layer
#: differs, the output of the model differs as well if it matters.
LAYERS, OUTPUTS, GRADIENTS, BUFFERS = "outputs of layers", "outputs", "gradients", "buffers"
#: Which layers draw random numbers. There is one if anything does.
DRAWS = "random numbers"
#: Not compared, because a rank's may be its share, its mean, or the loss of the whole batch.
LOSSES = "losses"


def of_term(name: str) -> str:
    """The kind of the gradients of one term of a loss."""
    return f"{GRADIENTS} of term `{name}`"


class Quantity(NamedTuple):
    """What a recorded tensor is."""

    kind: str
    #: Its name in results, such as "output of `norm` (BatchNorm1d)".
    where: str
    #: Whether it is a gradient of a parameter, to which all ranks contribute.
    of_parameter: bool = False


#: A quantity in each replica or rank.
Parts = dict[int, Tensor]
#: The outputs of layers are in the order of calls.
Quantities = dict[Quantity, Parts]
#: What a model is wrapped in before it runs.
Wrap = Callable[[nn.Module], Callable[..., Any]]
#: A function of outputs, and of targets if there are any. It returns a scalar, or named scalars.
Loss = Callable[..., Tensor | Mapping[str, Tensor]]
#: Makes the model and the loss again, if they depend on the number of ranks.
Make = Callable[[], tuple[nn.Module, Loss | None]]


class Step(NamedTuple):
    """What a training step computes with.

    With a loss, backward begins with ``loss(outputs, targets)``, or ``loss(outputs)`` if there are
    no targets. If that has named terms, backward begins with their sum, and another step with each
    of them. Without a loss, it begins with random upstream gradients.
    """

    batch: Any
    targets: Any
    loss: Loss | None
    dtype: torch.dtype
    device: torch.device
    wrap: Wrap | None
    #: The rank whose loss alone counts, if it is one.
    only: int | None = None


@torch.inference_mode(False)  # computes gradients, whatever the mode of the caller
def record(
    net: nn.Module,
    step: Step,
    on: str,
    *,
    rank: int = 0,
    divisor: int = 1,
    ranks: Quantities | None = None,
) -> Quantities:
    """Runs a training step of ``net``. Returns what it computes, on the CPU.

    Args:
        on: Who runs it, for messages.
        rank: The rank that runs it. In replicas, their indices take its place.
        divisor: By what a wrapper divides the gradients of parameters. Random upstream gradients
            are multiplied by it. Gradients of inputs, which no wrapper sees, are divided by it.
        ranks: What the ranks have computed, if one device gets the same upstream gradients.
    """
    state, drawing = _random_numbers(step.device), list[str]()
    again = copy.deepcopy(net) if step.loss else net  # as it is before it is wrapped and trained
    try:
        # One device and rank 0 draw the same numbers, and other ranks other ones: what all ranks
        # take from rank 0 is equal, and what each draws for itself is not.
        torch.manual_seed(rank)
        seeded = _random_numbers(step.device)
        quantities, terms = _train(net, step, rank, divisor, ranks or {}, drawing)
        if _differ(seeded, _random_numbers(step.device)):
            quantities[Quantity(DRAWS, drawing[0] if drawing else "a model or a loss")] = {}
        for term in terms:
            torch.manual_seed(rank)
            quantities |= _train(copy.deepcopy(again), step, rank, divisor, {}, drawing, term)[0]
    except Exception as error:
        add_note(error, f"while verify ran a copy of the model, cast to {step.dtype}, on {on}")
        raise
    finally:
        _set_random_numbers(step.device, state)
    return quantities


def _train(
    net: nn.Module,
    step: Step,
    rank: int,
    divisor: int,
    ranks: Quantities,
    drawing: list[str],
    term: str | None = None,
) -> tuple[Quantities, list[str]]:
    """Runs a step with the whole loss, or one of its terms. Returns the names of its terms."""
    quantities, terms = Quantities(), list[str]()

    def add(kind: str, where: str, tensor: Tensor, of_parameter: bool = False) -> None:
        quantities[Quantity(kind, where, of_parameter)] = {rank: plain(tensor)}

    loss = copied(step.loss, step) if isinstance(step.loss, nn.Module) else step.loss
    parts = {"": net} | ({"the loss's ": loss} if isinstance(loss, nn.Module) else {})
    if term is None:
        _record_layers(net, quantities, rank, drawing, step.device)
    runner = net if step.wrap is None else step.wrap(net)
    args, kwargs, inputs = _arguments(step)
    result = runner(*args, **kwargs)
    trained, upstream = [], []
    for path, y in _tensors(result).items() if term is None else ():
        where = f"output of `{path}`" if path else "output of the model"
        add(OUTPUTS, where, y)
        if step.loss is None and y.requires_grad:
            trained.append(y)
            upstream.append(divisor * _upstream_of(y, rank, ranks.get(Quantity(OUTPUTS, where))))
    if loss is not None:
        targets = replace_leaves(partial(_moved, step=step), step.targets)
        value: Any = loss(result) if targets is None else loss(result, targets)
        if isinstance(value, Mapping):
            terms, of_terms = [*value], value
            value = sum(of_terms.values(), torch.zeros((), device=step.device))
            if term is not None:
                # Each backward has the same parameters and collectives: DDP does not average a
                # gradient while it waits for another one of its bucket.
                value = of_terms[term] + 0.0 * value
        add(LOSSES, "loss" if term is None else f"term `{term}`", value)
        if step.only not in (None, rank):
            value = 0.0 * value
    # Before the backward: a recomputation updates the buffers of torch's layers once more.
    for owner, module in parts.items() if term is None else ():
        for name, buffer in module.named_buffers():
            add(BUFFERS, f"buffer of {owner}`{name}`", buffer)
    if loss is None:
        torch.autograd.backward(trained, upstream)
    else:
        value.backward()
    kind, by = (GRADIENTS, "") if term is None else (of_term(term), f" by term `{term}`")
    for path, x in inputs.items():
        if x.grad is not None:
            add(kind, f"gradient of input `{path}`{by}", x.grad / divisor)
    for owner, module in parts.items():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                where = f"gradient of {owner}`{name}`{by}"
                add(kind, where, parameter.grad, of_parameter=True)
    return quantities, terms


def _upstream_of(output: Tensor, rank: int, parts: Parts | None) -> Tensor:
    """Draws an upstream gradient. One device joins what the ranks have drawn for their parts."""
    if not output.dim():
        raise ValueError(
            "outputs must have a batch dimension (got a scalar, and each replica has its own); "
            "return one loss per sample (reduction='none'), or pass a function as loss"
        )
    drawn = {i: _drawn(part, seed=i) for i, part in (parts or {}).items()}
    whole = joined(drawn, output.shape) if drawn else None
    return (_drawn(output, seed=rank) if whole is None else whole).to(output.device)


def _drawn(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu")


def _record_layers(
    net: nn.Module, quantities: Quantities, rank: int, drawing: list[str], device: torch.device
) -> None:
    """Lets hooks record the outputs of each call of a layer, and which layers draw numbers."""
    calls: Counter[tuple[str, int]] = Counter()
    numbers = _random_numbers(device)

    def record_call(path: str, kind: str, layer: nn.Module, args: Any, output: Any) -> None:
        if phase() is not Phase.FORWARD:
            return
        if not drawing and _differ(numbers, _random_numbers(device)):
            drawing.append(f"`{path}` ({kind})")
        replica = this_thread.current
        index = rank if replica is None else replica.replica
        calls[path, index] += 1
        number = calls[path, index]
        call = f", call {number}" if number > 1 else ""
        for key, tensor in _tensors(output).items():
            name = f"output `{key}`" if key else "output"
            quantity = Quantity(LAYERS, f"{name} of `{path}` ({kind}{call})")
            quantities.setdefault(quantity, {})[index] = plain(tensor)

    layers = dict(net.named_modules())
    # A DataParallel inside the network has other replicas.
    inner = tuple(f"{path}." for path, m in layers.items() if isinstance(m, nn.DataParallel))
    for path, layer in layers.items():
        if path and not path.startswith(inner):  # the outputs of the network are recorded anyway
            # The class as it is before `fully_shard` derives one from it.
            layer.register_forward_hook(partial(record_call, path, type(layer).__name__))


def joined(parts: Parts, shape: torch.Size) -> Tensor | None:
    """Joins parts in the dimension, if there is one, in which they add up to a shape."""
    for dim in range(len(shape)):
        with suppress(RuntimeError, IndexError):  # the parts differ in another dimension
            whole = torch.cat([parts[index] for index in sorted(parts)], dim)
            if whole.shape == shape:
                return whole
    return None


@torch.inference_mode(False)
def copied(model: nn.Module, step: Step, group: Any = None) -> nn.Module:
    """Copies a model without the wrappers of `torch.compile`, whose modules replicas run.

    Layers of the process group ``group``, by default of any, use all processes instead.
    """
    net = copy.deepcopy(model).to(step.device)
    module: Any
    for module in list(net.modules()):
        for name, child in module._modules.items():
            module._modules[name] = compiled_module(child)
        own = getattr(module, "process_group", None)
        if own is not None and group in (None, own):
            module.process_group = None
    for tensor in (*net.parameters(), *net.buffers()):
        tensor.data = _moved(tensor.data, step)
    return net


def _arguments(step: Step) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
    """Returns arguments for a model, and the leaves among them, which get gradients."""
    batch = step.batch if isinstance(step.batch, (tuple, list, Mapping)) else [step.batch]
    is_named = isinstance(batch, Mapping)
    named = dict(batch) if is_named else {f"args[{i}]": value for i, value in enumerate(batch)}
    leaves, rebuild = flatten(named)
    inputs, values = {}, []
    for path, value in leaves:
        value = _moved(value, step)
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs[str(path)] = value.requires_grad_()
            value = value.clone()  # a layer may change its input in place
        values.append(value)
    named = rebuild(values)
    return ([], named, inputs) if is_named else ([*named.values()], {}, inputs)


def _moved(value: Any, step: Step) -> Any:
    """Copies a tensor to the device, in the dtype of the step. Returns other values."""
    if not isinstance(value, Tensor):
        return value
    dtype = step.dtype.to_complex() if value.is_complex() else step.dtype
    return value.detach().to(step.device, dtype if has_fractions(value) else None, copy=True)


def has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(tree: Any) -> dict[str, Tensor]:
    return {str(path): leaf for path, leaf in flatten(tree)[0] if isinstance(leaf, Tensor)}


def plain(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU. All ranks must do so with one that `fully_shard` has split."""
    whole: Any = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return whole.detach().to_dense().to("cpu", copy=True)  # type: ignore[no-any-return]


def _random_numbers(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators that layers use on a device."""
    of_device = getattr(torch.get_device_module(device), "get_rng_state", None)
    return [torch.get_rng_state(), *([of_device(device)] if of_device else [])]


def _set_random_numbers(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1])


def check_draws(*runs: Quantities) -> None:
    """Raises ValueError if a run has drawn random numbers."""
    if drawing := [key.where for run in runs for key in run if key.kind == DRAWS]:
        raise ValueError(
            f"the model must not draw random numbers, which differ in each run (got {drawing[0]} "
            "that does); call eval() on its dropout layers"
        )


def _differ(numbers: list[Tensor], others: list[Tensor]) -> bool:
    return not all(map(torch.equal, numbers, others))


# -- runs ----------------------------------------------------------------------------------------


def run_alone(
    model: nn.Module, step: Step, ranks: Quantities | None = None, make: Make | None = None
) -> Quantities:
    """Runs the whole batch alone: a copy of the model, or what a program of one process makes."""
    if make is not None:
        own, loss = make()
        for new, old in ((own, model), (loss, step.loss)):
            if isinstance(new, nn.Module) and isinstance(old, nn.Module):
                _take_tensors(new, old)
        model, step = own, step._replace(loss=loss)
    step = step._replace(wrap=None)
    return record(copied(model, step), step, "one device", ranks=ranks)


def _take_tensors(new: nn.Module, old: nn.Module) -> None:
    """Gives a module the values of another one, also of buffers that its state dict leaves out."""
    values = {**dict(old.named_parameters()), **dict(old.named_buffers())}
    for name, tensor in (*new.named_parameters(), *new.named_buffers()):
        tensor.data = values[name].detach().clone()


def run_rank(net: nn.Module, step: Step, closing: ExitStack) -> Quantities:
    """Runs the copy of a rank in a separate process group, which ends when ``closing`` does.

    If a rank raises, the end of that group wakes the ranks that wait in it, and the report of the
    error, in another group, can't be paired with one of their calls.
    """
    group = distributed.new_group(timeout=timeout_of(distributed.group.WORLD))
    closing.callback(_end, group, net)
    debug: Any = distributed  # types of these names are missing
    level = debug.get_debug_level()
    if level == debug.DebugLevel.OFF:
        # The ranks compare each call, so that one that only some of them make is named at once.
        debug.set_debug_level(debug.DebugLevel.INFO)
        closing.callback(debug.set_debug_level, level)
    rank, size = group.rank(), group.size()
    divisor = 1 if step.wrap is None else size
    with as_world(group):
        return record(net, step, f"rank {rank} of {size}", rank=rank, divisor=divisor)


def _end(group: Any, net: nn.Module) -> None:
    # torch remembers the groups of DTensors, such as the parameters of `fully_shard`, and uses
    # them again in later steps of the program.
    if not any(map(is_dtensor, net.parameters())):
        destroy_group(group)


@contextmanager
def as_world(group: Any) -> Iterator[None]:
    """Makes ``group`` the default process group in a ``with`` block.

    With None, `torch.distributed` looks uninitialized.
    """
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
