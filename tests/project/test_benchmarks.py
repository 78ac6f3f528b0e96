"""The benchmarks run, their tables are complete, and what they compare with is correct.

How large the figures are is for a quiet machine to say, not for a test.
"""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from benchmarks import __main__ as suite
from benchmarks import layer, overhead, processes, step, yardsticks
from benchmarks.measuring import Row, Table, cells, columns
from benchmarks.networks import NETWORKS, Head, UNet, dense, resnet
from replication import DataParallel
from syncbn import joined
from tests.processes import run_python
from tests.ranks import needs_gloo, run_ranks

#: Small ones, in float64.
SMALL = {
    "dense": (partial(dense, 3, 4), (7, 4, 4, 4)),
    "resnet": (partial(resnet, 2, (1, 1, 1, 1)), (8, 3, 32, 32)),
    "unet": (partial(UNet, 2), (7, 3, 16, 16)),
    "head": (partial(Head, 4), (7, 4, 8, 8)),
}
BATCH_NORM = nn.modules.batchnorm._BatchNorm

#: The benchmarks compare with plain BatchNorm on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning"),
    pytest.mark.slow,
]


def randomized(name):
    """A small network in float64 whose BatchNorms differ from each other, and its input."""
    build, shape = SMALL[name]
    net = build().double()
    for module in net.modules():
        if isinstance(module, BATCH_NORM):
            nn.init.normal_(module.weight, 1, 0.1)
            nn.init.normal_(module.bias)
    return net, torch.randn(shape, dtype=torch.float64, requires_grad=True)


def trained(model, x, upstream):
    """The output, the gradients of input and parameters, after one forward and backward."""
    y = model(x)
    return y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], upstream)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", SMALL)
def test_older_toolkits_scheme_equals_one_device(name, replicas):
    net, x = randomized(name)
    whole = copy.deepcopy(net)
    upstream = torch.randn_like(whole(x))
    whole.load_state_dict(net.state_dict())
    model = yardsticks.DataParallel(yardsticks.convert(net), replicas)
    torch.testing.assert_close(trained(model, x, upstream), trained(whole, x, upstream))
    torch.testing.assert_close(net.state_dict(), whole.state_dict())


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", SMALL)
def test_torchs_scheme_equals_a_batchnorm_per_shard(name, replicas):
    net, x = randomized(name)
    shards = x.chunk(replicas)
    copies = [copy.deepcopy(net) for _ in shards]
    y = torch.cat([own(shard) for own, shard in zip(copies, shards, strict=True)])
    upstream = torch.randn_like(y)
    y.backward(upstream)
    per_copy = zip(*([p.grad for p in own.parameters()] for own in copies), strict=True)
    expected = (y.detach(), x.grad, *(sum(grads) for grads in per_copy))
    model = yardsticks.DataParallel(net, replicas)
    torch.testing.assert_close(trained(model, x, upstream), expected)
    # The first replica shares its buffers with the original.
    torch.testing.assert_close(net.state_dict(), copies[0].state_dict())


def of_rank(rank, name):
    """What a process gets of a batch, and what one device gets."""
    torch.manual_seed(0)
    net, x = randomized(name)
    whole = copy.deepcopy(net)
    upstream = torch.randn_like(whole(x))
    whole.load_state_dict(net.state_dict())
    expected = trained(whole, x, upstream)
    yardsticks.convert(net, yardsticks.ProcessBatchNorm)
    shard = x.detach().tensor_split(2)[rank].requires_grad_()
    y, dx, *grads = trained(net, shard, upstream.tensor_split(2)[rank])
    for grad in grads:
        distributed.all_reduce(grad)
    expected_here = (part.tensor_split(2)[rank] for part in expected[:2])
    torch.testing.assert_close((y, dx, *grads), (*expected_here, *expected[2:]))
    torch.testing.assert_close(net.state_dict(), whole.state_dict())


@needs_gloo
@pytest.mark.parametrize("name", ["unet", "head"])
def test_scheme_of_syncbatchnorm_equals_one_device(name):
    run_ranks(2, of_rank, name)


