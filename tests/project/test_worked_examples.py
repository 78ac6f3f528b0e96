"""The examples that need nothing but torch, and the numbers that they print."""

from __future__ import annotations

import copy
import runpy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from replication import DataParallel, verify_ranks
from tests.kit.programs import EXAMPLES, load, run_python
from tests.kit.ranks import needs_gloo, run_ranks


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


def test_padding_has_no_influence(monkeypatch, capsys):
    load("padded_sequences", monkeypatch).main()
    assert capsys.readouterr().out.count("bn(x") == 2


#: Without communication they run as well, and are wrong.
SILENT = ["vector_quantizer", "shuffled_batchnorm"]
TALKING = ["contrastive", "whiten", "hardest", "older_style", *SILENT]


@pytest.mark.parametrize("name", TALKING)
@pytest.mark.parametrize(("replicas", "samples"), [(2, 8), (4, 10), (3, 7), (1, 6)])
def test_communicating_layers_give_the_numbers_of_one_device(name, replicas, samples, monkeypatch):
    found = load(name, monkeypatch).compare(replicas, samples)
    distances = [d for d in (found if isinstance(found, tuple) else (found,)) if type(d) is float]
    assert distances
    assert max(distances) < 1e-12


@pytest.mark.parametrize("name", TALKING)
def test_communicating_layers_run_as_scripts(name, capsys):
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    assert "off by" in capsys.readouterr().out


@pytest.mark.parametrize("name", SILENT)
def test_the_comparison_notices_replicas_that_do_not_communicate(name, monkeypatch):
    found = load(name, monkeypatch).compare(4, 12, group_size=1)
    assert (found[1] if isinstance(found, tuple) else found) > 0.1


def program(name):
    """The names of an example, also in a rank, which has no fixtures."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


# -- between ranks -------------------------------------------------------------------------------


def contrastive_in_ranks():
    return program("contrastive")["in_ranks"]()


def quantizer_in_ranks():
    return program("vector_quantizer")["in_ranks"]()


@needs_gloo
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("make", [contrastive_in_ranks, quantizer_in_ranks])
def test_verify_proves_examples_between_ranks(make, ranks):
    result = verify_ranks(make, ranks)
    assert result, result


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ["contrastive", "vector_quantizer"])
def test_examples_run_under_torchrun(name):
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_python(*launched, str(EXAMPLES / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 ranks: equal")


# -- the vector quantizer ------------------------------------------------------------------------


def train_quantizer(rank, batches):
    """The state of an autoencoder after training, on this rank's part of each batch."""
    example = program("vector_quantizer")
    torch.manual_seed(0)
    quantizer = example["VectorQuantizer"](6, 4)
    net = example["Autoencoder"](nn.Linear(8, 4), quantizer, nn.Linear(4, 8)).double()
    if rank is None:
        example["train"](net, batches)
    else:
        example["train"](DistributedDataParallel(net), batches.chunk(2, dim=1)[rank])
    return net.state_dict()


def codebook_after(rank, batches):
    """The buffers of a quantizer that saw this rank's part of each batch."""
    torch.manual_seed(0)
    quantizer = program("vector_quantizer")["VectorQuantizer"](6, 4).double()
    for batch in batches:
        quantizer(batch if rank is None else batch.chunk(2)[rank])
    return quantizer.state_dict()


@needs_gloo
@pytest.mark.parametrize(
    ("state", "shape"),
    # Of an odd number of vectors without DDP, which copies the buffers of rank 0 and so hides a
    # difference.
    [(train_quantizer, (10, 8, 8)), (codebook_after, (3, 7, 4))],
)
def test_quantizers_in_processes_are_those_of_one_device(state, shape):
    batches = torch.randn(shape, dtype=torch.float64)
    expected = state(None, batches)
    for actual in run_ranks(2, state, batches):
        torch.testing.assert_close(actual, expected)


# -- the shuffled BatchNorm ----------------------------------------------------------------------


def keys_of_rank(rank, images, sizes):
    example = program("shuffled_batchnorm")
    torch.manual_seed(0)
    layer = example["ShuffledKeys"](example["make_encoder"]())
    torch.manual_seed(1 + rank)  # all ranks shuffle as rank 0 does
    return layer(images.split(sizes)[rank])


@needs_gloo
@pytest.mark.parametrize("sizes", [[4, 4], [4, 3], [2, 5]])
def test_keys_are_shuffled_between_processes(sizes, monkeypatch):
    example = load("shuffled_batchnorm", monkeypatch)
    images = torch.randn(sum(sizes), 3, 6, 6, dtype=torch.float64)
    torch.manual_seed(0)
    encoder = example.make_encoder()
    torch.manual_seed(1)
    order = torch.randperm(len(images))
    expected = torch.cat([encoder(shard) for shard in images[order].split(sizes)])
    keys = torch.cat(run_ranks(2, keys_of_rank, images, sizes))
    torch.testing.assert_close(keys[order], expected)


@pytest.mark.parametrize("name", SILENT)
def test_evaluation_neither_communicates_nor_changes_the_layer(name, monkeypatch):
    example = load(name, monkeypatch)
    if name == "vector_quantizer":
        layer, x = example.VectorQuantizer(3, 2), torch.randn(7, 2)
    else:
        layer, x = example.ShuffledKeys(example.make_encoder()), torch.randn(7, 3, 6, 6).double()
    before = copy.deepcopy(layer.eval().state_dict())
    expected = layer(x)
    monkeypatch.setattr(type(layer), "group", None)
    torch.testing.assert_close(DataParallel(layer, ["cpu"] * 3)(x), expected)
    torch.testing.assert_close(layer.state_dict(), before)


def test_the_loss_of_the_first_program_falls(monkeypatch, capsys):
    source = str(EXAMPLES / "minimal.py")
    on_replicas = runpy.run_path(source)["losses"]
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 4 and printed == sorted(printed, reverse=True)
    monkeypatch.setattr("syncbn.DataParallel", lambda net, device_ids: net)
    on_one_device = runpy.run_path(source)["losses"]
    torch.testing.assert_close(on_replicas, on_one_device, rtol=1e-4, atol=0)
