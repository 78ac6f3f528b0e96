"""What only a GPU shows. Skipped where there is none."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu, networks
from benchmarks.gpu import resident
from replication import DataParallel
from syncbn import convert_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Every GPU, or the only one twice.
DEVICES = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
DEVICES = DEVICES if len(DEVICES) > 1 else DEVICES * 2


@pytest.fixture(autouse=True)
def deterministic_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def test_a_network_with_convolutions_has_the_numbers_of_one_device():
    plain = networks.resnet(8).double().to(DEVICES[0])
    model = DataParallel(convert_model(copy.deepcopy(plain)), DEVICES)
    for _ in range(3):
        x = torch.randn(4 * len(DEVICES) - 1, 3, 32, 32).double().to(DEVICES[0])
        dy, found = None, []
        for net in (plain, model):
            leaf = x.clone().requires_grad_()
            y = net(leaf)
            dy = torch.randn_like(y) if dy is None else dy
            found.append([y.detach(), *torch.autograd.grad(y, [leaf, *net.parameters()], dy)])
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_two_hundred_steps_need_no_more_memory_of_host_and_device(monkeypatch):
    """In new threads for each forward, torch would leak cuDNN's plans (pytorch#169153)."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    net = convert_model(nn.Sequential(*[networks.conv(8, 8) for _ in range(10)]))
    model = DataParallel(net.to(DEVICES[0]), DEVICES)
    x = torch.randn(8, 8, 16, 16, device=DEVICES[0])
    sizes = []
    for steps in (20, 200):
        for _ in range(steps):
            model(x).sum().backward()
        gc.collect()
        torch.cuda.synchronize()
        sizes.append((resident(), torch.cuda.memory_allocated(DEVICES[0]) / 2**20))
    (host, device), (host_later, device_later) = sizes
    assert host_later - host < 5
    assert device_later == device


def test_the_self_check_passes_on_replicas_and_on_ranks_that_share_the_gpu():
    for check in (gpu.self_check, gpu.on_ranks):
        assert re.fullmatch(r"[1-9]\d* pass", check())


@pytest.mark.parametrize("samples", [8, 0])
def test_a_layer_of_a_rank_is_captured_even_with_an_empty_shard(samples):
    assert gpu.rank_of_two(0, gpu.captured, samples) == "captured, replayed twice"


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_step_of_a_rank_is_one_graph(mode):
    pytest.importorskip("triton")  # compiled code for GPUs needs it
    assert gpu.rank_of_two(0, gpu.compiled, mode).startswith("one graph, ")