def test_schemes_evaluate_like_one_device():
    net, x = randomized("unet")
    expected = net.eval()(x)
    kinds = (yardsticks.SynchronizedBatchNorm, yardsticks.ProcessBatchNorm)
    for module in (net, *(yardsticks.convert(copy.deepcopy(net), kind) for kind in kinds)):
        with torch.no_grad():
            y = yardsticks.DataParallel(module, 2)(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected.detach())


def test_schemes_raise_the_error_of_a_replica():
    with pytest.raises(RuntimeError, match="channels"):
        yardsticks.DataParallel(dense(1), 2)(torch.randn(4, 3, 8, 8))


def test_older_layer_synchronizes_in_our_replicas():
    plain = nn.BatchNorm2d(3).double()
    older = yardsticks.convert(nn.Sequential(copy.deepcopy(plain)))
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    ours = trained(DataParallel(older, ["cpu"] * 3), x, upstream)
    torch.testing.assert_close(ours, trained(plain, x, upstream))


@pytest.mark.parametrize(
    ("name", "layers"), [("dense", 100), ("narrow", 53), ("resnet", 53), ("unet", 14), ("head", 8)]
)
def test_networks_match_the_page(name, layers):
    net = NETWORKS[name].build()
    assert sum(isinstance(module, BATCH_NORM) for module in net.modules()) == layers
    _, *shape = NETWORKS[name].shape
    with torch.no_grad():
        assert net(torch.randn(2, *shape)).size(0) == 2


def is_complete(rows, ways, cases, counts, phases):
    """All figures of a table are there, for all ways, cases and numbers of replicas."""
    rows = list(rows)
    assert list(dict.fromkeys(row.case for row in rows)) == list(cases)
    assert {row.count for row in rows} == set(counts)
    for row in rows:
        assert list(row.figures) == list(ways)
        assert all(len(figures) == phases for figures in row.figures.values())
        assert all(0 < value < math.inf for figures in row.figures.values() for value in figures)
    return rows


