"""Says what differs first, what the differences have in common, and what to do.

Nothing is guessed: each sentence follows from numbers that agree up to the tolerance.
"""

from __future__ import annotations

from replication.texts import first_of, listed
from replication.verify.case import Case, name_of
from replication.verify.causes import cause_of
from replication.verify.quantities import BEGIN, BUFFERS, CHANGES, GRADIENTS, LAYERS, Quantity
from replication.verify.results import EQUAL, MEAN, NONE, SHARES, TIMES

#: What is not certain of a tensor.
_NO_CAUSE = "No usual cause fits {}: look at what its update reduces, and over which "
_FOLLOWS = "{} probably follows from {}"
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
        return "\n".join([*lines, *_forward(case), _LATER])
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


def _forward(case: Case) -> list[str]:
    """What is certain about the first output that differs, and about buffers, and what is not."""
    first = case.result.first_difference
    assert first is not None
    key = next(k for k in case.expected | case.actual if k.where == first.where)
    if text := _outputs(case, key):
        return [text, *_buffers(case)]
    explained = [name for names in _causes(case).values() for name in names]
    # A layer uses the buffers in it, and an output of the model may depend on all.
    path = f"{name_of(key).split(' ')[0].rstrip('`')}." if key.kind == LAYERS else ""
    if near := [name for name in explained if name.startswith(path)]:
        return [*_buffers(case), _FOLLOWS.format(name_of(key), first_of(near))]
    return [
        *_buffers(case),
        f"No usual cause fits {name_of(key)}: the {case.copies} have neither what one device has, "
        "nor what each would have alone. Look at what it gathers or reduces, in which order, and "
        f"over which {case.copies}",
    ]


def _outputs(case: Case, key: Quantity) -> str:
    """Why an output differs, if that is certain."""
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
    return ""


# -- buffers -------------------------------------------------------------------------------------


def _buffers(case: Case) -> list[str]:
    """What is certain about buffers that differ, one line for each cause, and then what is not."""
    causes = _causes(case)
    explained = [name for names in causes.values() for name in names]
    unknown: dict[str, list[str]] = {}
    for key in case.wrong(BUFFERS):
        if (name := name_of(key)) not in explained:
            near = [each for each in explained if _module(each) == _module(name)]
            text = _FOLLOWS.format("{}", first_of(near)) if near else _NO_CAUSE + case.copies
            unknown.setdefault(text, []).append(name)
    return [text.format(first_of(names)) for text, names in (causes | unknown).items()]


def _causes(case: Case) -> dict[str, list[str]]:
    """The buffers that each certain cause explains."""
    causes: dict[str, list[str]] = {}
    for key in case.wrong(BUFFERS):
        if text := _of_buffer(case, key):
            causes.setdefault(text, []).append(name_of(key))
    return causes


def _module(name: str) -> str:
    """The module of a buffer, such as "`codebook" of "`codebook.sums`"."""
    return name.rpartition("." if "." in name else "`" + name.split("`")[1])[0]


def _of_buffer(case: Case, key: Quantity) -> str:
    """The cause, if one is certain."""
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
    return ""
