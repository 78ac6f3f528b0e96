"""Parametrization by pairs (`pairwise`)."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.kit.properties import covering


@pytest.mark.parametrize("lengths", [[2, 5], [2, 3, 4], [3, 2, 3, 2, 2]], ids=str)
def test_every_pair_of_values_occurs_in_fewer_cases_than_all_combinations(lengths):
    rows = covering(lengths)
    for one, other in combinations(range(len(lengths)), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == set(product(range(lengths[one]), range(lengths[other])))
    if len(lengths) > 2:
        assert len(rows) < len(list(product(*map(range, lengths))))
