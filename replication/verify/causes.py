"""Why gradients are wrong: a factor, weights of the ranks, or neither."""

from __future__ import annotations

import math

import torch

from replication.texts import first_of
from replication.verify.case import Case, name_of
from replication.verify.factors import Factor, factors_of, weights_of
from replication.verify.quantities import GRADIENTS, LOSSES, Quantities, Quantity
from replication.verify.results import EQUAL, MEAN, NONE, SHARES, TIMES

_COLLECTIVES = "collectives that have derivatives, as in replication.functional"
_INSIDE = ". Ask for that number inside the loss, because one device calls the loss as well"
#: What losses are, for a remedy that multiplies or divides them.
_KINDS = {
    SHARES: "so losses that add up to one device's",
    TIMES: "so losses of that many times one device's",
}


def cause_of(case: Case, kind: str) -> str:
    """What is certain about the gradients of the loss, or of a term of it, and what to do."""
    term = kind.removeprefix(GRADIENTS).removeprefix(" of ")
    keys = case.keys(kind)
    tolerance = case.result.tolerance
    factors = factors_of(keys, case.actual, case.expected, case.size, tolerance)
    relation = NONE
    if case.copies == "ranks" and case.result.losses:
        relation = case.relation(term or "loss")
    found = [*dict.fromkeys(factors.values())]
    if len(found) == 1 and found[0] is not None:
        text = f"every gradient is {_times(found[0], case.size)}: "
        text += _of_factor(case, found[0], relation)
    else:
        text = f"{_listing(case, factors)}. {_of_several(case, keys, factors, relation, term)}"
    return f"{term}: {text}" if term else text[0].upper() + text[1:]


def _listing(case: Case, factors: dict[Quantity, Factor]) -> str:
    found = dict.fromkeys(factors.values())
    groups = {f: first_of([name_of(k) for k in factors if factors[k] == f]) for f in found}
    order = sorted(groups, key=lambda factor: factor in (1, None))
    if order == [None]:
        return "gradients are no multiple of one device's"
    return "; ".join(f"gradients of {groups[f]}: {_times(f, case.size)}" for f in order)


def _times(factor: Factor, size: int) -> str:
    if factor is None:
        return "no multiple of one device's"
    if factor == 1:
        return "equal"
    if not factor:
        return "zero, or missing"
    for number in (size, size**2):
        if factor == 1 / number:
            return f"1/{number} of one device's"
    return f"{factor:.6g} times one device's"


def _of_factor(case: Case, factor: float, relation: str) -> str:
    """Why all gradients have one factor, and what to do."""
    size, number = case.size, "number of ranks"
    over = f"{case.how} over {size} {case.copies}"
    if case.copies == "replicas":
        return (
            f"{case.how}, and the loss is called once. Look at the backward of the layers that "
            "communicate, from the last one on"
        )
    if factor == 0:
        return "in backward nothing reaches them on the ranks. Look for a detach"
    if relation == EQUAL and case.wrapper and factor == 1 / size:
        return (
            f"{over}. Every rank has the loss of one device, but only a part of its derivative: a "
            f"collective has none. Use {_COLLECTIVES}, or multiply the loss by the {number}"
            f"{_INSIDE}"
        )
    if relation == EQUAL and case.wrapper and factor == size:
        return (
            f"{over}. Every rank has the loss of one device, so a backward multiplies by the "
            f"{number}, for example by a second sum over them. Look at the collectives"
        )
    if relation in (EQUAL, MEAN) and factor == size:
        known = "every rank has" if relation == EQUAL else "the mean of the ranks' losses is"
        return (
            f"{over}, and {known} one device's loss. Pass wrap=DistributedDataParallel if your "
            f"program averages, or else divide the loss by the {number}{_INSIDE}"
        )
    loss = _KINDS.get(relation, "so the loss")
    powers = {size: f"the {number}", size**2: f"the square of the {number}"}
    for power, name in powers.items():
        if factor in (power, 1 / power):
            verb = "multiplied" if factor < 1 else "divided"
            return f"{over}, {loss} must be {verb} by {name}{_INSIDE}"
    return f"{over}. Look for such a factor in the loss, or for a count per rank"


