"""What the README and the pages of the site say can be run, and leads somewhere."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import replication
import syncbn
from replication.sync import rendezvous
from tests.kit.programs import run_python, run_pythons
from tests.kit.ranks import as_launched, free_port, needs_gloo, run_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PAGES = [README, *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples"))]
PAGES += [ROOT / "benchmarks" / "details.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages that are made from the docstrings, whose examples run as doctests.
API = [ROOT / "docs" / f"{package}.md" for package in ("replication", "syncbn")]

#: Pages whose blocks are the steps of one program.
JOURNEYS = [ROOT / "docs" / f"{name}.md" for name in ("migration", "layers")]
#: The page whose first block is a program for torchrun.
PROCESSES = ROOT / "docs" / "processes.md"
#: Pages whose blocks are a program each.
OTHERS = [page for page in PAGES if page not in (*JOURNEYS, PROCESSES)]
#: The page that quotes messages.
TROUBLES = ROOT / "docs" / "troubleshooting.md"


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def fenced(page):
    """The language and the text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def blocks(language, pages):
    """All blocks of one language, each a test."""
    return [
        pytest.param(text, f"{name_of(page)}, block {number}", id=f"{name_of(page)}-{number}")
        for page in pages
        for number, (found, text) in enumerate(fenced(page))
        if found == language
    ]


def first(page, language, word=""):
    """The first block of a language on a page that contains a word."""
    return next(text for found, text in fenced(page) if found == language and word in text)


