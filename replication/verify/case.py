"""What is known about a difference, as far as it holds up to the tolerance."""

from __future__ import annotations

from dataclasses import dataclass, field

from replication.verify.quantities import OUTPUTS, Parts, Quantities, Quantity, joined
from replication.verify.results import Verification, error_of, relation_of


@dataclass
class Case:
    """A result that is False, and the numbers behind it.

    Attributes:
        result: The result.
        actual: What the copies have computed.
        expected: What one device has computed from the whole batch.
        own: What one device has computed from the part of each copy. Empty if that raises.
        of_losses: Sketches of the gradients of the loss of each rank, through all samples.
        wrapper: What averages gradients over the ranks, such as "DDP". Empty for nothing.
    """

    result: Verification
    actual: Quantities
    expected: Quantities
    own: Quantities
    of_losses: Quantities = field(default_factory=dict)
    wrapper: str = ""

    @property
    def size(self) -> int:
        return self.result.replicas

    @property
    def copies(self) -> str:
        return self.result.copies

    @property
    def copy(self) -> str:
        return self.result.copies.removesuffix("s")

    @property
    def how(self) -> str:
        """What is done with the gradients of the copies."""
        if self.copies == "replicas":
            return "the gradients of replicas are added"
        return f"{self.wrapper} averages" if self.wrapper else "without wrap, verify adds"

    def keys(self, kind: str) -> list[Quantity]:
        return [key for key in self.expected | self.actual if key.kind == kind]

    def wrong(self, kind: str) -> list[Quantity]:
        errors = {d.where: d.error for d in self.result.differences[kind]}
        return [key for key in self.keys(kind) if errors[key.where] > self.result.tolerance]

    def relation(self, name: str) -> str:
        """What the losses of the copies, or a term of them, have to do with one device's."""
        alone, *others = self.result.losses[name]
        return relation_of(alone, others, self.result.tolerance)

    def is_own(self, key: Quantity) -> bool:
        """Whether each copy has what one device computes from the part of the copy alone."""
        parts, own = self.actual.get(key, {}), self.own.get(key, {})
        if key.kind == OUTPUTS and self.copies == "replicas":  # which are joined already
            wholes = [joined(own, whole.shape) for whole in parts.values()]
            own = {i: whole for i, whole in zip(parts, wholes, strict=True) if whole is not None}
            return bool(own) and self.are_equal(parts, own)
        return len(parts) > 1 and parts.keys() == own.keys() and self.are_equal(parts, own)

    def is_uneven(self, key: Quantity) -> bool:
        """Whether the ranks have different gradients of a parameter."""
        parts = self.actual.get(key, {})
        first = {i: parts[min(parts)] for i in parts}
        return key.of_parameter and len(parts) > 1 and not self.are_equal(parts, first)

    def are_equal(self, parts: Parts, others: Parts) -> bool:
        pairs = [(parts[i], others[i]) for i in parts]
        if any(part.shape != other.shape for part, other in pairs):
            return False
        return all(error_of(*pair, 0.0) <= self.result.tolerance for pair in pairs)


def name_of(key: Quantity) -> str:
    """The tensor of a quantity, such as "input `args[0]`"."""
    return key.where.split(" of ", 1)[1].split(" by term")[0]
