"""Faults, delays and divergence in random order: no hang, exact steps, nothing left.

The long version is ``python -m tests.soak --steps 10000``.
"""

from __future__ import annotations

import pytest

from tests.soak import Soak

pytestmark = pytest.mark.slow


def test_a_hundred_steps_among_faults_and_delays_leave_nothing():
    soak = Soak(models=2)
    for _ in range(100):
        soak.at_random()
    soak.assert_nothing_is_left()
    assert set(soak.counts) == {
        "divergences named",
        "errors that have arrived",
        "exact steps",
        "forwards",
        "graphs dropped",
    }
