"""Profiles of Hypothesis, how many examples a property gets, and cases by pairs of values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings
from hypothesis.internal.conjecture import engine


class TorchRandom:
    """The generators of torch, as Hypothesis seeds them before each example.

    Otherwise an example that fails is run again, and shrunk, with other numbers.
    """

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # Hypothesis keeps a weak reference only
register_random(torch_random)  # type: ignore[arg-type]

# Seconds for which Hypothesis simplifies a failure. It has no setting for them, and its five
# minutes make a simple story hardly simpler.
engine.MAX_SHRINKING_SECONDS = 20

# The time of an example varies. The examples are the same in every run, so that a failure can be
# run again. `--hypothesis-profile explore` draws others in every run, and more of them.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("tests"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("tests")


def examples(share: float, **others: int) -> settings:
    """A share of the examples of the profile, for properties that are slower or wider than most.

    A fixed number would be the same in `explore`.
    """
    return settings(max_examples=round(share * settings().max_examples), **others)


def pairwise(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Like one ``parametrize`` per argument, but with pairs of values instead of all combinations.

    Defects that take three particular values at once are rare. Where all combinations of two
    arguments must meet every value of a third, stack an ordinary ``parametrize``.
    """
    values = [list(factor) for factor in factors.values()]
    rows = covering([len(factor) for factor in values])
    cases = [tuple(factor[i] for factor, i in zip(values, row, strict=True)) for row in rows]
    return pytest.mark.parametrize(tuple(factors), cases)


def covering(lengths: list[int]) -> list[tuple[int, ...]]:
    """Rows of indices below ``lengths``, in which every pair of indices of two columns occurs."""
    rows = list(product(*map(range, lengths)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.append(row)
        missing -= pairs[row]
    return chosen
