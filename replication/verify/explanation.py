"""Says what differs first, what the differences have in common, and what to do.

Nothing is guessed: each sentence follows from numbers that agree up to the tolerance.
"""

from __future__ import annotations

from replication.texts import first_of, listed
from replication.verify.case import Case, name_of
from replication.verify.causes import cause_of
from replication.verify.quantities import BEGIN, BUFFERS, CHANGES, GRADIENTS, LAYERS, Quantity
from replication.verify.results import EQUAL, MEAN, NONE, SHARES, TIMES

_LATER = "The loss and gradients are judged only once outputs agree: mend this, and verify again"


def explained(case: Case) -> str:
    """Explains the differences of a result, one sentence or more a line."""
    first = case.result.first_kind
    if first == BEGIN:
        return _beginning(case)
    lines = [_place(case)]
    if first.startswith(GRADIENTS):
        kinds = [kind for kind in case.result.differences if kind.startswith(GRADIENTS)]
        # The gradients of the sum follow from those of its terms.
        lines += [cause_of(case, kind) for kind in kinds[1:] or kinds if case.wrong(kind)]
    elif first != BUFFERS:
        lines.append(_outputs(case))
        lines += _buffers(case)
        return "\n".join([*lines, _LATER])
    return "\n".join([*lines, *_buffers(case)])


def _beginning(case: Case) -> str:
    names = first_of([name_of(key) for key in case.wrong(BEGIN)])
    made = ", and the wrapper does not make them equal" if case.wrapper else ""
    return (
        f"The ranks begin with different values of {names}{made}. Seed all ranks alike where you "
        "make the model and the loss, or broadcast rank 0's values, as DistributedDataParallel "
        "does for what it wraps"
    )


def _place(case: Case) -> str:
    """What differs first."""
    kind, losses = case.result.first_kind, [*case.result.losses]
    if kind == BUFFERS:
        return "Outputs and gradients are equal: only buffers differ."
    if not kind.startswith(GRADIENTS):
        return "Already the forward differs."
    if case.copies == "replicas" or not losses:
        return "Outputs are equal: only gradients differ."
    relations = {name: case.relation(name) for name in losses[1:] or losses}
    if wrong := [name for name in relations if relations[name] in (NONE, TIMES)]:
        which = first_of(wrong) if losses[1:] else "the loss"
        return f"Outputs are equal, but already {which} {'differ' if wrong[1:] else 'differs'}."
    also = {
        EQUAL: "Outputs and the loss are equal",
        SHARES: "Outputs are equal, and the ranks' losses add up to one device's",
        MEAN: "Outputs are equal, and the mean of the ranks' losses is one device's",
    }
    found = {*relations.values()}
    text = also[found.pop()] if len(found) == 1 else "Outputs are equal, and the loss as a whole"
    return f"{text}: only gradients differ."


def _outputs(case: Case) -> str:
    first = case.result.first_difference
    assert first is not None
    key = next(k for k in case.expected | case.actual if k.where == first.where)
    name = name_of(key)
    if key.of_samples and case.is_own(key):
        return (
            f"Each {case.copy} has of {name} what one device computes from its own samples. That "
            "layer treats each sample alone, so what it is given differs: look at what the "
            "forward computes before it, and gather or reduce there over all samples"
        )
    if key.kind == LAYERS and case.is_own(key):
        advice = "let the layer communicate, for example as a ReplicaAware layer"
        if "BatchNorm" in name:
            advice = "synchronize it, by syncbn.convert_model or torch's SyncBatchNorm"
        return (
            f"Each {case.copy} computes {name} from its own samples, as if it were alone: {advice}"
        )
    if case.is_own(key):
        return (
            f"Each {case.copy} computes its outputs from its own samples, as if it were alone: "
            "gather or reduce over all samples, in a layer that communicates"
        )
    return (
        f"No usual cause fits {name}: the {case.copies} have neither what one device has, nor "
        "what each would have alone. Look at what it gathers or reduces, in which order, and over "
        f"which {case.copies}"
    )


# -- buffers -------------------------------------------------------------------------------------


def _buffers(case: Case) -> list[str]:
    """What is certain about buffers that differ, one line for each cause."""
    causes: dict[str, list[str]] = {}
    for key in case.wrong(BUFFERS):
        causes.setdefault(_of_buffer(case, key), []).append(name_of(key))
    return [text.format(first_of(names)) for text, names in causes.items()]


def _of_buffer(case: Case, key: Quantity) -> str:
    copies = case.copies
    parts, own = case.actual.get(key, {}), case.own.get(key, {})
    changes = case.actual.get(key._replace(kind=CHANGES), {})
    changed = sorted(i for i, is_changed in changes.items() if is_changed)
    if changed and len(changed) < len(changes):
        return (
            f"Only {listed(changed, case.copy)} changes {{}}, and the others keep old values: "
            f"compute the update from all samples, on every {case.copy}"
        )
    alone = case.expected.get(key._replace(kind=CHANGES), {})
    if changes and not changed and any(alone.values()):
        return f"No {case.copy} changes {{}}, but one device does: update it from all samples"
    if case.is_own(key):
        return (
            f"Each {case.copy} updates {{}} from its own samples: reduce what the update is "
            f"computed from over all {copies}"
        )
    for index, value in own.items():
        if parts and case.are_equal(parts, dict.fromkeys(parts, value)):
            return (
                f"What all {copies} have in {{}} comes from the samples of {case.copy} {index} "
                f"alone: reduce what the update is computed from over all {copies}"
            )
    return f"No usual cause fits {{}}: look at what its update reduces, and over which {copies}"
