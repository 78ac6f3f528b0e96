"""What `verify` returns, and how it compares what copies have computed with one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from replication.texts import first_of, listed, table
from replication.verify.order import as_far_as_each_goes, in_one_order
from replication.verify.quantities import (
    BEGIN,
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

#: What the losses of the copies have to do with that of one device.
EQUAL, SHARES, MEAN, TIMES, NONE = "equal", "shares", "mean", "times", ""
#: In what outputs differ that count as equal.
REORDERED, PADDED = "in another order or shape", "pad to their own longest"
_RELATIONS = {
    EQUAL: "equal",
    SHARES: "shares: they add up to it",
    MEAN: "their mean is equal",
    TIMES: "each {} times as much",
    NONE: "neither equal, shares, nor mean",
}


@dataclass(frozen=True)
class Difference:
    """The difference of one quantity between the replicas, or the ranks, and one device.

    Attributes:
        where: The quantity and its layer, such as "output of `norm` (BatchNorm1d)".
        error: The largest difference, relative to the largest value, or infinity. NaN if it is not
            compared.
        reason: Why the quantities cannot be compared by value, which ranks differ from each
            other, or in what tensors differ that count as equal. Usually empty.
    """

    where: str
    error: float
    reason: str = ""

    def __str__(self) -> str:
        what = "not compared: " if math.isnan(self.error) else ""
        return f"{self.where}: {what}{self.reason or f'error {self.error:.1e}'}"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. True if all quantities are equal up to rounding.

    Outputs of inner layers say where a difference begins, and are none by themselves: what a layer
    computes wrongly also shows in an output of the model, a gradient or a buffer, if it matters.

    Attributes:
        differences: The differences by kind: outputs of layers in the order in which one device
            computes them, outputs of the model, gradients of inputs and parameters, those of each
            term of the loss, buffers. With ``strict``, the values before the step come first.
        tolerance: The largest error that counts as rounding.
        replicas: The number of replicas or ranks that ran.
        copies: "replicas" or "ranks".
        explanation: What differs first, what the differences have in common if that is certain,
            and what to do. Empty if all are equal.
        losses: The loss, and each of its terms, on one device and then on each rank, or on the
            replicas together. Only information: a rank may have its share, or the mean of its
            part of the batch.
        notes: What differs between the ranks before the step, and which outputs have their
            samples in another order, or are not equal though all that follows is. Only
            information.
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
        found = self.differences.get(self.first_kind, ())
        return next((d for d in found if d.error > self.tolerance), None)

    @property
    def first_kind(self) -> str:
        """The kind of the first difference. Empty if there is none."""
        wrong = [k for k, found in self.differences.items() if largest(found) > self.tolerance]
        return "" if wrong == [LAYERS] else next(iter(wrong), "")

    @property
    def begins_with_gradients(self) -> bool:
        """Whether all outputs are equal, but gradients are not."""
        return self.first_kind.startswith(GRADIENTS)

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
            (kind, str(len(found)), _error_text(found))
            for kind, found in self.differences.items()
            if found or kind == GRADIENTS
        ]
        first = self.first_difference
        verdict = "equal" if first is None else f"the first difference is {first}"
        lines = [
            *self.notes,
            table(("compared", "number", "largest relative error"), rows, numbers_from=1),
            *self._not_compared(),
            *(self._loss_line(name, *values) for name, values in self.losses.items()),
            f"{self.replicas} {self.copies}: {verdict} (tolerance {self.tolerance:.0e})",
        ]
        return "\n".join([*lines, self.explanation] if self.explanation else lines)

    def _not_compared(self) -> list[str]:
        found: dict[str, list[str]] = {}
        for difference in chain(*self.differences.values()):
            if math.isnan(difference.error):
                found.setdefault(difference.reason, []).append(difference.where)
        return [f"not compared: {first_of(names)}: {why}" for why, names in found.items()]

    def _loss_line(self, name: str, alone: float, *others: float) -> str:
        relation = _RELATIONS[relation_of(alone, others, self.tolerance)].format(len(others))
        if len(others) == 1:
            relation = "equal" if relation == "equal" else "not equal"
        values = first_of([f"{value:.6g}" for value in others])
        return f"{name}: {alone:.6g} on one device, {values} on the {self.copies} ({relation})"


def relation_of(alone: float, others: Sequence[float], tolerance: float) -> str:
    """What the losses of the copies have to do with that of one device."""

    def is_equal(value: float) -> bool:
        return math.isclose(value, alone, rel_tol=tolerance, abs_tol=1e-3 * tolerance)

    size = len(others)
    if all(map(is_equal, others)):
        return EQUAL
    if all(is_equal(other / size) for other in others):
        return TIMES
    if is_equal(sum(others)):
        return SHARES
    return MEAN if is_equal(sum(others) / size) else NONE


def _error_text(differences: list[Difference]) -> str:
    skipped = sum(math.isnan(d.error) for d in differences)
    if skipped == len(differences):
        return "not compared"
    others = f" ({skipped} not compared)" if skipped else ""
    return f"{largest(differences):.1e}{others}"


def largest(differences: list[Difference]) -> float:
    """The largest error of what is compared."""
    return max((d.error for d in differences if not math.isnan(d.error)), default=0.0)


def compared(result: Verification, actual: Quantities, expected: Quantities) -> Verification:
    found = (key.kind for key in expected | actual if key.kind.startswith(GRADIENTS))
    terms = dict.fromkeys([GRADIENTS, *found])
    begin = [BEGIN] * any(key.kind == BEGIN for key in expected)
    kinds = *begin, LAYERS, OUTPUTS, *terms, BUFFERS
    losses = {
        key.where: [part.item() for part in (alone[0], *actual.get(key, {}).values())]
        for key, alone in expected.items()
        if key.kind == LOSSES
    }
    result = replace(result, losses=losses)
    every = {kind: differences(kind, actual, expected, result) for kind in kinds}
    result = replace(result, differences=every)
    return replace(result, notes=[*result.notes, *_notes_on_outputs(result)])


def _notes_on_outputs(result: Verification) -> list[str]:
    """What is odd about outputs of layers, or of the model, that count as equal."""
    outputs = [d for kind in (LAYERS, OUTPUTS) for d in result.differences[kind]]
    equal = [d for d in outputs if d.error <= result.tolerance]
    found = {
        f"samples are {REORDERED} than on one device, which alone is no fault": [
            d.where for d in equal if d.reason == REORDERED
        ],
        f"{result.copies} {PADDED}, up to which they are compared": [
            d.where for d in equal if d.reason == PADDED
        ],
    }
    if result:
        found["layers differ, but nothing that follows from them does, so they are no fault"] = [
            str(d) for d in outputs if d.error > result.tolerance
        ]
    return [f"{what}: {first_of(names)}" for what, names in found.items() if names]


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
    found = _in_place(quantity, actual, expected, least, result)
    # A loss tells whether the order of outputs of the model is right. Random upstream gradients
    # would meet other samples.
    is_free = quantity.kind == LAYERS or (quantity.kind == OUTPUTS and result.losses)
    if not is_free or actual is None or expected is None or not found.error > result.tolerance:
        return found
    ways = [(REORDERED, pair) for pair in in_one_order(actual, expected[0])]
    if (ends := as_far_as_each_goes(actual, expected[0])) is not None:
        ways.append((PADDED, ends))
    for reason, pair in ways:
        if (error := error_of(*pair, least)) <= result.tolerance:
            return Difference(found.where, error, reason)
    return found


def _in_place(
    quantity: Quantity,
    actual: Parts | None,
    expected: Parts | None,
    least: float,
    result: Verification,
) -> Difference:
    where, copies = quantity.where, result.copies
    if actual is None or expected is None:
        only = "one device has" if actual is None else f"{copies} have"
        return Difference(where, math.inf, f"only {only} it")
    reference = expected[0]
    shape = reference.shape
    if quantity.kind in (LAYERS, OUTPUTS) and not shape:
        return Difference(where, math.nan, "the copies have a number each, which is not joined")
    if all(part.shape == shape for part in actual.values()):
        # Buffers, and outputs that depend on parameters alone, are the same in each copy.
        first, reason = min(actual), ""
        distinct = {id(part): part for part in actual.values()}  # most are rank 0's
        error = max(error_of(part, reference, least) for part in distinct.values())
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
    """The largest difference, relative to the largest value, or to ``least`` if that is more."""
    if actual is reference or torch.equal(actual, reference):
        return 0.0
    if not has_fractions(reference):
        return math.inf
    difference = actual - reference
    error = difference.abs().amax().item()
    if not math.isfinite(error):  # what is infinite or NaN in both is equal
        is_equal = (actual == reference) | (actual.isnan() & reference.isnan())
        error = difference.masked_fill(is_equal, 0).abs().amax().item()
    error /= max(magnitude(reference), least) or 1.0
    return error if math.isfinite(error) else math.inf


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value that is finite, and 0 for tensors without fractions."""
    if not has_fractions(tensor) or not tensor.numel():
        return 0.0
    largest_value = tensor.abs().amax().item()
    if math.isfinite(largest_value):
        return largest_value
    return tensor.where(tensor.isfinite(), 0).abs().amax().item()
