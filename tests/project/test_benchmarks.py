"""The benchmarks run, their tables are complete, and what they compare with is correct.

How large the figures are is for a quiet machine to say, not for a test.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import __main__ as suite
from benchmarks import compiling, gpu, layer, masks, overhead, processes, step, yardsticks
from benchmarks.measuring import Row, Table, marked
from benchmarks.networks import NETWORKS, Head, UNet, dense, resnet
from syncbn import replicas
from tests.kit.programs import needs_cpp_compiler
from tests.kit.ranks import needs_gloo

#: Small ones, in float64.
SMALL = {
    "dense": (partial(dense, 3, 4), (7, 4, 4, 4)),
    "resnet": (partial(resnet, 2, (1, 1, 1, 1)), (8, 3, 32, 32)),
    "unet": (partial(UNet, 2), (7, 3, 16, 16)),
    "head": (partial(Head, 4), (7, 4, 8, 8)),
}
#: Tables of a process that pretends to be one of two.
ALONE = ["A layer in a process", "Without communication", "Activations"]
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


@pytest.mark.parametrize("name", SMALL)
def test_older_toolkits_scheme_equals_one_device(name):
    net, x = randomized(name)
    whole = copy.deepcopy(net)
    upstream = torch.randn_like(whole(x))
    whole.load_state_dict(net.state_dict())
    model = yardsticks.DataParallel(yardsticks.convert(net), 3)
    torch.testing.assert_close(trained(model, x, upstream), trained(whole, x, upstream))
    torch.testing.assert_close(net.state_dict(), whole.state_dict())


@pytest.fixture
def here(monkeypatch):
    """Measures in this process with one torch thread, which saves the start of another."""

    def call(count, threads, function, *arguments, keeps_memory=True):
        return function(0, *arguments)

    for part in (step, layer, overhead, processes):
        monkeypatch.setattr(part, "in_processes", call)


def tables_of_small_inputs(monkeypatch):
    """The tables of all programs, on networks and layers that take no time."""
    for name in NETWORKS:
        build, (_, *shape) = SMALL["resnet" if name == "narrow" else name]
        monkeypatch.setitem(
            NETWORKS, name, NETWORKS[name]._replace(build=build, shape=(2, *shape))
        )
    monkeypatch.setattr(layer, "INPUTS", [((2, 3, 4, 4), layer.CHANNELS_LAST)])
    monkeypatch.setattr(layer, "SIZES", [(2, 3, 4, 4)])
    monkeypatch.setattr(replicas, "LARGEST_JOINED", replicas.LARGEST_JOINED)  # restores it
    monkeypatch.setattr(overhead, "resnet", SMALL["resnet"][0])
    monkeypatch.setattr(overhead, "SHAPE", (2, 64, 8, 8))
    # Nothing is compiled, because that takes a minute, and no other process is started.
    monkeypatch.setattr(torch, "compile", lambda net: net)
    alone = [table for table in processes.tables(0) if table.title in ALONE]
    steps = [step.table(0), step.table_of_defaults(0)]
    return [*steps, *layer.tables(0), *overhead.tables(0), *alone]


def test_every_figure_of_every_table_is_measured(here, monkeypatch):
    for table in tables_of_small_inputs(monkeypatch):
        rows = list(table.rows)
        assert rows, table.title
        figures = [value for row in rows for own in row.figures.values() for value in own]
        assert all(0 < value < math.inf for value in figures), table.title
        assert len({tuple(row.figures) for row in rows}) == 1, table.title


@needs_cpp_compiler
def test_the_time_to_compile_is_measured():
    (row,) = compiling.table(1, 0).rows
    assert list(row.figures) == ["plain BatchNorm", "syncbn"]
    for whole, graph, kernels in row.figures.values():
        assert whole == pytest.approx(graph + kernels) and graph > 0


@needs_gloo
def test_processes_are_measured(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes a minute
    (row,) = processes.rows(0, ["unet"], [2], compiles=True)
    assert list(row.figures) == list(processes.COMPILED)


def sleeps(rank: int) -> None:
    time.sleep(600)


def test_a_check_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(gpu, "LONGEST", 1.0)
    found = gpu.attempted(partial(gpu.in_processes, 1, 1, sleeps), time.monotonic())
    assert found == "ended: it took more than 1 s"


def test_program_measures_one_network(monkeypatch, capsys):
    program = "benchmarks.step --network head --replicas 2 --threads 1 --seconds 0"
    monkeypatch.setattr(sys, "argv", program.split())
    step.main()
    _, _, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert row.startswith("| Detector head, 32 ch, 32x32 to 8x8 | 2 | 1 | ")


def test_the_page_begins_with_a_line_for_each_way_to_train():
    def table(title, *ratios):
        rows = [
            Row("net", 2, 1, {"plain": (2.0,), "syncbn": (2 * r,), "x": (8.0,)}) for r in ratios
        ]
        return Table(title, "", rows)

    steps, processes = table("Training steps", 1.25, 1.5), table("Between processes", 3)
    tables = {"step": [steps], "processes": [table("Another", 5), processes], "host": []}
    above, meanings = suite.summary(tables).split("\n\n")
    head, _, *lines = (text.split(" | ") for text in above.splitlines())
    assert len(meanings.splitlines()) == len(lines)
    assert lines == [
        [f"| [{where}](details.md#{anchor})", figures, "x: 4.00 |"]
        for where, anchor, figures in (
            ("replicas on the CPU", "training-steps", "1.25 to 1.50"),
            ("processes on the CPU", "between-processes", "3.00"),
        )
    ]
    page = suite.PAGE.read_text("utf-8")
    first = page[: page.index("\n\n", page.index("\n|"))].splitlines()
    assert " | ".join(head) in first and all(where in page for where, _ in suite.SUMMARY.values())


def test_every_table_is_on_the_page_of_details():
    _, figures, _ = marked(suite.DETAILS.read_text("utf-8"), "figures")
    titles = {line[4:] for line in figures.splitlines() if line.startswith("### ")}
    assert {*suite.SUMMARY, "A layer alone", "Copies of a network", "Memory"} <= titles


def test_figure_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.png"
    figures = {way: (1.0 + i,) for i, way in enumerate(step.WAYS)}
    suite.figure.draw([Row("net", count, 1, figures) for count in (2, 4)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
def test_a_mask_breaks_no_graph_and_lets_no_host_wait():
    """As `docs/masks.md` shows. Indexing by a mask does both."""
    assert masks.graphs(masks.Masked) == (0, 0)
    assert masks.host_waits(masks.Masked) == 0
    assert 1 < masks.memory(masks.Masked) < 1.02  # one activation, the mask, and vectors
    assert masks.graphs(masks.Indexed)[0] > 0
    assert masks.host_waits(masks.Indexed) == 4  # to take, to put, and both backward
    assert len({row.count("|") for row in masks.lines(0)}) == 1
