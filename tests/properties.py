"""Profiles of Hypothesis, and how many examples a property gets in each."""

from __future__ import annotations

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
