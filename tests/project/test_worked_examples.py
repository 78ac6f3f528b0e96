"""The examples that need nothing but torch, and the numbers that they print."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.example_files import EXAMPLES, load


@pytest.mark.parametrize(
    "arguments", [[], ["--devices", "cpu", "cpu", "cpu"], ["--devices", "cpu"]]
)
def test_keeping_outputs_scattered(arguments, monkeypatch, capsys):
    assert load("keep_scattered", monkeypatch).main(arguments) == 0
    printed = capsys.readouterr().out
    if not arguments:
        for name in ("features", "out1"):
            assert f"{name}: Scattered of 8, each [2, 2]" in printed
        assert "second_output: [16, 2]" in printed and printed.count("scores: [16, 1]") == 2


@pytest.mark.parametrize(("replicas", "samples"), [(4, 10), (3, 7), (5, 2), (1, 4)])
def test_loss_where_outputs_are_equals_one_device(replicas, samples, monkeypatch):
    example = load("loss_where_outputs_are", monkeypatch)
    loss, grads = example.compare(["cpu"] * replicas, samples)
    assert loss < 1e-14
    assert grads < 1e-14
    assert example.main([]) == 0


def test_items_and_results_of_samples_stay_together(monkeypatch, capsys):
    assert load("per_sample", monkeypatch).main() == 0
    assert capsys.readouterr().out.splitlines()[3] == "('d', 3.0)"


def test_constants_reach_every_replica(monkeypatch, capsys):
    assert load("constants", monkeypatch).main() == 0
    assert capsys.readouterr().out.count("converted with the network: True") == 2


TALKING = ["contrastive", "whiten", "hardest", "older_style"]


@pytest.mark.parametrize("name", TALKING)
@pytest.mark.parametrize(("replicas", "samples"), [(2, 8), (4, 10), (3, 7), (1, 6)])
def test_communicating_layers_give_the_numbers_of_one_device(name, replicas, samples, monkeypatch):
    found = load(name, monkeypatch).compare(replicas, samples)
    distances = [d for d in (found if isinstance(found, tuple) else (found,)) if type(d) is float]
    assert distances
    assert max(distances) < 1e-12


@pytest.mark.parametrize("name", TALKING)
def test_communicating_layers_are_short_and_run_as_scripts(name, capsys):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    assert "off by" in capsys.readouterr().out


def test_the_first_program_is_short_and_its_loss_falls(monkeypatch, capsys):
    source = EXAMPLES / "minimal.py"
    assert len(source.read_text("utf-8").splitlines()) <= 25
    on_replicas = runpy.run_path(str(source))["losses"]
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 4 and printed == sorted(printed, reverse=True)
    monkeypatch.setattr("syncbn.DataParallel", lambda net, device_ids: net)
    on_one_device = runpy.run_path(str(source))["losses"]
    torch.testing.assert_close(on_replicas, on_one_device, rtol=1e-4, atol=0)
