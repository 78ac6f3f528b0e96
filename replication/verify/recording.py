"""One training step of a copy of a model: what its layers compute, gradients, and buffers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from replication._torch import run_eagerly
from replication.errors import add_note
from replication.sync.lifecycle import Phase, phase, this_thread
from replication.tree import replace_leaves
from replication.verify.copies import Step, arguments_of, copied, moved
from replication.verify.losses import check_parameters, check_scalar, noting_dtypes
from replication.verify.position import position
from replication.verify.quantities import (
    BEGIN,
    BUFFERS,
    CHANGES,
    DRAWS,
    GRADIENTS,
    LAYERS,
    LOSSES,
    OUTPUTS,
    Parts,
    Quantities,
    Quantity,
    joined,
    of_term,
    plain,
    tensors_of,
)

#: Layers of torch in which samples never meet.
_OF_SAMPLES = (
    *(nn.Linear, nn.Embedding, nn.Identity, nn.LayerNorm, nn.GroupNorm, nn.modules.conv._ConvNd),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Dropout),
)


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
    again = copy.deepcopy(net) if step.loss else net  # as it is before it is wrapped and trained
    run = _Run(step, on, rank, divisor, ranks or {})
    try:
        with _seeded(step.device, rank) as seeded:
            quantities = run.train(net)
            if _differ(seeded, _random_numbers(step.device)):
                where = run.drawing[0] if run.drawing else "a model or a loss"
                quantities[Quantity(DRAWS, where)] = {}
        for term in run.terms:
            with _seeded(step.device, rank):
                of_one = _Run(step, on, rank, divisor, {}, term)
                quantities |= of_one.train(copy.deepcopy(again))
    except Exception as error:
        add_note(error, f"while verify ran a copy of the model, cast to {step.dtype}, on {on}")
        raise
    finally:
        position.enters("between two steps")
    return quantities


@dataclass
class _Run:
    """A step with the whole loss, or with one of its terms, whose gradients alone are recorded."""

    step: Step
    on: str
    rank: int
    divisor: int
    ranks: Quantities
    term: str | None = None
    quantities: Quantities = field(default_factory=dict)
    #: Layers that have drawn random numbers.
    drawing: list[str] = field(default_factory=list)
    #: The names of the terms of the loss.
    terms: list[str] = field(default_factory=list)

    def train(self, net: nn.Module) -> Quantities:
        step = self.step
        loss = copied(step.loss, step) if isinstance(step.loss, nn.Module) else step.loss
        owners = {"": net} | ({"the loss's ": loss} if isinstance(loss, nn.Module) else {})
        if self.term is None:
            self._record_layers(net)
        before = {name: buffer.clone() for name, buffer in _buffers(owners)}
        self._enters("wrap")
        runner = net if step.wrap is None else step.wrap(net)
        if self.term is None and step.strict:
            self._record_values(owners)
        args, kwargs, inputs = arguments_of(step)
        with run_eagerly():
            self._enters("forward")
            result = runner(*args, **kwargs)
            trained, upstream = self._outputs(result)
            if loss is not None:
                self._enters("loss")
                trained, upstream = [self._value(loss, result)], [None]
                if step.wrap is None:  # a wrapper may make other parameters of these
                    known = (m.parameters() for m in owners.values())
                    check_parameters(trained[0], chain(*known, inputs.values()))
            # Before the backward: a recomputation updates the buffers of torch's layers once more.
            if self.term is None:
                self._record_buffers(owners, before)
            self._enters("backward")
            if loss is None:
                torch.autograd.backward(trained, upstream)
            else:
                trained[0].backward()
        self._record_gradients(owners, inputs)
        return self.quantities

    def _enters(self, part: str) -> None:
        term = "" if self.term is None else f" of term `{self.term}`"
        position.enters(f"{part}{term} on {self.on}")

    def _add(self, kind: str, where: str, tensor: Tensor, of_parameter: bool = False) -> None:
        self.quantities[Quantity(kind, where, of_parameter)] = {self.rank: plain(tensor)}

    def _outputs(self, result: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """Records the outputs. Returns those that require a gradient, and random gradients."""
        trained, upstream = list[Tensor](), list[Tensor | None]()
        for path, y in tensors_of(result).items() if self.term is None else ():
            where = f"output of `{path}`" if path else "output of the model"
            self._add(OUTPUTS, where, y)
            if self.step.loss is None and y.requires_grad:
                of_ranks = self.ranks.get(Quantity(OUTPUTS, where))
                trained.append(y)
                upstream.append(self.divisor * _upstream_of(y, self.rank, of_ranks))
        return trained, upstream

    def _value(self, loss: Any, result: Any) -> Tensor:
        """Computes the loss, or the term of it whose gradients are recorded."""
        targets = replace_leaves(partial(moved, step=self.step), self.step.targets)
        with noting_dtypes(self.step.dtype):
            value: Any = loss(result) if targets is None else loss(result, targets)
        of_terms = dict(value) if isinstance(value, Mapping) else {}
        for name, number in of_terms.items():
            check_scalar(number, f"the term `{name}` of the loss")
        if of_terms:
            value = sum(of_terms.values(), torch.zeros((), device=self.step.device))
        check_scalar(value, "the loss")
        if self.term is None:
            self.terms = [*of_terms]
            self._add(LOSSES, "loss", value)
            for name, number in of_terms.items():
                self._add(LOSSES, f"term `{name}`", number)
            total: Tensor = value
        else:
            # Each backward has the same parameters and collectives: DDP does not average a
            # gradient while it waits for another one of its bucket.
            total = of_terms[self.term] + 0.0 * value
        return total if self.step.only in (None, self.rank) else 0.0 * total

    def _record_values(self, owners: dict[str, nn.Module]) -> None:
        for owner, module in owners.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self._add(BEGIN, f"value of {owner}`{name}`", tensor)

    def _record_buffers(self, owners: dict[str, nn.Module], before: dict[str, Tensor]) -> None:
        for name, buffer in _buffers(owners):
            self._add(BUFFERS, f"buffer of {name}", buffer)
            old = before.get(name)
            is_same = old is not None and old.shape == buffer.shape and torch.equal(old, buffer)
            self._add(CHANGES, f"buffer of {name}", torch.tensor(not is_same))

    def _record_gradients(self, owners: dict[str, nn.Module], inputs: dict[str, Tensor]) -> None:
        kind, by = GRADIENTS, ""
        if self.term is not None:
            kind, by = of_term(self.term), f" by term `{self.term}`"
        for path, x in inputs.items():
            if x.grad is not None:
                self._add(kind, f"gradient of input `{path}`{by}", x.grad / self.divisor)
        for owner, module in owners.items():
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    where = f"gradient of {owner}`{name}`{by}"
                    self._add(kind, where, parameter.grad, of_parameter=True)

    def _record_layers(self, net: nn.Module) -> None:
        """Lets hooks record the outputs of each call of a layer, and which layers draw numbers."""
        calls: Counter[tuple[str, int]] = Counter()
        numbers = _random_numbers(self.step.device)

        def enter(name: str, layer: nn.Module, args: Any) -> None:
            if this_thread.current is None and phase() is Phase.FORWARD:
                position.reaches(name)

        def record_call(name: str, path: str, layer: nn.Module, args: Any, output: Any) -> None:
            if phase() is not Phase.FORWARD:
                return
            if not self.drawing and _differ(numbers, _random_numbers(self.step.device)):
                self.drawing.append(name)
            replica = this_thread.current
            if replica is None:
                position.leaves(name)
            index = self.rank if replica is None else replica.replica
            calls[path, index] += 1
            number = calls[path, index]
            called = f"{name[:-1]}, call {number})" if number > 1 else name
            if isinstance(output, nn.utils.rnn.PackedSequence):
                output = output.data  # the others are sizes and places of what is packed
            for key, tensor in tensors_of(output).items():
                of_key = f"output `{key}`" if key else "output"
                of_samples = isinstance(layer, _OF_SAMPLES)
                quantity = Quantity(LAYERS, f"{of_key} of {called}", of_samples=of_samples)
                self.quantities.setdefault(quantity, {})[index] = plain(tensor)
                if position.in_rank and tensor.requires_grad and replica is None:
                    tensor.register_hook(partial(position.passes, name))

        layers = dict(net.named_modules())
        # A DataParallel inside the network has other replicas.
        inner = tuple(f"{path}." for path, m in layers.items() if isinstance(m, nn.DataParallel))
        for path, layer in layers.items():
            if path and not path.startswith(inner):  # outputs of the network are recorded anyway
                # The class as it is before `fully_shard` derives one from it.
                name = f"`{path}` ({type(layer).__name__})"
                layer.register_forward_pre_hook(partial(enter, name))
                layer.register_forward_hook(partial(record_call, name, path))


def _buffers(owners: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for owner, module in owners.items():
        for name, buffer in module.named_buffers():
            yield f"{owner}`{name}`", buffer


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


# -- random numbers ------------------------------------------------------------------------------


@contextmanager
def _seeded(device: torch.device, rank: int) -> Iterator[list[Tensor]]:
    """Seeds the generators with the rank in a ``with`` block, and restores them. Yields states.

    One device and rank 0 draw the same numbers, and other ranks other ones: what all ranks take
    from rank 0 is equal, and what each draws for itself is not.
    """
    states = _random_numbers(device)
    kinds = [torch.device("cpu"), device][: len(states)]
    _set_random_numbers(device, [torch.Generator(k).manual_seed(rank).get_state() for k in kinds])
    try:
        yield _random_numbers(device)
    finally:
        _set_random_numbers(device, states)


def _random_numbers(device: torch.device) -> list[Tensor]:
    """Returns the states of the generators that layers use on a device."""
    of_device: Any = None
    if device.type != "cpu":
        of_device = getattr(torch.get_device_module(device), "get_rng_state", None)
    return [torch.get_rng_state(), *([of_device(device)] if of_device else [])]


def _set_random_numbers(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


def check_draws(*runs: Quantities) -> None:
    """Raises ValueError if a run has drawn random numbers."""
    if drawing := [key.where for run in runs for key in run if key.kind == DRAWS]:
        raise ValueError(
            f"the model must not draw random numbers, which differ in each run (got {drawing[0]} "
            "that does); call eval() on its dropout layers"
        )


def _differ(numbers: list[Tensor], others: list[Tensor]) -> bool:
    return not all(map(torch.equal, numbers, others))
