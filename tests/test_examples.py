"""The example trains as it claims, and notices when it does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install '.[examples]'")

SOURCE = Path(__file__).parent.parent / "examples" / "train_digits.py"
RUNS = ["one device", "replicas, plain BatchNorm", "replicas, synchronized"]


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_digits", SOURCE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    # The progress bar's own thread would outlive the test.
    monkeypatch.setattr(module.tqdm, "monitor_interval", 0)
    return module


def few_steps(path, *more):
    return ["--replicas", "2", "--steps", "8", "--output", str(path), *more]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_prints_a_table_and_draws_the_curves(example, dtype, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert example.main(few_steps(figure, "--dtype", dtype)) == 0
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert [row[:25].rstrip() for row in rows] == RUNS


# Batches of 10 on 4 replicas are 3, 3, 3 and 1.
@pytest.mark.parametrize(("replicas", "batch_size"), [(2, 8), (4, 16), (4, 10)])
def test_the_synchronized_run_alone_is_that_of_one_device(example, replicas, batch_size):
    options = example.Options([torch.device("cpu")] * replicas, batch_size, steps=12)
    one_device, plain, synchronized = example.compare(options)
    assert [run.name for run in (one_device, plain, synchronized)] == RUNS
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


def test_it_fails_if_the_losses_are_no_numbers(example, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "largest_distance", lambda a, b: float("nan"))
    assert example.main(few_steps(tmp_path / "figure.png")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas must be at least 1 (got 0)"),
        (["--steps", "0"], "--steps must be at least 1 (got 0)"),
        (["--batch-size", "9"], "--batch-size 9 gives data to only 3 of 4 replicas"),
        (["--lr", "nan"], "--lr must be a positive number (got nan)"),
        (["--devices", "abacus"], "device 'abacus' cannot be used"),
        (["--devices", "meta"], "device 'meta' cannot be used"),
        (["--devices", "cpu,cpu", "--replicas", "3"], "--devices names 2 devices for 3 replicas"),
        (["--output", "no/such/folder.png"], "--output must be a file in a folder that exists"),
    ],
)
def test_it_refuses_bad_values(example, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        example.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("devices", [["cpu", "cpu", "cpu"], ["cpu,cpu,cpu"], ["cpu,cpu", "cpu"]])
def test_devices_are_separated_by_spaces_or_commas(example, devices):
    options, _ = example.parse_options(["--devices", *devices])
    assert options.devices == [torch.device("cpu")] * 3
    assert options.batch_size == 12
