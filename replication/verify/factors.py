"""By which numbers gradients of the copies are those of one device: factors, and weights of ranks.

A relation counts if it holds for all numbers, up to the tolerance of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from replication.verify.quantities import Parts, Quantities, Quantity, joined
from replication.verify.results import error_of, magnitude

#: How many times one device's gradient a gradient is. None if it is no multiple of it, and NaN if
#: both are zero up to rounding.
Factor = float | None

#: The numbers of a sketch.
_SKETCH = 4096
#: How many more equations than unknown weights there must be. Fewer could hold by chance.
_SPARE = 2


def factors_of(
    keys: Sequence[Quantity],
    actual: Quantities,
    expected: Quantities,
    size: int,
    tolerance: float,
) -> dict[Quantity, Factor]:
    """By what each gradient differs from one device's, without those that are zero in both."""
    least = 1e-3 * max((magnitude(expected[key][0]) for key in keys if key in expected), default=0)
    found = {}
    for key in keys:
        if key not in expected:
            factor: Factor = None
        elif key not in actual:
            factor = 0.0
        else:
            parts = actual[key] if not key.of_parameter else _same(actual[key], least, tolerance)
            factor = _factor(parts, expected[key][0], least, size, tolerance) if parts else None
        if factor is None or not math.isnan(factor):
            found[key] = factor
    return found


def _same(parts: Parts, least: float, tolerance: float) -> Parts:
    """The gradient of a parameter, if the copies have the same one. Else nothing."""
    first, *others = parts.values()
    is_same = all(error_of(other, first, least) <= tolerance for other in others)
    return {0: first} if is_same else {}


def _factor(parts: Parts, reference: Tensor, least: float, size: int, tolerance: float) -> Factor:
    whole = next(iter(parts.values())) if len(parts) == 1 else joined(parts, reference.shape)
    if whole is None or whole.shape != reference.shape:
        return None
    if max(magnitude(reference), magnitude(whole)) <= 1e-3 * least:
        return math.nan
    if magnitude(reference) <= 1e-3 * least:
        return None  # zero up to rounding on one device, of which nothing is a multiple
    norm = reference.abs().square().sum()
    measured = ((whole * reference.conj()).sum().real / norm).item() if norm else math.inf
    usual = [1.0, 1 / size, float(size), 1 / size**2, float(size**2), 0.0]
    usual.sort(key=lambda factor: abs(factor - measured))
    # One number is always a multiple of another one.
    for factor in usual[:1] + [measured] * (reference.numel() > _SPARE):
        scale = abs(factor) * max(magnitude(reference), least) or least
        if math.isfinite(factor) and error_of(whole, factor * reference, scale) <= tolerance:
            return factor
    return None


# -- weights -------------------------------------------------------------------------------------


def sketched(tensor: Tensor) -> Tensor:
    """Some thousands of sums of a tensor's numbers, each with a random sign.

    They depend linearly on all numbers, so sums of tensors that differ have, except by a chance
    that does not occur, sketches that differ.
    """
    flat = tensor.flatten()
    if flat.numel() <= _SKETCH:
        return flat
    signs = torch.randint(0, 2, (flat.numel(),), generator=torch.Generator().manual_seed(0))
    padding = -flat.numel() % _SKETCH
    signed = torch.nn.functional.pad(flat * (2 * signs - 1), (0, padding))
    return signed.view(-1, _SKETCH).sum(0)


def weights_of(
    keys: Sequence[Quantity], of_losses: Quantities, expected: Quantities, tolerance: float
) -> list[float] | None:
    """By what the gradients of the ranks' losses must be multiplied to add up to one device's.

    None if there are no such weights, or several ones.
    """
    shared = [key for key in keys if key.of_parameter and key in expected]
    if not shared or not all(key in of_losses for key in shared):
        return None
    ranks = sorted({rank for key in shared for rank in of_losses[key]})
    rows = [
        torch.cat(
            [
                of_losses[key].get(rank, torch.zeros_like(sketched(expected[key][0])))
                for key in shared
            ]
        )
        for rank in ranks
    ]
    gradients = torch.stack(rows, 1)
    whole = torch.cat([sketched(expected[key][0]) for key in shared])
    if gradients.is_complex() or len(whole) < len(ranks) + _SPARE:
        return None
    gradients, whole = gradients.double(), whole.double()
    scales = gradients.norm(dim=0)
    if not (scales > 0).all() or torch.linalg.matrix_rank(gradients / scales, rtol=1e-6) < len(
        ranks
    ):
        return None
    weights = torch.linalg.lstsq(gradients, whole.unsqueeze(1)).solution.flatten()
    error = error_of(gradients @ weights, whole, 0.0)
    return weights.tolist() if error <= tolerance else None
