"""The example trains as it claims, and notices when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kit.programs import EXAMPLES, load_with_progress, run_python
from tests.kit.ranks import needs_gloo

pytestmark = pytest.mark.slow

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install '.[examples]'")

SOURCE = EXAMPLES / "train_digits.py"


def runs(copies):
    """The names of the three runs."""
    return ["one device", f"{copies}, plain BatchNorm", f"{copies}, synchronized"]


@pytest.fixture
def example(monkeypatch):
    return load_with_progress("train_digits", monkeypatch)


def few_steps(path, *more):
    return ["--replicas", "2", "--steps", "8", "--output", str(path), *more]


def test_it_prints_a_table_and_draws_the_curves(example, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert example.main(few_steps(figure, "--dtype", "float32")) == 0
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    _, *rows, _, last = capsys.readouterr().out.splitlines()
    assert [row[:28].rstrip() for row in rows] == runs("2 replicas")
    assert last.startswith("Synchronized, 2 replicas have the losses of one device in all 8 steps")


# Batches of 10 on 4 replicas are 3, 3, 3 and 1.
@pytest.mark.parametrize(("replicas", "batch_size"), [(2, 8), (4, 16), (4, 10)])
def test_only_the_synchronized_run_equals_one_device(example, replicas, batch_size):
    options = example.Options([torch.device("cpu")] * replicas, batch_size, steps=12)
    one_device, plain, synchronized = example.compare(options)
    names = [run.name for run in (one_device, plain, synchronized)]
    assert names == runs(f"{replicas} replicas")
    # Otherwise the losses have been rounded on the way, and hide small distances.
    assert not torch.equal(one_device.losses, one_device.losses.float().double())
    for curve in ("losses", "weights"):
        expected = getattr(one_device, curve)
        torch.testing.assert_close(getattr(synchronized, curve), expected, rtol=0, atol=1e-10)
        assert example.largest_distance(getattr(plain, curve), expected) > 1e-4


def test_it_fails_if_the_layers_are_not_synchronized(example, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "convert_model", lambda net: net)
    assert example.main(few_steps(tmp_path / "figure.png")) == 1
    assert "FAILED: synchronized losses must be within 1e-08" in capsys.readouterr().out


# -- under torchrun ----------------------------------------------------------------------------


@needs_gloo
def test_processes_take_the_place_of_replicas(tmp_path):
    figure = str(tmp_path / "figure.png")
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SOURCE)]
    done = run_python(*launched, "--steps", "8", "--output", figure)
    assert done.returncode == 0, done.stderr  # the program checks the losses itself
    titles = [line[:28].rstrip() for line in done.stdout.splitlines()]
    assert [titles.count(run) for run in runs("2 processes")] == [1, 1, 1]
    assert Path(figure).exists()
