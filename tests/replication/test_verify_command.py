"""`python -m replication.verify`: statuses, and what it prints."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from replication.verify.command import found, main
from tests.kit.programs import ROOT, run_python
from tests.kit.ranks import as_launched, free_port, needs_gloo, run_ranks

pytestmark = [needs_gloo, pytest.mark.slow]

FILE = "tests/programs/checks.py"
CHECKS = "tests.programs.checks"


@pytest.mark.parametrize(
    ("arguments", "status", "texts"),
    [
        (
            [f"{CHECKS}:equal", "--ranks", "2,3"],
            0,
            [f"{CHECKS}:equal, 2 ranks (cpu, gloo) ...", "2 ranks: equal", "3 ranks: equal"],
        ),
        (
            [f"{ROOT}/{FILE}:sum_of_samples"],
            1,
            ["Every gradient is 1/2 of one device's"],
        ),
        (
            [f"{CHECKS}:raises", f"{CHECKS}:equal"],
            1,
            ["OSError: no such file", "in rank 1:", "2 ranks: equal"],
        ),
    ],
)
def test_statuses(arguments, status, texts, capsys):
    assert main(arguments) == status
    printed = capsys.readouterr().out
    for text in texts:
        assert text in printed


BAD = {
    CHECKS: "expected checks.py:make or module:make",
    f"{CHECKS}:nothing": "has no attribute 'nothing'",
    "nothing:make": "No module named 'nothing'",
    "nothing.py:make": "there is no file 'nothing.py'",
    f"{CHECKS}:__doc__": "expected a function (got str",
}


@pytest.mark.parametrize("check", BAD)
def test_a_wrong_name_has_status_2(check, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"{CHECKS}:equal", check])
    assert ended.value.code == 2
    assert BAD[check] in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["1", "two", "2,,3", ""])
def test_a_wrong_number_of_ranks_has_status_2(ranks, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"{CHECKS}:equal", f"--ranks={ranks},1"])
    assert ended.value.code == 2


def test_a_file_finds_the_others_in_its_folder(tmp_path):
    (tmp_path / "beside_checks.py").write_text("make = dict")
    (tmp_path / "imports_it.py").write_text("from beside_checks import make")
    assert found(f"{tmp_path}/imports_it.py:make") is dict


def test_the_folder_of_a_file_hides_no_package(tmp_path):
    (tmp_path / "checks_beside.py").write_text("from syncbn import verify as make")
    (tmp_path / "syncbn").mkdir()
    (tmp_path / "syncbn" / "__init__.py").touch()
    check = f"{tmp_path}/checks_beside.py:make"
    code = f"from replication.verify.command import found; print(found({check!r}))"
    done = run_python("-c", code, cwd=ROOT)
    assert done.stdout.startswith("<function verify"), done.stderr


def test_a_function_of_the_main_module_of_a_package_is_refused(tmp_path):
    program = tmp_path / "program"
    program.mkdir()
    (program / "__main__.py").write_text(
        "from replication import verify_ranks\n\n"
        "def make(): ...\n\n"
        "if __name__ == '__main__':\n    verify_ranks(make)\n"
    )
    done = run_python("-m", "program", cwd=tmp_path)
    assert "ValueError: each rank imports the function, but can't import the `__main__" in (
        done.stderr
    )


def launched(rank: int, port: int, arguments: list[str]) -> tuple[object, str]:
    as_launched(rank, 2, port)
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as told:
        try:
            status: object = main(arguments)
        except SystemExit as ended:
            status = ended.code
    return status, printed.getvalue() + told.getvalue()


@pytest.mark.parametrize(
    ("check", "status"),
    [(f"{CHECKS}:equal", 0), (f"{CHECKS}:sum_of_samples", 1), (f"{CHECKS}:nothing", 2)],
)
def test_the_ranks_of_torchrun_have_one_status_and_the_first_prints(check, status):
    (first, printed), (second, other) = run_ranks(2, launched, free_port(), [check])
    assert first == second == status
    if status == 2:
        assert "has no attribute" in printed and "has no attribute" in other
    else:
        assert "2 ranks (cpu, gloo)" in printed and other == ""


def test_the_module_runs_without_a_warning():
    done = run_python(
        "-W", "error::RuntimeWarning", "-m", "replication.verify", f"{FILE}:equal", cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("2 ranks: equal (tolerance 1e-06)\n")