@pytest.fixture
def here(monkeypatch):
    """Measures in this process with one torch thread, which saves the start of another."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(count, threads, function, *arguments):
        assert count == 1
        return function(0, *arguments)

    for part in (step, layer, overhead):
        monkeypatch.setattr(part, "in_processes", call)
    yield
    torch.set_num_threads(threads_before)


def test_table_of_steps_has_all_networks_and_numbers_of_threads(monkeypatch):
    asked = []
    monkeypatch.setattr(step, "in_processes", lambda *arguments: asked.append(arguments))
    list(step.rows(6.0))
    assert [(threads, name, count) for _, threads, _, name, count, *_ in asked] == [
        (threads, name, count) for name in NETWORKS for threads in (1, 0) for count in (2, 4)
    ]


def test_steps_are_measured(here, monkeypatch):
    for name in NETWORKS:
        build, (_, *shape) = SMALL["resnet" if name == "narrow" else name]
        monkeypatch.setitem(
            NETWORKS, name, NETWORKS[name]._replace(build=build, shape=(2, *shape))
        )
    titles = [network.title for network in NETWORKS.values()]
    is_complete(step.rows(0, threads=[1]), step.WAYS, titles, (2, 4), phases=3)


def test_layers_are_measured(here, monkeypatch):
    shapes = [(tuple(min(size, 4) for size in shape), layout) for shape, layout in layer.INPUTS]
    monkeypatch.setattr(layer, "INPUTS", shapes)
    titles = dict.fromkeys(layer.title(*which) for which in shapes)
    is_complete(layer.rows(0), layer.WAYS, titles, (2,), phases=3)


def test_sizes_are_measured(here, monkeypatch):
    monkeypatch.setattr(joined, "LARGEST", joined.LARGEST)  # restores it
    monkeypatch.setattr(layer, "SIZES", [(2, 3, 4, 4)])
    ways = ("plain BatchNorm", "joined", "one node")
    is_complete(layer.rows_of_sizes(0), ways, ["2 x 3 x 4 x 4, 96 values"], (2,), phases=3)


def test_overhead_is_measured(here, monkeypatch):
    monkeypatch.setattr(overhead, "resnet", SMALL["resnet"][0])
    monkeypatch.setattr(overhead, "SHAPE", (2, 64, 8, 8))
    copies, exchanges, memory = overhead.tables(0)
    ways = ("torch's scheme", "ours", "ours with callbacks", "older toolkits with callbacks")
    is_complete(copies.rows, ways, ["ResNet-50"], (2, 4), phases=1)
    ways = ("older toolkits", "our `SyncMaster`", "`group.all_reduce`")
    is_complete(exchanges.rows, ways, ["exchanges"], (2, 4), phases=1)
    kept = is_complete(memory.rows, layer.WAYS, ["2 x 64 x 8 x 8"], (2, 4), phases=1)
    assert all(row.figures["plain BatchNorm"][0] < 1.1 * row.count / 32 for row in kept)


def test_layer_keeps_its_input_and_nothing_else_of_that_size(here):
    plain, ours, _ = ([row.figures[way][0] for row in overhead.memory(0)] for way in layer.WAYS)
    assert ours == pytest.approx(plain, rel=1e-3)


@needs_gloo
def test_processes_are_measured():
    (row,) = processes.rows(0, ["unet"], [2])
    is_complete([row], processes.WAYS, [NETWORKS["unet"].title], [2], phases=3)
    assert row.threads == 1


def test_program_measures_one_network():
    program = "-m benchmarks.step --network head --replicas 2 --threads 1 --seconds 0"
    done = run_python(*program.split())
    assert done.returncode == 0, done.stderr
    _, _, row = (line for line in done.stdout.splitlines() if line.startswith("|"))
    assert row.startswith("| Detector head, 32 ch, 32x32 to 8x8 | 2 | 1 | ")


def synthetic():
    """Rows of training steps with figures that differ everywhere."""
    return [
        Row(
            NETWORKS[name].title,
            count,
            threads,
            {
                way: tuple(10 + 7 * i + 3 * j + count + threads / 3 + phase for phase in range(3))
                for j, way in enumerate(step.WAYS)
            },
        )
        for i, name in enumerate(NETWORKS)
        for threads in (1, 8)
        for count in (2, 4)
    ]


def test_cells_are_multiples_of_the_first_way():
    figures = {"plain": (10.0, 4.0, 5.0), "ours": (12.0, 5.0, 6.0), "older": (20.0, 8.0, 11.0)}
    row = Row("net", 2, 1, figures)
    assert cells(row) == ["net", "2", "1", "10.00", "1.20 (1.25, 1.20)", "2.00 (2.00, 2.20)"]
    expected = ["case", "replicas", "torch threads", "plain, ms", "ours", "older"]
    assert columns(Table("", "", []), figures) == expected


def rows_of(figures, title):
    """The rows of a published table, by heading."""
    table = figures.split(f"### {title}\n")[1].split("\n### ")[0]
    heading, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("|")
    )
    return [dict(zip(heading, row, strict=True)) for row in rows]


def assert_agrees(figures):
    """Asserts that each span in the paragraph equals the span of a column of the first table."""
    text = figures.strip().partition("\n\n")[0]
    rows = rows_of(figures, "Training steps")
    for threads in {row["torch threads"] for row in rows}:
        (sentences,) = re.findall(rf"threads set to {threads},.*?(?=With torch|$)", text)
        own = [row for row in rows if row["torch threads"] == threads]
        spans = []
        for way, phases in (("ours", 3), ("older toolkits", 1)):
            by_phase = zip(*(re.findall(r"[\d.]+", row[way]) for row in own), strict=True)
            for values in list(by_phase)[:phases]:
                spans.append((min(values, key=float), max(values, key=float)))
        assert (
            re.findall(r"(\d+\.\d+) to (\d+\.\d+)", sentences.split("`syncbn` costs")[0]) == spans
        )


def test_paragraph_agrees_with_its_table():
    assert_agrees(suite.block([Table("Training steps", "About.", synthetic())]))


@pytest.fixture
def published():
    figures = suite.PAGE.read_text("utf-8").split(suite.BEGIN)[1].split(suite.END)[0]
    if "|" not in figures:
        pytest.skip("no run is published")
    return figures


def test_paragraph_of_the_page_agrees_with_its_table(published):
    assert_agrees(published)


def test_figure_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.png"
    suite.figure.draw(synthetic(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
