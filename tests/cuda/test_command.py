"""`python -m tests.cuda` itself, without the simulation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cuda import __main__ as command
from tests.cuda import environment


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tests.cuda", *arguments])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    return command.main()


@pytest.mark.parametrize("arguments, status", [([], 0), (["--required"], 1)])
def test_a_machine_that_cannot_run_it_is_told_why(monkeypatch, capsys, arguments, status):
    monkeypatch.setattr(environment, "CXX", "no-such-compiler")
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    assert status_of(monkeypatch, *arguments) == status
    line = "simulated CUDA skipped: there is no C++ compiler (looked for 'no-such-compiler')\n"
    assert capsys.readouterr().out == line


def test_parts_that_fail_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(environment, "python", lambda: Path(sys.executable))
    parts = {
        "good": command.Part(2, "-c print('fine')"),
        "bad": command.Part(2, "-c raise(SystemExit('broken'))"),
    }
    monkeypatch.setattr(command, "PARTS", parts)
    assert status_of(monkeypatch) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "simulated CUDA: 1 passed, 1 failed bad"
    assert status_of(monkeypatch, "good") == 0
    assert "good: passed in " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        status_of(monkeypatch, "unknown")


def test_a_part_without_an_end_fails(monkeypatch):
    monkeypatch.setattr(command, "LIMIT", 0.5)
    part = command.Part(2, "-c import(time)".replace("import(time)", "while(True):pass"))
    status, output = command.run(Path(sys.executable), part)
    assert (status, output) == (1, "\nno end within 0.5 s")


def test_what_has_been_made_is_made_once(tmp_path):
    folder = tmp_path / "made"

    def make(*, fails: bool = False) -> bool:
        with environment._made_once(folder) as missing:
            if missing:
                folder.mkdir()
            if fails:
                raise OSError
        return missing

    with pytest.raises(OSError):
        make(fails=True)
    assert make()  # again, as it was not finished
    assert not make()


def test_stubs_say_what_they_are():
    text = environment.stubs_of({"cublasCreate_v2", "cublasSgemm_v2", "cudaNew", "printf"})
    assert 'simulated_missing("cudaNew")' in text
    assert 'simulated_library_launch("cublasSgemm_v2")' in text
    assert "cublasCreate_v2(void* first) { *(void**)first = handle;" in text
    assert "printf" not in text
