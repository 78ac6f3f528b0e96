"""Ranks that `verify_ranks` starts: what they return and raise, and that none is left behind."""

from __future__ import annotations

import pytest

from replication import ReplicationError, verify_ranks
from tests import checks
from tests.ranks import needs_gloo

pytestmark = [needs_gloo, pytest.mark.slow]


@pytest.mark.parametrize("make", [checks.equal, checks.with_a_group])
@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_ranks_are_equal(make, ranks):
    result = verify_ranks(make, ranks)
    assert result.check() is result and result.replicas == ranks and result.copies == "ranks"


def test_a_check_raises_with_the_whole_explanation():
    with pytest.raises(AssertionError) as raised:
        verify_ranks(checks.sum_of_samples).check()
    assert "every gradient is 1/2 of one device's" in str(raised.value)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (checks.raises, OSError, "^no such file"),
        (checks.raises_unpicklable, ReplicationError, "^Unpicklable: no such file"),
        (checks.exits, ReplicationError, "^SystemExit: 3"),
        (checks.dies, ReplicationError, r"^rank 1 has died \(SIGKILL\) without a Python error"),
    ],
)
def test_an_error_of_a_rank_arrives_with_its_traceback(make, error, text):
    with pytest.raises(error, match=text) as raised:
        verify_ranks(make, timeout=100)
    if make is not checks.dies:
        told = "\n".join([str(raised.value), *raised.value.__notes__])
        assert "in rank 1:" in told and f"in {make.__name__}" in told


def test_a_timeout_says_where_each_rank_is():
    with pytest.raises(TimeoutError) as raised:
        verify_ranks(checks.hangs, timeout=4)
    first, rank_0, rank_1 = str(raised.value).splitlines()
    assert first == "ranks 0, 1 of 2 have not ended after 4 seconds"
    assert "in all_reduce, checks.py, line" in rank_0
    assert "time.sleep(1000)" in rank_1


def test_a_rank_that_cannot_answer_is_named():
    with pytest.raises(TimeoutError, match="rank 1: does not answer, so it runs code that keeps"):
        verify_ranks(checks.keeps_the_lock, timeout=3)
