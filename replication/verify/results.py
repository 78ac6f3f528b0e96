"""What `verify` returns, and how it compares what copies have computed with one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from replication.texts import first_of, listed, table
from replication.verify.recording import (
    BUFFERS,
    GRADIENTS,
    LAYERS,
    LOSSES,
    OUTPUTS,
    Parts,
    Quantities,
    Quantity,
    has_fractions,
    joined,
)

__all__ = ["Difference", "Verification"]

EQUAL = "equal"


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between the replicas, or the ranks, and one device.

    Attributes:
        where: The quantity and its layer, such as "output of `norm` (BatchNorm1d)".
        error: The largest difference, relative to the largest value, or infinity.
        reason: Why the quantities cannot be compared by value, or which ranks differ from each
            other. Usually empty.
    """

    where: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason or f'error {self.error:.1e}'}"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. True if all quantities are equal up to rounding.

    Attributes:
        differences: The differences by kind: outputs of layers in the order in which one device
            computes them, outputs of the model, gradients of inputs and parameters, buffers.
        tolerance: The largest error that counts as rounding.
        replicas: The number of replicas or ranks that ran.
        copies: "replicas" or "ranks".
        explanation: What the differences have in common, if that is known. Usually empty.
        losses: By term, the loss on one device and on each copy. Only information.
        notes: What differs between the ranks before the step. Only information.
    """

    differences: dict[str, list[Difference]]
    tolerance: float
    replicas: int
    copies: str = "replicas"
    explanation: str = ""
    losses: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.first_difference is None

    @property
    def first_difference(self) -> Difference | None:
        """The first difference above the tolerance, which names the layer where errors begin."""
        everything = (d for differences in self.differences.values() for d in differences)
        return next((d for d in everything if d.error > self.tolerance), None)

    @property
    def begins_with_gradients(self) -> bool:
        """Whether all outputs are equal, but gradients are not."""
        wrong = (k for k, found in self.differences.items() if largest(found) > self.tolerance)
        return next(wrong, "").startswith(GRADIENTS)

    def check(self) -> Verification:
        """Returns the result if it is True.

        Raises:
            AssertionError: It is False. The text is the whole result, which pytest cuts in an
                ``assert``.
        """
        __tracebackhide__ = True  # by pytest
        if not self:
            raise AssertionError(f"\n{self}")
        return self

    def __repr__(self) -> str:
        rows = [
            (kind, str(len(found)), f"{largest(found):.1e}")
            for kind, found in self.differences.items()
            if found
        ]
        first = self.first_difference
        verdict = "equal" if first is None else f"the first difference is {first}"
        lines = [
            *self.notes,
            table(("compared", "number", "largest relative error"), rows, numbers_from=1),
            *(
                _loss_line(name, *values, copies=self.copies)
                for name, values in self.losses.items()
            ),
            f"{self.replicas} {self.copies}: {verdict} (tolerance {self.tolerance:.0e})",
        ]
        return "\n".join([*lines, self.explanation] if self.explanation else lines)


def _loss_line(name: str, alone: float, *others: float, copies: str) -> str:
    values = first_of([f"{value:.6g}" for value in others])
    relation = relation_of(alone, others)
    about = f" ({relation})" if relation and len(others) > 1 else ""
    return f"{name}: {alone:.6g} on one device, {values} on the {copies}{about}"


def relation_of(alone: float, others: Sequence[float]) -> str:
    """What the losses of the copies have to do with that of one device. Empty if nothing."""

    def is_near(value: float) -> bool:
        return math.isclose(value, alone, rel_tol=1e-4)

    size = len(others)
    if all(map(is_near, others)):
        return EQUAL
    if all(is_near(other / size) for other in others):
        return f"each {size} times as much"
    if is_near(sum(others)):
        return "shares"
    return "their mean is equal" if is_near(sum(others) / size) else ""


def largest(differences: list[Difference]) -> float:
    return max((d.error for d in differences), default=0.0)


def compared(result: Verification, actual: Quantities, expected: Quantities) -> Verification:
    terms = dict.fromkeys(key.kind for key in expected if key.kind.startswith(GRADIENTS))
    kinds = LAYERS, OUTPUTS, *terms, BUFFERS
    found = {kind: differences(kind, actual, expected, result) for kind in kinds}
    losses = {
        key.where: [part.item() for part in (alone[0], *actual.get(key, {}).values())]
        for key, alone in expected.items()
        if key.kind == LOSSES
    }
    return replace(result, differences=found, losses=losses)


def differences(
    kind: str, actual: Quantities, expected: Quantities, result: Verification
) -> list[Difference]:
    # Errors are relative to the largest value of a tensor, or to a thousandth of the largest of
    # the kind if that is more: some quantities cancel except for rounding, such as the gradient of
    # a bias before a normalization. Layers may differ in scale, so theirs are not compared.
    same_scale = [parts[0] for key, parts in expected.items() if key.kind == kind != LAYERS]
    least = 1e-3 * max(map(magnitude, same_scale), default=0.0)
    return [
        difference(key, actual.get(key), expected.get(key), least, result)
        for key in expected | actual
        if key.kind == kind
    ]


def difference(
    quantity: Quantity,
    actual: Parts | None,
    expected: Parts | None,
    least: float,
    result: Verification,
) -> Difference:
    """Compares the joined tensors of the copies with the tensor of one device."""
    where, copies = quantity.where, result.copies
    if actual is None or expected is None:
        only = "one device has" if actual is None else f"{copies} have"
        return Difference(where, math.inf, f"only {only} it")
    reference = expected[0]
    shape = reference.shape
    if quantity.kind in (LAYERS, OUTPUTS) and not shape:
        return Difference(where, 0.0, "scalars are not joined, and so not compared")
    if all(part.shape == shape for part in actual.values()):
        # Buffers, and outputs that depend on parameters alone, are the same in each copy.
        first, reason = min(actual), ""
        error = max(error_of(part, reference, least) for part in actual.values())
        apart = {i: error_of(part, actual[first], least) for i, part in actual.items()}
        if others := sorted(i for i in apart if apart[i] > result.tolerance):
            copy = copies.removesuffix("s")
            reason = f"error {error:.1e}, and {listed(others, copy)} and {copy} {first} differ"
        return Difference(where, error, reason)
    whole = joined(actual, shape)
    if whole is not None:
        return Difference(where, error_of(whole, reference, least))
    shapes = ", ".join(str(tuple(actual[i].shape)) for i in sorted(actual))
    reason = f"shapes {shapes} in the {copies}, {tuple(shape)} on one device"
    return Difference(where, math.inf, reason)


def error_of(actual: Tensor, reference: Tensor, least: float) -> float:
    is_equal = (actual == reference) | (actual.isnan() & reference.isnan())
    if is_equal.all():
        return 0.0
    if not has_fractions(reference):
        return math.inf
    error = (actual - reference)[~is_equal].abs().amax().item()
    error /= max(magnitude(reference), least) or 1.0
    return error if math.isfinite(error) else math.inf


def magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().amax().item() if has_fractions(tensor) and len(finite) else 0.0