def _of_several(
    case: Case,
    keys: list[Quantity],
    factors: dict[Quantity, Factor],
    relation: str,
    term: str,
) -> str:
    """Why gradients have several factors, or none, and what to do."""
    if case.copies == "replicas":
        return (
            "Look at the backward of the layers that communicate, between those whose gradients "
            "are wrong and those after them"
        )
    uneven = [key for key, factor in factors.items() if factor is None and case.is_uneven(key)]
    if case.wrapper and uneven:
        return _of_uneven(case, uneven)
    if None not in factors.values():
        if relation == EQUAL and case.wrapper:
            return (
                "Every rank has the loss of one device, so some collectives have no derivative, "
                f"or a wrong one. Use {_COLLECTIVES} for all"
            )
        return (
            f"For all of them {case.how} over {case.size} ranks, so parts of the loss are scaled "
            "differently. Return these parts as a mapping of terms, to see which"
        )
    weights = weights_of(keys, case.of_losses, case.expected, case.result.tolerance)
    if weights is not None:
        return _of_weights(case, weights)
    return _of_none(case, relation, term)


def _of_uneven(case: Case, keys: list[Quantity]) -> str:
    means: Quantities = {}
    for key in keys:
        means[key] = {0: torch.stack([*case.actual[key].values()]).mean(0)}
    fixed = factors_of(keys, means, case.expected, case.size, case.result.tolerance)
    known = " Their mean is one device's." if {*fixed.values()} == {1.0} else ""
    return (
        f"The ranks have different gradients of {first_of([*map(name_of, keys)])}, so nothing "
        f"averages them.{known} Wrap their module as well, and call it through the wrapper, or "
        "average them yourself"
    )


def _of_weights(case: Case, weights: list[float]) -> str:
    given = 1 / case.size if case.wrapper else 1.0
    shown = first_of([f"{weight:.4g}" for weight in weights])
    text = (
        f"One device weighs the gradients of the ranks' losses by {shown}, but {case.how}, by "
        f"{given:.4g} each. "
    )
    is_mean = math.isclose(sum(weights), 1, rel_tol=case.result.tolerance)
    if is_mean and min(weights) > 0:
        scale = ", and multiply by the number of ranks" if case.wrapper else ""
        return (
            f"{text}So each rank divides by a count of its own, for example of samples, tokens, "
            f"pixels or boxes. Divide by the sum of these counts over all ranks{scale}"
            f"{', as replication.global_mean does' if case.wrapper else ''}. No fault if all "
            "ranks always have equally many"
        )
    return f"{text}Multiply the loss of each rank by its weight / {given:.4g}"


def _of_none(case: Case, relation: str, term: str) -> str:
    if relation == EQUAL:
        return (
            "Every rank has the loss of one device, so the derivative of a collective is missing "
            f"or wrong: those of torch.distributed have none. Use {_COLLECTIVES}"
        )
    if relation == (MEAN if case.wrapper else SHARES):
        known = "mean" if case.wrapper else "sum"
        return (
            f"The {known} of the ranks' losses is one device's, so the derivative of a collective "
            "is missing or wrong, in the loss or in a layer that communicates: those of "
            f"torch.distributed have none. Use {_COLLECTIVES}"
        )
    if case.is_own(Quantity(LOSSES, term or "loss")):
        return (
            f"Each rank computes the {term or 'loss'} from its own samples, as if it were alone, "
            "and no weights of these make one device's: the loss couples the samples of a batch. "
            f"Gather those of the other ranks by {_COLLECTIVES}"
        )
    advice = (
        "" if term else ". If it is a sum, return its terms as a mapping, to see which is wrong"
    )
    return (
        "No usual cause fits: no weights of the ranks' losses give the gradient of one device. "
        "Look at what the loss gathers or reduces, in which dimension, and over which "
        f"ranks{advice}"
    )