def headings(page):
    """What the headings of a page are called in links to them. A second one has a number."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    found = set()
    for title in re.findall(r"^#+ (.*)$", without_code, re.MULTILINE):
        name = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        found.add(f"{name}-1" if name in found else name)
    return found


@pytest.mark.parametrize(("text", "where"), blocks("python", OTHERS))
def test_examples_run(text, where):
    exec(compile(text, where, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shell_lines_run_as_they_stand(shell, tmp_path):
    """With programs that only print their arguments, which zsh may refuse to expand."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "old.py").write_text("from sync_batchnorm import SynchronizedBatchNorm2d")
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    programs = "pip python python3 pytest ruff mypy sphinx-build torchrun jupyter"
    for name in programs.split():
        (bin / name).write_text('#!/bin/sh\necho "$@"')
        (bin / name).chmod(0o755)
    path = {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    pages = [*PAGES, ROOT / "CONTRIBUTING.md"]
    lines = [text for page in pages for language, text in fenced(page) if language == "sh"]
    assert len(lines) > 5
    for line in lines:
        done = subprocess.run(
            [shell, "-c", line], cwd=tmp_path, env=path, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout and not done.stderr, (line, done)


def test_journeys_run_from_top_to_bottom(tmp_path):
    """Each in a separate process, without a warning."""
    programs = [[text for found, text in fenced(page) if found == "python"] for page in JOURNEYS]
    ended = run_pythons(*(["-c", "\n".join(texts)] for texts in programs), cwd=tmp_path)
    for page, done in zip(JOURNEYS, ended, strict=True):
        assert done.returncode == 0 and not done.stderr, done.stderr
        for shown in re.findall(r'print\(.*\)  # "(.*) \.\.\."', page.read_text("utf-8")):
            assert shown in done.stdout


def test_the_file_that_replaces_a_copy_has_the_names_of_the_copy():
    names = {}
    exec(first(ROOT / "docs" / "migration.md", "py", "from syncbn"), names)
    assert names["SynchronizedBatchNorm2d"] is syncbn.SynchronizedBatchNorm2d
    assert {"DataParallelWithCallback", "convert_model"} <= set(names)


def launched(program, folder):
    """Saves a program and launches it as the page says. Returns the state and the accuracy."""
    command = first(PROCESSES, "sh", "train.py").split()
    _, torchrun, *options, name = command  # after a setting of the environment
    assert torchrun == "torchrun" and "--nproc-per-node=2" in options
    (folder / name).write_text(program)
    done = run_python("-m", "torch.distributed.run", "--standalone", *options, name, cwd=folder)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^2 processes: ([\d.]+)% correct$", done.stdout, re.M)
    return torch.load(folder / "net.pt"), float(accuracy)


def alone(rank, program, folder):
    """The state after the program in a single process, which needs no launcher."""
    as_launched(rank, 1, free_port())
    os.chdir(folder)
    exec(program, {"__name__": "__main__"})
    return torch.load("net.pt", weights_only=True)


#: At the end of the program. A thread of gloo that Python's shutdown meets may abort the process.
NO_THREAD_IS_LEFT = """
from pathlib import Path
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]  # none outside Linux
assert not [name for name in names if "gloo" in name], names
"""


@needs_gloo
def test_the_program_of_several_processes_learns_what_one_process_learns(tmp_path):
    program = first(PROCESSES, "python")
    state, accuracy = launched(program + NO_THREAD_IS_LEFT, tmp_path)
    (said,) = re.findall(r"prints `2 processes: ([\d.]+)% correct`", PROCESSES.read_text("utf-8"))
    assert abs(accuracy - float(said)) < 1  # other machines may round a point to the other side
    torch.testing.assert_close(run_ranks(1, alone, program, tmp_path), [state])
    plain = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    plain.load_state_dict(state)


def layer_of_the_page(name):
    """Makes a layer of docs/layers.md, for 3 features."""
    blocks = fenced(ROOT / "docs" / "layers.md")
    (text,) = [text for _, text in blocks if text.startswith(f"class {name}(")]
    names = {"torch": torch, "nn": nn, "ReplicaAware": replication.ReplicaAware}
    exec(text, names)
    torch.manual_seed(0)
    return names[name](3)


def trained_buffers(rank, name, batches):
    """The buffers of a layer after steps on this rank's part of each batch."""
    layer = layer_of_the_page(name)
    for batch in batches:
        layer(batch if rank is None else batch.chunk(2)[rank])
    return layer.state_dict()


@needs_gloo
@pytest.mark.parametrize("name", ["RunningCenter", "Scores"])
def test_the_buffers_of_layers_agree_on_all_ranks(name):
    """Without DDP, which would copy the buffers of rank 0."""
    batches = torch.randn(3, 7, 3)
    expected = trained_buffers(None, name, batches)
    for actual in run_ranks(2, trained_buffers, name, batches):
        torch.testing.assert_close(actual, expected)


def test_the_layer_with_a_queue_compares_with_earlier_batches():
    layer, x = layer_of_the_page("Scores"), torch.randn(5, 3, requires_grad=True)
    earlier, upstream = layer.queue.clone(), torch.randn(5, 16)
    y = layer(x)
    y.backward(upstream)
    torch.testing.assert_close(y, x @ earlier.T)
    torch.testing.assert_close(x.grad, upstream @ earlier)
    assert layer.queue[:5].equal(x)


@pytest.mark.parametrize(
    ("text", "where"), blocks("pycon", [page for page in PAGES if page not in API])
)
def test_examples_print_what_they_show(text, where):
    test = doctest.DocTestParser().get_doctest(text, {}, where, None, 0)
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def differences():
    """Both sides of the diffs of the README: for processes, for replicas, and of a loss."""
    for language, text in fenced(README):
        if language == "diff":
            lines = text.splitlines()
            assert max(map(len, lines)) <= 48  # the width of a phone
            yield ["\n".join(line[2:] for line in lines if line[0] != sign) for sign in "+-"]


def models(difference, **names):
    """The networks that both sides of a diff make."""
    for code in difference:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        namespace = {"nn": nn, "net": net, **names}
        exec(code, namespace)
        yield namespace["model"]


def test_the_difference_for_replicas_synchronizes():
    _, (before, after), _ = differences()
    plain, model = models((before, after.replace("(net))", '(net), ["cpu"] * 2)')))
    assert type(plain) is nn.DataParallel and type(model) is syncbn.DataParallel
    assert syncbn.verify(model, torch.randn(8, 3))


def losses_of_both_sides(rank, difference, losses, valid):
    """The loss of this rank's part of a batch, before and after the diff."""
    found = []
    for code in difference:
        namespace = {"losses": losses.chunk(2)[rank], "valid": valid.chunk(2)[rank]}
        exec(code, namespace)
        found.append(namespace["loss"])
    return found


@needs_gloo
def test_the_difference_of_a_loss_counts_all_ranks():
    _, _, difference = differences()
    losses, valid = torch.randn(8), torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
    expected = (losses * valid).sum() / valid.sum()
    for own, whole in run_ranks(2, losses_of_both_sides, difference, losses, valid):
        torch.testing.assert_close(whole, expected)
        assert not torch.allclose(own, expected)


def statistics_of_both_sides(rank, difference, x):
    """The running means with this rank's half of a batch, before and after the diff."""
    found = []
    for model in models(difference, DistributedDataParallel=DistributedDataParallel):
        model(x.chunk(2)[rank])
        found.append(model.module[1].running_mean)
    return found


@needs_gloo
def test_the_difference_for_processes_synchronizes():
    difference, _, _ = differences()
    x = torch.cat([torch.zeros(4, 3), torch.ones(4, 3)])
    (plain, synchronized), (others, same) = run_ranks(2, statistics_of_both_sides, difference, x)
    assert not plain.equal(others) and synchronized.equal(same)


#: The public classes and functions, without their older names.
PUBLIC = {
    getattr(package, name).__name__: getattr(package, name)
    for package in (replication, syncbn)
    for name in package.__all__
}


#: What public functions return, and `ReplicaAware.group`. The example is theirs.
RESULTS = {"Difference", "SlavePipe", "Summary", "Verification"}
RESULTS |= {"Group", "ReplicaGroup"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_complete_examples(name):
    """They run in an empty namespace, as when they are copied from `help`."""
    kind = PUBLIC[name]
    documented = [kind, *(vars(kind)[key] for key in vars(kind) if not key.startswith("_"))]
    tests = [
        doctest.DocTestParser().get_doctest(inspect.getdoc(each) or "", {}, name, None, 0)
        for each in documented
    ]
    # Users make neither results nor errors.
    made = name not in RESULTS and not (isinstance(kind, type) and issubclass(kind, Exception))
    assert not made or any(test.examples for test in tests)
    for test in tests:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def texts_of(package):
    """The strings in its code, without the values in between."""
    for path in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def test_the_messages_that_the_page_quotes_are_in_the_code():
    page = TROUBLES.read_text("utf-8")
    items = re.findall(r"^- (`[^`]*`(?:,\s+`[^`]*`)*):", page, re.MULTILINE)
    quoted = {
        " ".join(text.split()).strip(". ") for item in items for text in item.split("`")[1::2]
    }
    torchs = {"Trying to backward through the graph a second time", "terminate called"}
    torchs |= {"reduce_add expects all inputs to be on GPUs"}
    torchs |= {"Timed out waiting", "Connection closed by peer", "Connection reset by peer"}
    torchs |= {"Application timeout caused pair closure", "op.preamble.length <= op.nbytes"}
    torchs |= {"mixed dtype", "expected m1 and m2 to have the same dtype"}
    torchs |= {"received an invalid combination of arguments - got (Scattered"}
    assert len(quoted) > 15 and torchs < quoted
    texts = [*texts_of(replication), *texts_of(syncbn)]
    assert [q for q in quoted - torchs if " " in q and not any(q in text for text in texts)] == []


def test_the_seconds_that_the_guarantees_promise_are_those_of_the_code():
    page = " ".join((ROOT / "docs" / "guarantees.md").read_text("utf-8").split())
    assert f"give up on it after {rendezvous.STALL_TIMEOUT:g} seconds" in page


#: Sources of claims: issues on GitHub, and the paper about detection with small batches.
SOURCES = r"https://github\.com/[\w-]+/[\w-]+/issues/\d+|https://arxiv\.org/abs/1711\.07240"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r" *```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]*)\)", text):
        if re.fullmatch(SOURCES, target):
            continue
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.is_file(), target
        assert not heading or heading in headings(there), target


def test_the_figures_of_the_readme_are_those_of_the_summary():
    costs = README.read_text("utf-8").split("## What does it cost?")[1].split("\n## ")[0]
    summary = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    figures = re.findall(r"\d+\.\d\d to \d+\.\d\d", costs)
    assert len(figures) > 4 and [each for each in figures if each not in summary] == []


def test_the_readme_is_short():
    without_code = re.sub(r"^```.*?^```$", "", README.read_text("utf-8"), flags=re.DOTALL | re.M)
    assert len(without_code.replace("|", " ").split()) <= 750


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "docs"], ids=name_of)
def test_no_guide_is_long(page):
    """Except for the API, which is as long as the docstrings, and for what programs print."""
    text = re.sub(r"^```text\n.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    text = re.sub(r"<!-- (\w+): begin -->.*<!-- \1: end -->", "", text, flags=re.DOTALL)
    assert page in API or len(text.split()) <= 1200


def test_each_library_has_a_test_or_says_that_it_has_none():
    text = (ROOT / "docs" / "libraries.md").read_text("utf-8").split("\n## ")[0]
    _, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    tests = [row.rstrip(" |").rpartition(" | ")[2] for row in rows]
    assert len(rows) == 12 and tests.count("not run here") == 3
    linked = [test for test in tests if re.fullmatch(r"\[[\w ]+\]\(\.\./tests/\w+\.py\)", test)]
    assert len(linked) == 9  # another test follows all links


def test_the_index_has_every_public_name_once():
    text = (ROOT / "docs" / "api-index.md").read_text("utf-8").split("## Names by task")[1]
    names = re.findall(r"(?<=\[`)\w+(?=`\])", text)
    older = {name for name in replication.__all__ if getattr(replication, name).__name__ != name}
    assert len(names) == len(set(names)) and all(f"`{name}`" in text for name in older)
    assert {*names, *older} == {*replication.__all__, *syncbn.__all__}


def test_the_page_of_the_examples_lists_all_of_them():
    page = ROOT / "examples" / "README.md"
    programs = {path.name for path in page.parent.iterdir() if path.suffix in (".py", ".ipynb")}
    assert set(re.findall(r"\[`(.*)`\]\(\1\)", page.read_text("utf-8"))) == programs


def test_the_api_pages_are_as_the_script_writes_them():
    api = runpy.run_path(str(ROOT / "docs" / "api.py"))
    assert {path: path.read_text("utf-8") for path in API} == api["files"]()
    for package, page in zip((replication, syncbn), API, strict=True):
        text = page.read_text("utf-8")
        described = re.findall(r"^### (\w+)$|^\| `(\w+)` \|", text, re.MULTILINE)
        assert sorted(a or b for a, b in described) == sorted(package.__all__)
