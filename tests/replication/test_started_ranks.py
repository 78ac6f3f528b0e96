"""Ranks that `verify_ranks` starts: what they return and raise, and that none is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from replication import ReplicationError, verify_ranks
from replication.verify import server
from tests.kit.deadlines import soon
from tests.kit.programs import environment, program, run_python
from tests.kit.ranks import needs_gloo
from tests.programs import checks

pytestmark = [needs_gloo, pytest.mark.slow]


@pytest.mark.parametrize("make", [checks.equal, checks.with_a_group])
@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_ranks_are_equal(make, ranks):
    result = verify_ranks(make, ranks)
    assert result.check() is result and result.replicas == ranks and result.copies == "ranks"


def test_a_check_raises_with_the_whole_explanation():
    with pytest.raises(AssertionError) as raised:
        verify_ranks(checks.sum_of_samples).check()
    assert "Every gradient is 1/2 of one device's" in str(raised.value)


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


def test_a_rank_that_dies_in_a_collective_is_explained():
    with pytest.raises(ReplicationError) as raised:
        verify_ranks(checks.gathers_other_sizes, timeout=100)
    first, second = str(raised.value).splitlines()
    assert re.match(r"rank \d has died \(SIGABRT\) without a Python error; see its output", first)
    assert re.search(
        r"It was here: loss on rank \d of 2, in all_gather, checks.py, line \d+", first
    )
    assert first.endswith(": distributed.all_gather(parts, y.detach())")
    assert second == (
        "Probably ranks passed tensors of different sizes to a collective of torch (5 samples are "
        "3 and 2): use replication.functional.all_gather, or first verify an even batch"
    )


def test_what_kills_a_rank_with_an_even_batch_is_not_blamed_on_sizes():
    with pytest.raises(ReplicationError, match="has died") as raised:
        verify_ranks(checks.aborts, timeout=100)
    assert "in loss, checks.py" in str(raised.value) or "os.abort()" in str(raised.value)
    assert "Probably" not in str(raised.value)


def test_a_timeout_says_where_each_rank_is():
    with pytest.raises(TimeoutError) as raised:
        verify_ranks(checks.hangs, timeout=4)
    first, rank_0, rank_1 = str(raised.value).splitlines()
    assert first == "ranks 0, 1 of 2 have not ended after 4 seconds"
    assert rank_0.startswith("rank 0: forward on rank 0 of 2, layer `1` (Sleeping), in all_reduce")
    assert ", checks.py, line" in rank_0 and "distributed.all_reduce(x.detach())" in rank_0
    assert "time.sleep(1000)" in rank_1


def test_a_rank_that_cannot_answer_is_named():
    with pytest.raises(TimeoutError, match="rank 1: does not answer, so it runs code that keeps"):
        verify_ranks(checks.keeps_the_lock, timeout=3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: verify_ranks(checks.equal, 1), ValueError, r"two or more ranks \(got 1\)"),
        (lambda: verify_ranks(lambda: None), ValueError, "at the top level of a module"),
        (lambda: verify_ranks(checks.has_size), TypeError, r"must return the arguments .*got int"),
    ],
)
def test_what_cannot_be_verified_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_script_verifies_what_it_makes_and_its_own_forkserver_stays_its_own():
    done = run_python(program("verifies_in_a_script"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "equal\n", "")


def test_no_rank_is_left_after_a_call():
    verify_ranks(checks.equal)
    process = server.server._process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert children.read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_program_that_ends_while_ranks_hang(number):
    """A Ctrl-C reaches all processes of a terminal. A kill reaches the program alone."""
    started = subprocess.Popen(
        [sys.executable, program("verifies_for_ever")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "sleeps\n"  # of rank 1
        assert len(processes_of(started.pid)) == 4  # a server, and its ranks
        (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)
        assert soon(lambda: started.poll() is not None)
        assert soon(lambda: not processes_of(started.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def processes_of(session: int) -> list[int]:
    """The running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, _, of_session = path.read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.append(int(path.parent.name))
    return found
