"""The example trains as it claims, and notices when it does not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.deadlines import DEADLINE
from tests.example_files import EXAMPLES, assert_refused, load_with_progress
from tests.processes import completed, environment, run_python
from tests.ranks import needs_gloo

pytestmark = pytest.mark.slow

for package in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(package, reason=f"the example needs {package}: pip install '.[examples]'")

SOURCE = EXAMPLES / "train_digits.py"
RUNS = ["one device", "replicas, plain BatchNorm", "replicas, synchronized"]


@pytest.fixture
def example(monkeypatch):
    return load_with_progress("train_digits", monkeypatch)


def few_steps(path, *more):
    return ["--replicas", "2", "--steps", "8", "--output", str(path), *more]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_prints_a_table_and_draws_the_curves(example, dtype, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert example.main(few_steps(figure, "--dtype", dtype)) == 0
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert [row[:26].rstrip() for row in rows] == RUNS


# Batches of 10 on 4 replicas are 3, 3, 3 and 1.
@pytest.mark.parametrize(("replicas", "batch_size"), [(2, 8), (4, 16), (4, 10)])
def test_only_the_synchronized_run_equals_one_device(example, replicas, batch_size):
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
    assert_refused(example, arguments, message, capsys)


@pytest.mark.parametrize("devices", [["cpu", "cpu", "cpu"], ["cpu,cpu,cpu"], ["cpu,cpu", "cpu"]])
def test_devices_are_separated_by_spaces_or_commas(example, devices):
    options, _ = example.parse_options(["--devices", *devices])
    assert options.devices == [torch.device("cpu")] * 3
    assert options.batch_size == 12


# -- under torchrun ----------------------------------------------------------------------------

TORCHRUN = ["-m", "torch.distributed.run"]


def assert_trained(printed: str) -> None:
    """The table is there, once."""
    titles = [line[:26].rstrip() for line in printed.splitlines()]
    runs = ["one device", "processes, plain BatchNorm", "processes, synchronized"]
    assert [title for title in titles if title in runs] == runs


@needs_gloo
def test_processes_take_the_place_of_replicas(tmp_path):
    figure = str(tmp_path / "figure.png")
    launched = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(SOURCE)]
    done = run_python(*launched, "--steps", "8", "--output", figure)
    assert done.returncode == 0, done.stderr  # the program checks the losses itself
    assert_trained(done.stdout)
    assert Path(figure).exists()


@needs_gloo
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "2"], "--replicas and --devices do not go with torchrun"),
        (["--batch-size", "9"], "--batch-size must be a multiple of 2"),
    ],
)
def test_processes_refuse_what_is_for_replicas(example, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        example.main(arguments)
    assert message in capsys.readouterr().err


class Host:
    """A command prefix that runs a program on a host, its address, and its network device."""

    def __init__(self, prefix: list[str], address: str, device: str) -> None:
        self.prefix, self.address, self.device = prefix, address, device


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=DEADLINE)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two network namespaces with a cable between them; where there can be none, this machine."""
    names = [f"host{os.getpid()}{end}" for end in "ab"]
    made = [
        Host(["ip", "netns", "exec", n], f"10.77.0.{i}", f"v{n}"[:15])
        for i, n in enumerate(names, 1)
    ]
    try:
        if shutil.which("ip") is None:
            raise OSError("no ip")
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", made[0].device, "type", "veth", "peer", "name", made[1].device)
        for name, host in zip(names, made, strict=True):
            ip("link", "set", host.device, "netns", name)
            ip("-n", name, "addr", "add", f"{host.address}/24", "dev", host.device)
            ip("-n", name, "link", "set", host.device, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.SubprocessError):
        made = [Host([], "127.0.0.1", "lo")] * 2
    yield made
    if shutil.which("ip") is not None:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE)


@needs_gloo
def test_two_hosts(hosts, tmp_path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    commands = []
    for rank, host in enumerate(hosts):
        launched = [*TORCHRUN, "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1"]
        where = [f"--master-addr={hosts[0].address}", f"--master-port={port}", str(SOURCE)]
        own = ["--steps", "8", "--output", str(tmp_path / f"{rank}.png")]
        device = ["env", f"GLOO_SOCKET_IFNAME={host.device}"]
        commands.append([*host.prefix, *device, sys.executable, *launched, *where, *own])
    first, second = completed(*commands, env=environment())
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert_trained(first.stdout)
    assert second.stdout == ""
