"""Says what wrong gradients have in common: a factor, weights of the ranks, or neither."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from replication.texts import first_of
from replication.verify.recording import (
    BUFFERS,
    GRADIENTS,
    Parts,
    Quantities,
    Quantity,
    joined,
)
from replication.verify.results import EQUAL, Verification, error_of, magnitude, relation_of

#: How many times one device's gradient a gradient is. None if it is no multiple of it, and NaN if
#: both are zero up to rounding.
Ratio = float | None


def explained(
    result: Verification,
    actual: Quantities,
    expected: Quantities,
    of_losses: Quantities,
    wrap: Any,
) -> str:
    """Explains differences between ranks, if they are of a usual kind.

    Args:
        of_losses: The gradients of the loss of each rank, through the samples of all ranks.
    """
    kinds = [kind for kind in result.differences if kind.startswith(GRADIENTS)]
    if not result.begins_with_gradients:
        kinds = []
    lines = []
    for kind in kinds[1:] or kinds:
        keys = [key for key in expected | actual if key.kind == kind]
        term = kind.removeprefix(GRADIENTS).removeprefix(" of ")
        losses = result.losses.get(term or "loss", [])
        least = 1e-3 * max((magnitude(expected[k][0]) for k in keys if k in expected), default=0)
        found = {key: _ratio(key, actual, expected, least, result) for key in keys}
        ratios = {key: ratio for key, ratio in found.items() if not math.isnan(ratio or 0)}
        if all(ratio == 1 for ratio in ratios.values()):
            continue
        text = _text(ratios, losses, _weights(keys, of_losses, expected), result.replicas, wrap)
        lines.append(f"{term}: {text}" if term else text)
    if uneven := [str(buffer) for buffer in result.differences[BUFFERS] if buffer.reason]:
        lines.append(f"statistics differ between the ranks after the step: {first_of(uneven)}")
    return "\n".join(lines)


def _text(
    ratios: dict[Quantity, Ratio],
    losses: list[float],
    weights: list[float] | None,
    size: int,
    wrap: Any,
) -> str:
    how = "without wrap, verify adds"
    if wrap is not None:
        how = f"{'DDP' if wrap is DistributedDataParallel else 'the wrapper'} averages"
    how = f"{how} over {size} ranks"
    relation = relation_of(losses[0], losses[1:]) if losses else ""
    found = {ratio: [k for k in ratios if ratios[k] == ratio] for ratio in ratios.values()}
    (ratio, *others) = found
    if ratio is not None and not others:
        return f"every gradient is {_times(ratio, size)}: {how}{_remedy(ratio, relation, size)}"
    text = "gradients are no multiple of one device's. "
    if len(found) > 1:
        in_order = sorted(found.items(), key=lambda item: item[0] in (1, None))
        names = (f"{_times(ratio, size)}: {first_of([*map(_name, ks)])}" for ratio, ks in in_order)
        text = f"gradients are {'; '.join(names)}. "
    given = 1 if wrap is None else 1 / size
    if weights is not None and not all(math.isclose(w, given, rel_tol=1e-4) for w in weights):
        shown = first_of([f"{weight:.4g}" for weight in weights])
        return (
            f"{text}One device weighs the gradients of the ranks' losses by {shown}, but {how}, "
            f"by {given:.4g} each. So each rank divides by a count of its own, for example of "
            "samples, tokens or boxes: divide by their sum over all ranks, and multiply by the "
            "number of ranks"
        )
    if relation == EQUAL:
        return (
            f"{text}Every rank has the loss of one device, so the derivative of a collective is "
            "missing or wrong: those of torch.distributed have none"
        )
    if own := [
        _name(k) for k, ratio in ratios.items() if ratio is None and "the loss's" in k.where
    ]:
        return (
            f"{text}Nothing averages {first_of(own)} over the ranks, unless you wrap the loss, too"
        )
    return f"{text}No weights of the ranks' losses give the gradient of one device"


def _remedy(ratio: float, relation: str, size: int) -> str:
    inside = "Ask for that number inside the loss, because one device calls the loss as well"
    if ratio == 1 / size and relation == EQUAL:
        return (
            ". Every rank has the loss of one device, but the derivative by its own samples only: "
            "use collectives that have derivatives, or multiply by the number of ranks"
        )
    if ratio == size and relation == EQUAL:
        return (
            ". Every rank has the loss of one device, but its gradient is multiplied by the "
            "number of ranks, for example by a sum over ranks in the backward of a collective"
        )
    if ratio == 1 / size:
        return (
            ", so a loss that is summed over the batch must be multiplied by the number of ranks. "
            f"{inside}"
        )
    if ratio == size:
        return (
            ", so a loss that is averaged over the batch must be divided by the number of ranks. "
            f"{inside}"
        )
    return ""


def _name(key: Quantity) -> str:
    return key.where.removeprefix("gradient of ").split(" by term")[0]


def _times(ratio: Ratio, size: int) -> str:
    if ratio is None:
        return "no multiple of one device's"
    if ratio == 1:
        return "equal"
    if not ratio:
        return "missing"
    return (
        f"1/{round(1 / ratio)} of one device's"
        if ratio < 1 and (math.isclose(1 / ratio, round(1 / ratio), rel_tol=1e-4))
        else f"{ratio:.4g} times one device's"
    )


def _ratio(
    key: Quantity,
    actual: Quantities,
    expected: Quantities,
    least: float,
    result: Verification,
) -> Ratio:
    if key not in expected:
        return None
    if key not in actual:
        return 0.0
    reference, size = expected[key][0], result.replicas
    whole = _joined(key, actual[key], reference)
    if whole is None:
        return None
    if max(magnitude(reference), magnitude(whole)) <= 1e-3 * least:
        return math.nan
    ratio = ((whole * reference).sum() / reference.square().sum()).item()
    usual = min(
        (1.0, 1 / size, float(size), 1 / size**2, float(size**2), 0.0),
        key=lambda f: abs(f - ratio),
    )
    # One number is always a multiple of another one.
    for known in (usual, *([ratio] if reference.numel() > 1 else [])):
        if error_of(whole, known * reference, abs(known) * least or least) <= result.tolerance:
            return known
    return None


def _joined(key: Quantity, parts: Parts, reference: Tensor) -> Tensor | None:
    if not key.of_parameter:
        return joined(parts, reference.shape)
    first, *others = parts.values()
    return first if all(torch.allclose(first, other) for other in others) else None


def sampled(tensor: Tensor) -> Tensor:
    """At most some thousands of a tensor's numbers, enough to compare directions."""
    return tensor.flatten()[:: max(1, tensor.numel() // 4096)].double()


def _weights(
    keys: list[Quantity], of_losses: Quantities, expected: Quantities
) -> list[float] | None:
    """By what the gradients of the ranks' losses must be multiplied to add up to one device's."""
    shared = [key for key in keys if key in of_losses and key in expected]
    if not shared:
        return None
    ranks = range(max(len(of_losses[key]) for key in shared))
    rows = [torch.cat([of_losses[key][rank] for key in shared]) for rank in ranks]
    gradients = torch.stack(rows, 1)
    whole = torch.cat([sampled(expected[key][0]) for key in shared])
    products = gradients.T @ gradients
    weights = torch.linalg.pinv(products, hermitian=True, rtol=1e-9) @ (gradients.T @ whole)
    error = error_of(gradients @ weights, whole, 0.0)
    return weights.tolist() if error < 1e-6 else None
