"""The example on small batches changes nothing but the layers, and finds what it claims."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kit.programs import EXAMPLES, load_with_progress

pytestmark = pytest.mark.slow

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install '.[examples]'")


@pytest.fixture
def example(monkeypatch):
    # It imports its neighbour train_digits, as it does when it is run as a script.
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return load_with_progress("small_batch", monkeypatch)


def tiny(example, replicas, **more):
    """Two full batches of the largest share on up to four replicas."""
    devices = [torch.device("cpu")] * replicas
    options = {"seeds": 1, "epochs": 1, "samples": 64, "dtype": torch.float64, **more}
    return example.Options(devices, **options)


def weights(runs, kind, share):
    (found,) = [run.weights for run in runs if (run.kind, run.share) == (kind, share)]
    return found


def test_it_prints_a_table_and_draws_the_curves(example, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    arguments = ["--replicas", "2", "--seeds", "2", "--epochs", "1", "--samples", "16"]
    assert example.main([*arguments, "--output", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [
        [str(share), str(2 * share), str(8 // share)] for share in example.SHARES
    ]


def test_the_runs_of_a_seed_differ_in_their_layers_only(example, monkeypatch):
    seen = []

    def record(model, data, lr, shown):
        start = {name: value.clone() for name, value in model.module.state_dict().items()}
        images, digits = map(torch.cat, zip(*data, strict=True))
        seen.append((start, images, digits, [len(batch[1]) for batch in data], lr))

    monkeypatch.setattr(example, "train", record)
    # 5 epochs of 41 on 4 replicas are 6 full batches of 32.
    runs = example.compare(tiny(example, 4, seeds=2, epochs=5, samples=41))
    assert [(run.seed, run.share, run.kind) for run in runs] == [
        (seed, share, kind)
        for seed in range(2)
        for share in (1, 2, 4, 8)
        for kind in ("plain BatchNorm", "synchronized BatchNorm")
    ]
    for run, (start, images, digits, sizes, lr) in zip(runs, seen, strict=True):
        assert sizes == [4 * run.share] * (192 // (4 * run.share))
        assert lr == pytest.approx(0.5 * run.share / 8)
        first = seen[8 * run.seed]
        assert torch.equal(images, first[1])
        assert torch.equal(digits, first[2])
        assert start.keys() == first[0].keys()
        assert all(torch.equal(start[name], first[0][name]) for name in start)
    # The next seed has other weights, other samples.
    assert not torch.equal(runs[0].weights, runs[8].weights)
    assert not torch.equal(seen[0][1], seen[8][1])


@pytest.mark.parametrize(("replicas", "head"), [(2, "pool"), (4, "flatten")])
def test_only_the_synchronized_run_equals_one_device(example, replicas, head):
    one_device = example.compare(tiny(example, 1, head=head))
    runs = example.compare(tiny(example, replicas, head=head))
    for share in (1, 2, 4, 8):
        if share * replicas > 8:
            continue  # one device has at most 8 samples here
        expected = weights(one_device, example.PLAIN, share * replicas)
        # Otherwise the weights have been rounded on the way, and hide small distances.
        assert not torch.equal(expected, expected.float().double())
        synchronized = weights(runs, example.SYNCHRONIZED, share)
        torch.testing.assert_close(synchronized, expected, rtol=0, atol=1e-10)
        assert not torch.allclose(weights(runs, example.PLAIN, share), expected, 0, 1e-4)
