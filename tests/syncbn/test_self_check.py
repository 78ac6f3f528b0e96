"""`python -m syncbn` says whether replicas and ranks on this machine train like one device."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import syncbn.__main__ as check
from replication import SoloGroup
from syncbn import SynchronizedBatchNorm2d, verify
from tests.kit.programs import ROOT, run_python
from tests.kit.ranks import as_launched, free_port, needs_gloo, run_ranks, started_ranks


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts no ranks, which takes seconds."""
    monkeypatch.setattr(check, "check_own_ranks", lambda timeout: [])


def assert_ranks_pass(rows: list[str]) -> None:
    cases = ["uneven shards", "empty shards", "DistributedDataParallel"]
    expected = [
        f"PASS 2 ranks on cpu (gloo), {case} in {dtype}"
        for case in cases
        for dtype in ("float64", "float32")
    ]
    assert [" ".join(row.split()[:-1]) for row in rows] == expected


@needs_gloo
@pytest.mark.slow
def test_self_check_passes_here():
    done = run_python("-m", "syncbn", "--replicas", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("synchronized-batchnorm ")
    assert f"torch {torch.__version__}" in lines[1]
    assert lines[2].startswith("Devices: CPU (")
    for dtype, tolerance in (("float64", "1e-06"), ("float32", "1e-03")):
        assert f"3 replicas on cpu in {dtype}, compared with one device:" in lines
        assert f"3 replicas: equal (tolerance {tolerance})" in lines
    # What the page asks to report, as one block of Markdown.
    begin = lines.index("```")
    assert lines[begin - 2].startswith("To report the result, paste the lines below")
    assert lines[begin + 1 : begin + 6] == ["python -m syncbn --replicas 3", *lines[:3], ""]
    assert platform.platform() in lines[1]
    head, *rows, verdict, end = lines[begin + 6 :]
    assert head.split() == ["result", "checked", "largest", "error"]
    assert_ranks_pass(rows[2:])
    assert verdict == "PASS: they run, communicate, and compute what one device computes"
    assert end == "```"


@pytest.mark.parametrize(
    ("option", "text"),
    [("--version", f"torch {torch.__version__}"), ("--help", "The exit status is 0 if")],
)
def test_self_check_explains_itself(option, text, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        check.main([option])
    printed = " ".join(capsys.readouterr().out.split())
    assert text in printed and "``" not in printed and "compared with" not in printed


@pytest.mark.parametrize("replicas", ["0", "1", "two", "1025", "9" * 5000])
def test_self_check_refuses_bad_numbers(replicas, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        check.main(["--replicas", replicas])
    assert "--replicas" in capsys.readouterr().err


class NotANumber(SynchronizedBatchNorm2d):
    """Its outputs are NaN in replicas, so that no error is within a tolerance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + torch.nan if self.group.size > 1 else y


class Refusing(SynchronizedBatchNorm2d):
    """It raises in replicas."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size > 1:
            raise RuntimeError("no such kernel")
        return super().forward(x)


@pytest.mark.parametrize(
    ("owner", "name", "value", "text"),
    [
        (check, "SynchronizedBatchNorm2d", nn.BatchNorm2d, "output of `0`"),
        (check, "SynchronizedBatchNorm2d", NotANumber, "outputs 1 inf"),
        (check, "SynchronizedBatchNorm2d", Refusing, "RuntimeError: no such kernel"),
        (check.Centered, "group", SoloGroup(), "output of `4`"),
    ],
    ids=["plain layers", "nan", "raises", "no group"],
)
def test_self_check_fails(owner, name, value, text, no_ranks, monkeypatch, capsys):
    monkeypatch.setattr(owner, name, value)
    assert check.main(["--replicas", "2"]) == 1
    *lines, verdict, _ = capsys.readouterr().out.splitlines()
    assert "To report the result, paste the lines below into an issue. Add the " in " ".join(lines)
    assert verdict.startswith("FAIL: they raise, or differ from one device")
    assert any(line.startswith("FAIL    2 replicas on cpu in") for line in lines)
    assert text in " ".join(" ".join(lines).split())


def test_self_check_says_that_only_the_cpu_was_checked(no_ranks, monkeypatch, capsys):
    monkeypatch.setattr(check, "default_devices", lambda: [])
    assert check.main(["--replicas", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("PASS    2 replicas on cpu in float")
    assert "Only the CPU was checked: torch finds no GPU or other accelerator here." in lines


@pytest.mark.parametrize("broken", ["", "cuda:1"])
def test_self_check_has_a_result_for_each_device_and_for_all_together(
    broken, no_ranks, monkeypatch, capsys
):
    accelerators = [torch.device("cuda", 0), torch.device("cuda", 1)]
    calls = []

    def verify_without_devices(model, batch, devices, *, dtype, wrap):
        calls.append([*map(str, devices), dtype])
        if {*calls[-1][:-1]} == {broken}:
            raise RuntimeError("no such kernel")
        return verify(model, batch, ["cpu"] * len(devices), dtype=dtype)

    monkeypatch.setattr(check, "default_devices", lambda: accelerators)
    monkeypatch.setattr(check, "verify", verify_without_devices)
    monkeypatch.setattr(check, "has_float64", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert check.main(["--replicas", "3"]) == (1 if broken else 0)
    lists = [["cpu"] * 3, ["cuda:0"] * 3, ["cuda:1"] * 3, ["cuda:0", "cuda:1"]]
    assert calls == [[*names, d] for names in lists for d in (torch.float64, torch.float32)]
    printed = capsys.readouterr().out
    assert "threads), cuda:0 (GPU 0), cuda:1 (GPU 1)\n" in printed
    verdicts = [
        f"{'FAIL' if {*names} == {broken} else 'PASS'}    {len(names)} replicas on "
        f"{', '.join(dict.fromkeys(names))} in {dtype}"
        for names in lists
        for dtype in ("float64", "float32")
    ]
    *_, verdict, _ = lines = printed.splitlines()
    for expected, line in zip(verdicts, lines[-2 - len(verdicts) : -2], strict=True):
        detail = "RuntimeError" if expected.startswith("FAIL") else r"\de-\d\d"
        assert re.fullmatch(f"{expected} +{detail}", line)
    assert verdict.startswith("FAIL: " if broken else "PASS: ")
    assert "Only the CPU" not in printed


# -- ranks ---------------------------------------------------------------------------------------


def block_of(printed: str) -> list[str]:
    """The lines to be pasted."""
    return printed.partition("```\n")[2].partition("\n```")[0].splitlines()


@needs_gloo
@pytest.mark.slow
def test_ranks_of_torchrun_are_checked_and_the_first_one_prints():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_python(*launch, "-m", "syncbn")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("```\n") == 2
    command, *environment, _, head, a, b, c, d, e, f, verdict = block_of(done.stdout)
    assert command == "torchrun -m syncbn, 2 ranks"
    assert environment[3:] == ["Rank 0: cpu", "Rank 1: cpu", "Backends: gloo"]
    assert head.startswith("result ") and verdict.startswith("PASS: ")
    assert_ranks_pass([a, b, c, d, e, f])
    for path in (str(ROOT), str(Path.home()), sys.prefix):
        assert path not in "".join(block_of(done.stdout))


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel")


def doubles(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def is_killed(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def checked_with_a_fault(
    rank: int, port: int, fault: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, str]:
    """The status and what is printed, where a layer does something else in the second rank."""
    as_launched(rank, 2, port)
    check.Moved.forward = lambda self, x: fault(x) if rank and self.group.size > 1 else x
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return check.main(["--timeout", "30"]), printed.getvalue()


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (fails, "rank 1 raised RuntimeError: no such kernel"),
        (doubles, "the first difference is output of `0` (Moved)"),
    ],
)
def test_all_ranks_end_with_one_status(fault, text):
    (status, printed), other = run_ranks(2, checked_with_a_fault, free_port(), fault)
    assert status == 1 and other == (1, "")
    rows = [row.split()[0] for row in block_of(printed) if "empty shards" in row]
    assert rows == ["FAIL", "FAIL"]
    assert text in printed


@needs_gloo
@pytest.mark.slow
def test_a_rank_ends_if_the_other_one_dies():
    with started_ranks(2, checked_with_a_fault, free_port(), is_killed) as ended:
        first, second = ended()
    assert second.code == -signal.SIGKILL
    assert "onnection" in first.error


def dies() -> None:
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def raises() -> None:
    if distributed.get_rank() == 1:
        raise OSError("no such backend")
    time.sleep(1000)


def hangs() -> None:
    time.sleep(1000)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        (dies, "ReplicationError", "rank 1 has died (SIGKILL) without a Python error"),
        (raises, "OSError", "no such backend"),
        (hangs, "TimeoutError", "ranks 0, 1 of 2 have not ended after 5 seconds"),
    ],
)
def test_ranks_that_it_starts_end_together(run, error, text, monkeypatch, capsys):
    monkeypatch.setattr(check, "run_own_rank", run)
    # A rank that ends ends the other one long before the timeout.
    rows = check.check_own_ranks(5 if run is hangs else 600)
    assert rows == [("FAIL", "2 ranks on cpu (gloo)", error)]
    assert text in capsys.readouterr().out
    assert not multiprocessing.active_children()
